# SPDX-License-Identifier: Apache-2.0
"""How long the capture of a graph takes and on what, how many nodes a graph has, and what it weighs.

Stacks of 24 layers, with one and with two capacities, and with the progress bar that users see. Ours and
each rival run in a process of their own (`python -m benchmarks.bench_capture PART`).
"""

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.measuring.compare import Answer, against_each, caught
from benchmarks.measuring.publish import Measurement
from benchmarks.measuring.read_memory import outside_bytes
from benchmarks.measuring.run_children import measure_part, try_part
from benchmarks.packs.cases import model_options
from benchmarks.replay.time_rival_layers import (
    LAYERS,
    a_pack,
    made_quickly,
    megatrons_graphs,
    torchs_graphs,
)
from megagraph import _C, megatron
from megagraph.bank.backends import CudaBackend
from megagraph.bank.bank import Bank
from megagraph.cli.demo import quiet_megatron
from megagraph.config import GraphConfig
from megagraph.demo.trainer import ModelOptions, Trainer, process_groups
from megagraph.megatron.patch.installation import installed_plugin
from megagraph.results import Figure

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
PHASES = {
    "warm up": "warm-up",
    "begin": "beginning captures",
    "forward": "recording forwards",
    "backward": "recording backwards",
    "end": "ending captures: instantiate and upload",
    "settle": "waiting for the device, freeing memory",
    "collect": "collecting garbage",
}
_MODULE = "benchmarks.bench_capture"
_BANK: Any = importlib.import_module("megagraph.bank")  # some of its names are replaced for a while


class _Watch:
    """Seconds by phase, nodes of every graph, and device memory around a capture."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.nodes: list[list[int]] = [[], []]  # of forwards, of backwards
        self.own_bytes = 0
        self._recorded = 0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def next_pass(self) -> int:
        """0 for a forward, 1 for a backward: of each variant all forwards come first."""
        self._recorded += 1
        return (self._recorded - 1) // self._layers % 2

    def answer(self) -> Answer:
        """Everything, as JSON."""
        return {
            "seconds": self.seconds,
            "nodes": [sum(nodes) / max(1, len(nodes)) for nodes in self.nodes],
            "all_nodes": sum(map(sum, self.nodes)),
            "own_bytes": self.own_bytes,
        }


class _WatchedCapture:
    """Times one graph's capture; stands in for `_C.CudaCapture`."""

    def __init__(self, watch: _Watch, capture: Any) -> None:
        self._watch, self._capture = watch, capture
        self._pass = watch.next_pass()
        self._begun = 0.0

    def begin(self) -> None:
        with self._watch.timed("begin"):
            self._capture.begin()
        self._begun = time.perf_counter()

    def end(self) -> Any:
        phase = ("forward", "backward")[self._pass]
        self._watch.seconds[phase] += time.perf_counter() - self._begun
        with self._watch.timed("end"):
            executable = self._capture.end()
        self._watch.nodes[self._pass].append(executable.num_nodes)
        return executable

    def abort(self) -> None:
        self._capture.abort()


@contextmanager
def _watched(watch: _Watch) -> Iterator[None]:
    """Watches the captures inside."""
    capture_type, warm_up, collect = _C.CudaCapture, _BANK.warm_up_variant, gc.collect
    settle, capture = CudaBackend.settle, Bank.capture

    def watched_warm_up(*args: Any, **kwargs: Any) -> None:
        with watch.timed("warm up"):
            warm_up(*args, **kwargs)

    def watched_collect(*args: Any) -> int:
        with watch.timed("collect"):
            return collect(*args)

    def watched_settle(self: CudaBackend) -> None:
        with watch.timed("settle"):
            settle(self)

    def watched_bank(self: Bank, *args: Any, **kwargs: Any) -> None:
        settle(self.backend)  # type: ignore[arg-type]  # a CUDA bank's
        before = outside_bytes()
        capture(self, *args, **kwargs)
        watch.own_bytes += outside_bytes() - before

    replaced: tuple[tuple[Any, str, Any, Any], ...] = (
        (_C, "CudaCapture", capture_type, lambda *args: _WatchedCapture(watch, capture_type(*args))),
        (_BANK, "warm_up_variant", warm_up, watched_warm_up),
        (gc, "collect", collect, watched_collect),
        (CudaBackend, "settle", settle, watched_settle),
        (Bank, "capture", capture, watched_bank),
    )
    for owner, name, _, stand_in in replaced:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for owner, name, original, _ in replaced:
            setattr(owner, name, original)


def _capture(trainer: Trainer, tokens: int) -> Answer:
    """Trains until everything is captured. Raises `RuntimeError` where a layer is not."""
    packs = [a_pack(tokens)]
    trainer.forward_backward(packs)
    watch = _Watch(trainer.options.layers)
    with _watched(watch):
        trainer.forward_backward(packs)
    plugin = installed_plugin()
    assert plugin is not None
    report = plugin.graphs_of_model(trainer.chunk).report()
    expected = 2 * report["layers"] * len(report["capacities"])
    if report["failures"] or report["graphs"] != expected:
        raise RuntimeError(f"expected {expected} graphs, got {report}")
    return {"graphs": report["graphs"], "capture_seconds": report["capture_seconds"], **watch.answer()}


