# SPDX-License-Identifier: Apache-2.0
"""Host time of a graphed layer, forward and backward, beside eager and everybody else's graphs.

A stack of 24 layers of 12 parameters, hidden 1024, on packs of 256 tokens: the host is always the limit.
Times are for each layer of the whole stack, the device idle before each pass, so that no launch waits
for a full queue. Each part runs in a process of its own (`python -m benchmarks.bench_replay PART`).
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import eager_calls, flat_bank, tables
from benchmarks.own_replays import measure_stacks
from benchmarks.parts import Answer, against, caught, measure_part, try_part
from benchmarks.rival_layers import (
    LAYERS,
    megatrons_graphs,
    model_options,
    torchs_graphs,
    torchs_graphs_of_plain_layers,
    transformer_engine_times,
)
from megagraph.cli.demo import quiet_megatron
from megagraph.cli.trainer import process_groups
from megagraph.results import Figure

HIDDEN = 1024
BARS = {"forward": 4.0, "backward": 5.0}
OWN_SHARE_BAR = 3.0
FLAT_BAR = 1.1
EAGER_BAR = 2.0  # us a layer call
# The rows of these rivals are one unpacked document.
TORCH = "torch.cuda.make_graphed_callables"
TORCH_PLAIN = f"{TORCH}, plain layers"
LOCAL = "Megatron's graphs, local"
TE, TE_EAGER = "Transformer Engine's make_graphed_callables", "Transformer Engine's layers, eager"
_MODULE = "benchmarks.bench_replay"


def _measure_rivals() -> dict[str, Answer]:
    options = model_options(HIDDEN)
    return {
        TORCH_PLAIN: caught(lambda: torchs_graphs_of_plain_layers(options)),
        TORCH: caught(lambda: torchs_graphs(options)),
        LOCAL: caught(lambda: megatrons_graphs(options)),  # last: it changes the process's streams
    }


def _measure_transformer_engine() -> dict[str, Answer]:
    answer = caught(lambda: transformer_engine_times(model_options(HIDDEN)))
    if "error" in answer:
        return {TE: answer, TE_EAGER: answer}
    return {TE: answer["graphed"], TE_EAGER: answer["eager"]}


def _measure_further() -> dict[str, Answer]:
    return {"banks": flat_bank.measure_banks(), "calls": eager_calls.measure_calls()}


_PHASES = {"forward": "forward", "backward": "backward without autograd's own call"}

PARTS: dict[str, Callable[[], dict[str, Answer]]] = {
    "own": lambda: measure_stacks(model_options(HIDDEN)),
    "rivals": _measure_rivals,
    "te": _measure_transformer_engine,
    "further": _measure_further,
}


# -- figures -------------------------------------------------------------------------------------


def _layer_figures(own: Answer, rivals: dict[str, Answer]) -> list[Figure]:
    """Each pass of a layer against each rival, and the share that is the plugin's own."""
    figures = []
    engine = own["stack"]["graphed"]["engine"]
    for phase, bar in BARS.items():
        shares = []
        for which in ("median", "fastest"):
            value = own["stack"]["graphed"][phase][which]
            if phase == "backward":  # once a micro-batch, and a row of its own
                value -= engine[which] / LAYERS
            floor = own["stack"]["graphed"][f"bare {phase}"][which]
            is_barred = which == "median"
            for rival, answer in {"eager": own["stack"]["eager"], **rivals}.items():
                figures.append(
                    against(
                        f"host time of a graphed layer, {_PHASES[phase]}, {which}",
                        value,
                        "us",
                        rival,
                        answer,
                        partial(_read, phase, which),
                        bar=bar if is_barred else None,
                        floor=floor,
                    )
                )
            shares.append(
                Figure(
                    name=f"own share over bare cudaGraphLaunch, {phase}, {which}",
                    value=value - floor,
                    unit="us",
                    bar=OWN_SHARE_BAR if is_barred else None,
                )
            )
        figures += shares
    return figures


