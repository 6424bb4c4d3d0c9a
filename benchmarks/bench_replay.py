# SPDX-License-Identifier: Apache-2.0
"""Host time of a graphed layer, forward and backward, beside eager and everybody else's graphs.

A stack of 24 layers of 12 parameters, hidden 1024, on packs of 256 tokens: the host is always the limit.
Times are for each layer of the whole stack, the device idle before each pass, so that no launch waits
for a full queue. Each part runs in a process of its own: a capture that fails may leave its process useless.
"""

from functools import partial
from statistics import median
from typing import Any

from benchmarks.measuring.children import Parts, measure_part, try_part
from benchmarks.measuring.results import Figure, against, beside_each, differences, timed, timed_ratio
from benchmarks.subjects import layers
from benchmarks.subjects.packs import model_options

BARS = {"forward": 4.0, "backward": 5.0}
OWN_SHARE_BAR = 3.0
FLAT_BAR = 1.1
AROUND_BAR = 15.0  # us a micro-batch
LAST_BAR = 10.0  # us a layer
NO_ENGINE, WITHOUT_ENGINE = "backward without engine", "backward without autograd's own call"
OPTIONS = model_options(layers.HIDDEN, layers=layers.LAYERS, tokens=layers.TOKENS)
PARTS: Parts = {
    "own": partial(layers.measure_stack, OPTIONS),
    "banks": layers.measure_banks,
    "calls": layers.measure_calls,
    "last": partial(layers.measure_last, OPTIONS),
    **{name: partial(rival, OPTIONS) for name, rival in layers.RIVALS.items()},
}


def _layer_figures() -> list[Figure]:
    """Each pass of a layer against each rival, the share that is the plugin's own, and what is beside.

    Beside: what of a micro-batch is not its layers.
    """
    own, rivals = measure_part(__name__, "own"), {it: try_part(__name__, it) for it in layers.RIVALS}
    graphed, everyone, figures = own["graphed"], {"eager": own["eager"], **rivals}, list[Figure]()
    for phase, bar in BARS.items():
        ours, bare = graphed[phase], graphed[f"bare {phase}"]
        layer = f"host time of a graphed layer, {phase}, median"
        share = f"own share over bare cudaGraphLaunch, {phase}, median"
        middle = timed(layer, ours, "us", bar=bar, floor=median(bare))
        figures += [*beside_each(middle, everyone, phase), _own_share(share, ours, bare, bar=OWN_SHARE_BAR)]
    without, bare, what = graphed[NO_ENGINE], graphed["bare backward"], f"{WITHOUT_ENGINE}, median"
    return [
        *figures,
        timed(f"host time of a graphed layer, {what}", without, "us", floor=median(bare)),
        _own_share(f"own share over bare cudaGraphLaunch, {what}", without, bare),
        timed("autograd's own call, a backward pass of one node", graphed["engine"], "us"),
        timed("begin and end of a micro-batch", graphed["around"], "us", bar=AROUND_BAR),
        timed("a micro-batch's pack read and decided on", graphed["decided"], "us"),
        timed("both, of many micro-batches in a row", graphed["in a row"], "us", bar=AROUND_BAR),
    ]


def _own_share(name: str, ours: list[float], bare: list[float], **more: Any) -> Figure:
    value = median(ours) - median(bare)
    return timed(name, differences(ours, bare), "us", value=value, **more)


def _bank_figures() -> list[Figure]:
    """Times of each bank, and how flat they are: each against one variant in one slot.

    Autograd's own call, once a micro-batch, is the same in each bank, and left out of the backward.
    """
    banks, figures = measure_part(__name__, "banks"), []
    (first, one), *others = banks.items()
    for key, title in {"forward": "forward", NO_ENGINE: WITHOUT_ENGINE}.items():
        bare = f"bare {key.partition(' ')[0]}"
        what = f"host time of a site in a chain of {layers.SITES}, {title}"
        figures += [
            timed(f"{what}, {name}", answer[key], "us", floor=median(answer[bare]))
            for name, answer in banks.items()
        ]
        for name, answer in others:
            pair = f"{name} and {first}, host time, {title}: the larger / the smaller"
            larger = _larger_first(answer[key], one[key])
            its = timed_ratio(pair, *_larger_first(answer[bare], one[bare]), "ratio").value
            figures.append(
                timed_ratio(pair, *larger, "ratio", bar=FLAT_BAR, rival="the bare launches", rival_value=its)
            )
    return figures


def _larger_first(one: list[float], other: list[float]) -> tuple[list[float], list[float]]:
    """A bank is flat where neither it nor the other is slower."""
    return (one, other) if median(one) >= median(other) else (other, one)


def _call_figures() -> list[Figure]:
    """Inside of the layers of an eager call the wrappers add nothing."""
    figures = []
    for name, answer in measure_part(__name__, "calls").items():
        patched, unpatched = answer["patched"], answer["unpatched"]
        call, rival = timed(f"{name}, median", patched, "us"), f"unpatched, median of {len(unpatched)}"
        figures += [
            timed(name, differences(patched, unpatched), "us more", bar=layers.CASES[name].bar),
            against(call, rival, unpatched),
        ]
    return figures


def _last_figures() -> list[Figure]:
    title = "last micro-batch with overlap_grad_reduce, backward of a layer"
    last = measure_part(__name__, "last")
    return [
        timed(f"{title}: own share", last["own"], "us", bar=LAST_BAR),
        timed(f"{title}: all of it, median", last["backward"], "us", floor=median(last["bare"])),
        timed(f"{title}: DDP's part, for each gradient by itself, median", last["megatron"], "us"),
    ]


FIGURES = {"layers": _layer_figures, "banks": _bank_figures, "calls": _call_figures, "last": _last_figures}
