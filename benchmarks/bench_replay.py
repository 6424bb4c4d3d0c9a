# SPDX-License-Identifier: Apache-2.0
"""Host time of a graphed layer, forward and backward, beside eager and everybody else's graphs.

A stack of 24 layers of 12 parameters, hidden 1024, on packs of 256 tokens: the host is always the limit.
Times are for each layer of the whole stack, the device idle before each pass, so that no launch waits
for a full queue. Each part runs in a process of its own (`python -m benchmarks.bench_replay PART`): a
capture that fails may leave its process useless.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.measuring.compare import Answer, against_each, caught, unevenness
from benchmarks.measuring.publish import Measurement
from benchmarks.measuring.run_children import measure_part, try_part
from benchmarks.packs.cases import model_options
from benchmarks.replay import time_eager_calls, time_flat_banks, time_rival_layers
from benchmarks.replay.time_own_replays import measure_stacks
from megagraph.cli.demo import quiet_megatron
from megagraph.demo.trainer import ModelOptions, process_groups
from megagraph.results import Figure

HIDDEN = 1024
BARS = {"forward": 4.0, "backward": 5.0}
OWN_SHARE_BAR = 3.0
FLAT_BAR = 1.1
EAGER_BAR = 2.0  # us a model call
_MODULE = "benchmarks.bench_replay"
# By part. The rows of these rivals are one unpacked document.
RIVALS: dict[str, tuple[str, Callable[[ModelOptions], Answer]]] = {
    "torch_plain": (
        "torch.cuda.make_graphed_callables, plain layers",
        time_rival_layers.torchs_graphs_of_plain_layers,
    ),
    "torch": ("torch.cuda.make_graphed_callables", time_rival_layers.torchs_graphs),
    "local": ("Megatron's graphs, local", time_rival_layers.megatrons_graphs),
    "te": (
        "Transformer Engine's make_graphed_callables",
        time_rival_layers.transformer_engines_graphs,
    ),
    "te_eager": ("Transformer Engine's layers, eager", time_rival_layers.transformer_engines_eager),
}
PARTS: dict[str, Callable[[ModelOptions], dict[str, Any]]] = {
    "own": measure_stacks,
    "banks": lambda _: time_flat_banks.measure_banks(),
    "calls": lambda _: time_eager_calls.measure_calls(),
}


# -- figures -------------------------------------------------------------------------------------


def layer_figures(own: Answer, rivals: Mapping[str, Answer]) -> list[Figure]:
    """Each pass of a layer against each rival, the share that is the plugin's own, and what is beside."""
    figures = []
    graphed = own["stack"]["graphed"]
    for phase, bar in BARS.items():
        shares = []
        for which in ("median", "fastest"):
            value, floor = graphed[phase][which], graphed[f"bare {phase}"][which]
            is_barred = which == "median"
            figures += against_each(
                f"host time of a graphed layer, {phase}, {which}",
                value,
                "us",
                {"eager": own["stack"]["eager"], **rivals},
                partial(_read, phase, which),
                bar=bar if is_barred else None,
                floor=floor,
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
    return [*figures, *_further_figures(own["last"], graphed)]


def _read(phase: str, which: str, times: Answer) -> float:
    value: float = times[phase][which]
    return value


def _further_figures(last: Answer, graphed: Answer) -> list[Figure]:
    """What a layer costs in a step's last micro-batch, and what of a micro-batch is not its layers."""
    lasts = [
        Figure(
            name=f"host time of a graphed layer, {phase}, last micro-batch with overlap_grad_reduce",
            value=last["graphed"][phase]["median"],
            unit="us",
            rival="eager",
            rival_value=last["eager"][phase]["median"],
            floor=last["graphed"][f"bare {phase}"]["median"],
        )
        for phase in BARS
    ]
    return [
        *lasts,
        Figure(
            name="host time of a graphed layer, backward without autograd's own call, median",
            value=graphed["backward without engine"]["median"],
            unit="us",
            floor=graphed["bare backward"]["median"],
        ),
        Figure(
            name="own share over bare cudaGraphLaunch, backward without autograd's own call, median",
            value=graphed["backward without engine"]["median"] - graphed["bare backward"]["median"],
            unit="us",
        ),
        Figure(
            name="autograd's own call, a backward pass of one node",
            value=graphed["engine"]["median"],
            unit="us",
        ),
        Figure(name="begin and end of a micro-batch", value=graphed["around"]["median"], unit="us"),
    ]


def bank_figures(banks: Mapping[str, Answer]) -> list[Figure]:
    """Times of each bank, and how flat they are: each against one variant in one slot.

    Autograd's own call, once a micro-batch, is the same in each bank, and left out of the backward.
    """
    figures = []
    sites = time_flat_banks.SITES
    (first, one), *others = banks.items()
    for phase in BARS:
        key = phase if phase == "forward" else "backward without engine"
        name_of_phase = phase if phase == "forward" else "backward without autograd's own call"
        for name, answer in banks.items():
            figures.append(
                Figure(
                    name=f"host time of a site in a chain of {sites}, {name_of_phase}, {name}",
                    value=answer[key]["median"],
                    unit="us",
                    floor=answer[f"bare {phase}"]["median"],
                )
            )
        for name, answer in others:
            bare = f"bare {phase}"
            figures.append(
                Figure(
                    name=f"{name} and {first}, host time, {name_of_phase}: the larger / the smaller",
                    value=unevenness(answer[key]["median"] / one[key]["median"]),
                    unit="ratio",
                    bar=FLAT_BAR,
                    rival="the bare launches",
                    rival_value=unevenness(answer[bare]["median"] / one[bare]["median"]),
                )
            )
    return figures


def call_figures(calls: Mapping[str, Answer]) -> list[Figure]:
    """What the wrappers add to a model call that runs eager. Inside of the layers they add nothing."""
    figures = []
    for name, answer in calls.items():
        title = f"eager through the patch, {name}: a call of a model that does nothing"
        figures += [
            Figure(name=title, value=answer["more"], unit="us more", bar=EAGER_BAR),
            Figure(
                name=f"{title}, median",
                value=answer["patched"]["median"],
                unit="us",
                rival=f"unpatched, median of {answer['samples']}",
                rival_value=answer["unpatched"]["median"],
            ),
        ]
    return figures


def run() -> None:
    """Measures and publishes; raises `RuntimeError` where a part of ours fails."""
    ask = partial(measure_part, _MODULE)
    measurement = Measurement("replay")

    def layers() -> list[Figure]:
        own = ask("own")
        return layer_figures(own, {name: try_part(_MODULE, part) for part, (name, _) in RIVALS.items()})

    measurement.take("layers", layers)
    measurement.take("banks", lambda: bank_figures(ask("banks")))
    measurement.take("calls", lambda: call_figures(ask("calls")))
    measurement.publish()


def _measure(part: str) -> None:
    options = model_options(HIDDEN, layers=time_rival_layers.LAYERS, tokens=time_rival_layers.TOKENS)
    quiet_megatron()
    with process_groups():
        if part in PARTS:
            print(json.dumps(PARTS[part](options)), flush=True)
            return
        print(json.dumps(caught(lambda: RIVALS[part][1](options))), flush=True)
        os._exit(0)  # the process group may wait for ever for what a rival's graph holds of it


if __name__ == "__main__":
    _measure(*sys.argv[1:])