def measure_own() -> dict[str, dict[str, Answer]]:
    """Every size with every number of capacities, in one process, all kept until the last."""
    trainers = {
        hidden: made_quickly(Trainer, model_options(hidden, layers=LAYERS, tokens=TOKENS))
        for hidden in HIDDEN
    }
    measured: dict[str, dict[str, Answer]] = {str(hidden): {} for hidden in HIDDEN}
    for name, (num_seqs, shows_progress) in CAPACITIES.items():
        megatron.install(
            GraphConfig(
                cuda_graph_max_packed_seqs=num_seqs,
                max_seqlen_per_dp_cp_rank=TOKENS,
                cuda_graph_warmup_steps=1,
                progress=shows_progress,
            )
        )
        try:
            for hidden, trainer in trainers.items():
                measured[str(hidden)][name] = _capture(trainer, TOKENS)
        finally:
            megatron.uninstall()
    return measured


RIVALS: dict[str, tuple[str, Callable[[ModelOptions], Answer]]] = {
    "torch": ("torch.cuda.make_graphed_callables", torchs_graphs),
    "local": ("Megatron's graphs, local", megatrons_graphs),
}


# -- figures -------------------------------------------------------------------------------------


def _ms_a_graph(rival: Answer) -> float:
    milliseconds: float = 1e3 * rival["seconds"] / rival["graphs"]
    return milliseconds


def figures_of(own: dict[str, dict[str, Answer]], rivals: dict[str, Answer]) -> list[Figure]:
    """The figures, from what the processes answered."""
    figures: list[Figure] = []
    for hidden, by_capacities in own.items():
        for name, answer in by_capacities.items():
            where = f"hidden {hidden}, {name}"
            value = 1e3 * answer["capture_seconds"] / answer["graphs"]
            if int(hidden) == RIVALS_HIDDEN:
                title = f"{where}: capture"
                figures += against_each(title, value, "ms a graph", rivals, _ms_a_graph, bar=BAR_MS)
            else:
                figures.append(Figure(name=f"{where}: capture", value=value, unit="ms a graph", bar=BAR_MS))
            figures += _split(where, answer)
        figures += _weights(f"hidden {hidden}", by_capacities["1 capacity"])
    return figures


def _split(where: str, answer: Answer) -> list[Figure]:
    """Where the time goes, in ms of the whole capture divided by its graphs."""
    scale = 1e3 / answer["graphs"]
    figures = [
        Figure(name=f"{where}: of it {what}", value=scale * answer["seconds"][phase], unit="ms a graph")
        for phase, what in PHASES.items()
    ]
    rest = answer["capture_seconds"] - sum(answer["seconds"].values())
    return [*figures, Figure(name=f"{where}: of it the rest", value=scale * rest, unit="ms a graph")]


def _weights(where: str, answer: Answer) -> list[Figure]:
    """Nodes, and what executables take outside of the allocator: only the first capture shows that."""
    forward, backward = answer["nodes"]
    own_bytes, nodes = answer["own_bytes"], max(1, answer["all_nodes"])
    return [
        Figure(name=f"{where}: nodes of a forward graph", value=forward, unit="nodes"),
        Figure(name=f"{where}: nodes of a backward graph", value=backward, unit="nodes"),
        Figure(
            name=f"{where}: executables' own memory",
            value=own_bytes / 2**10 / answer["graphs"],
            unit="KiB a graph",
        ),
        Figure(
            name=f"{where}: executables' own memory, by node",
            value=own_bytes / 2**10 / nodes,
            unit="KiB a node",
        ),
    ]


def run() -> None:
    """Measures and publishes; raises `RuntimeError` where ours fails."""
    measurement = Measurement("capture")

    def everything() -> list[Figure]:
        own = measure_part(_MODULE, "own")
        return figures_of(own, {name: try_part(_MODULE, part) for part, (name, _) in RIVALS.items()})

    measurement.take("capture", everything)
    measurement.publish()


def _measure(part: str) -> None:
    quiet_megatron()
    with process_groups():
        if part == "own":
            # Without these no progress is drawn where standard error is no terminal.
            os.environ.update(FORCE_COLOR="1", TERM="xterm")
            gc.collect()  # in a fork the first collection copies pages
            print(json.dumps(measure_own()), flush=True)
            return
        options = model_options(RIVALS_HIDDEN, layers=LAYERS, tokens=TOKENS)
        print(json.dumps(caught(lambda: RIVALS[part][1](options))), flush=True)
        os._exit(0)  # the process group may wait for ever for what a rival's graph holds of it


if __name__ == "__main__":
    _measure(*sys.argv[1:])