def _read(phase: str, which: str, times: Answer) -> float:
    value: float = times[phase][which]
    return value


def _micro_batch_figures(own: Answer) -> list[Figure]:
    """What a layer costs in a step's last micro-batch, and what a micro-batch costs beside its layers."""
    figures = []
    last = own["last"]
    for phase in BARS:
        figures.append(
            Figure(
                name=f"host time of a graphed layer, {phase}, last micro-batch with overlap_grad_reduce",
                value=last["graphed"][phase]["median"],
                unit="us",
                rival="eager",
                rival_value=last["eager"][phase]["median"],
                floor=last["graphed"][f"bare {phase}"]["median"],
            )
        )
    graphed = own["stack"]["graphed"]
    for phase, name in (
        ("around", "begin and end of a micro-batch"),
        ("engine", "autograd's own call, a backward pass of one node"),
    ):
        figures.append(Figure(name=name, value=graphed[phase]["median"], unit="us"))
    return figures


def _bank_figures(banks: dict[str, Answer]) -> list[Figure]:
    """Times of each bank, and how flat they are: each against one variant in one slot."""
    figures = []
    sites = flat_bank.SITES
    for phase in BARS:
        for name, answer in banks.items():
            figures.append(
                Figure(
                    name=f"host time of a site in a chain of {sites}, {phase}, {name}",
                    value=answer[phase]["median"],
                    unit="us",
                    floor=answer[f"bare {phase}"]["median"],
                )
            )
        one, *others = banks.items()
        for name, answer in others:
            figures.append(
                Figure(
                    name=f"{name} / {one[0]}, host time, {phase}",
                    value=answer[phase]["median"] / one[1][phase]["median"],
                    unit="ratio",
                    bar=FLAT_BAR,
                    rival=f"the bare launches, {name} / {one[0]}",
                    rival_value=answer[f"bare {phase}"]["median"] / one[1][f"bare {phase}"]["median"],
                )
            )
    return figures


def _call_figures(calls: dict[str, Answer]) -> list[Figure]:
    """What the patch adds to a model call that runs eager, and to each of the layer calls in it.

    It adds nothing inside of the layers, so that the models measured have few of them.
    """
    figures = []
    for name, answer in calls.items():
        patched, unpatched = answer["patched"], answer["unpatched"]
        for which in ("median", "fastest"):
            more = patched[which] - unpatched[which]
            figures.append(
                Figure(
                    name=f"eager through the patch, {name}: a layer call of {LAYERS}, {which}",
                    value=more / LAYERS,
                    unit="us more",
                    bar=EAGER_BAR if which == "median" else None,
                )
            )
        figures.append(
            Figure(
                name=f"eager through the patch, {name}: a model call",
                value=patched["median"],
                unit="us",
                rival=f"unpatched, median of {answer['samples']}",
                rival_value=unpatched["median"],
            )
        )
    return figures


def _figures(own: Answer, rivals: dict[str, Answer], further: Answer) -> list[Figure]:
    return [
        *_layer_figures(own, rivals),
        *_micro_batch_figures(own),
        *_bank_figures(further["banks"]),
        *_call_figures(further["calls"]),
    ]


def run() -> None:
    """Measures and publishes; raises `RuntimeError` where a part of ours fails."""
    own = measure_part(_MODULE, "own")
    rivals = try_part(_MODULE, "rivals", (TORCH_PLAIN, TORCH, LOCAL)) | try_part(
        _MODULE, "te", (TE, TE_EAGER)
    )
    tables.publish("replay", _figures(own, rivals, measure_part(_MODULE, "further")))


def _measure(part: str) -> None:
    quiet_megatron()
    with process_groups():
        measured: dict[str, Any] = PARTS[part]()
    print(json.dumps(measured))


if __name__ == "__main__":
    _measure(*sys.argv[1:])
