# SPDX-License-Identifier: Apache-2.0
"""How long the capture of a graph takes.

Stacks of 24 layers, with one and with two capacities, and with the progress bar that users see. Ours and
each rival run in a process of their own.
"""

import os
from functools import partial

import megagraph
from benchmarks.measuring.children import Answer, Parts, measure_part, try_part
from benchmarks.measuring.results import Figure, beside_each
from benchmarks.subjects import layers
from benchmarks.subjects.hosts import install_for, made_quickly
from benchmarks.subjects.layers import LAYERS, capture
from benchmarks.subjects.packs import model_options
from megagraph.demo.trainer import Trainer

HIDDEN = (512, 1024, 2048)
RIVALS_HIDDEN = 1024
TOKENS = 1024
# Name to documents of each capacity, and whether progress is shown.
CAPACITIES = {
    "1 capacity": ((8,), False),
    "2 capacities": ((8, 16), False),
    "1 capacity, progress shown": ((8,), True),
}
BAR_MS = 40.0


def measure_own() -> Answer:
    """Of every size with every number of capacities ms a graph, in one process, all kept until the last."""
    # Else a standard error that is no terminal gets no progress.
    os.environ.update(FORCE_COLOR="1", TERM="xterm")
    trainers = {it: made_quickly(Trainer, model_options(it, layers=LAYERS, tokens=TOKENS)) for it in HIDDEN}
    found: Answer = {}
    for name, (num_seqs, shows_progress) in CAPACITIES.items():
        install_for(TOKENS, *num_seqs, cuda_graph_warmup_steps=1, progress=shows_progress)
        for hidden, trainer in trainers.items():
            report = capture(trainer)
            found[f"hidden {hidden}, {name}"] = 1e3 * report["capture_seconds"] / report["graphs"]
        megagraph.uninstall()
    return found


RIVALS = ("torch.cuda.make_graphed_callables", "Megatron's graphs, local")
_OPTIONS = model_options(RIVALS_HIDDEN, layers=LAYERS, tokens=TOKENS)
PARTS: Parts = {"own": measure_own, **{name: partial(layers.RIVALS[name], _OPTIONS) for name in RIVALS}}


def _figures() -> list[Figure]:
    own, figures = measure_part(__name__, "own"), list[Figure]()
    rivals = {name: try_part(__name__, name) for name in RIVALS}
    for name, value in own.items():
        figure = Figure(name=f"{name}: capture", value=value, unit="ms a graph", bar=BAR_MS)
        beside = rivals if name.startswith(f"hidden {RIVALS_HIDDEN},") else {}
        figures += beside_each(figure, beside, "capture") or [figure]
    return figures


FIGURES = {"capture": _figures}
