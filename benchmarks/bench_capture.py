# SPDX-License-Identifier: Apache-2.0
"""How long the capture of a graph takes and on what, how many nodes a graph has, and what it weighs.

Stacks of 24 layers, with one and with two capacities, and with the progress bar that users see. Ours and
each rival run in a process of their own.
"""

import contextlib
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import megagraph
from benchmarks.measuring.children import Answer, Parts, measure_part, try_part
from benchmarks.measuring.clocks import outside_bytes
from benchmarks.measuring.results import Figure, Measurement, beside_each, plain
from benchmarks.subjects.hosts import install_for
from benchmarks.subjects.inside import graphs_of
from benchmarks.subjects.layers import LAYERS, made_quickly, megatrons_graphs, torchs_graphs
from benchmarks.subjects.packs import a_pack, model_options
from megagraph import _C
from megagraph.bank.backends import CudaBackend
from megagraph.bank.bank import Bank
from megagraph.bank.capture import CapturePlan
from megagraph.demo.trainer import ModelOptions, Trainer

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


class _Watch:
    """Seconds by phase, nodes of every graph, and device memory around a capture."""

    def __init__(self, layers: int) -> None:
        self.passes = itertools.cycle([0] * layers + [1] * layers)  # of each variant all forwards come first
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.nodes: list[list[int]] = [[], []]  # of forwards, of backwards
        self.own_bytes = 0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def of_capture(self, capture: Any) -> SimpleNamespace:
        """Times one graph's capture; stands in for `_C.CudaCapture`."""
        of, recorded = next(self.passes), contextlib.ExitStack()

        def begin() -> None:
            with self.timed("begin"):
                capture.begin()
            recorded.enter_context(self.timed(("forward", "backward")[of]))

        def end() -> Any:
            recorded.close()
            with self.timed("end"):
                executable = capture.end()
            self.nodes[of].append(executable.num_nodes)
            return executable

        return SimpleNamespace(begin=begin, end=end, abort=capture.abort)


@contextmanager
def _watched(watch: _Watch) -> Iterator[None]:
    """Watches the captures inside."""
    capture_type, settle, capture = _C.CudaCapture, CudaBackend.settle, Bank.capture

    def watched_bank(self: Bank, *args: Any, **kwargs: Any) -> None:
        settle(self.backend)  # type: ignore[arg-type]  # a CUDA bank's
        before = outside_bytes()
        capture(self, *args, **kwargs)
        watch.own_bytes += outside_bytes() - before

    replaced: tuple[tuple[Any, str, Any], ...] = (
        (_C, "CudaCapture", lambda *args: watch.of_capture(capture_type(*args))),
        (CapturePlan, "warm_up", watch.timed("warm up")(CapturePlan.warm_up)),
        (gc, "collect", watch.timed("collect")(gc.collect)),
        (CudaBackend, "settle", watch.timed("settle")(settle)),
        (Bank, "capture", watched_bank),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def _capture(trainer: Trainer, tokens: int) -> Answer:
    """Trains until everything is captured. Raises `RuntimeError` where a layer is not."""
    packs = [a_pack(tokens)]
    trainer.forward_backward(packs)
    watch = _Watch(trainer.options.layers)
    with _watched(watch):
        trainer.forward_backward(packs)
    report = graphs_of(trainer).report()
    expected = 2 * report["layers"] * len(report["capacities"])
    if report["failures"] or report["graphs"] != expected:
        raise RuntimeError(f"expected {expected} graphs, got {report}")
    return {
        **{"graphs": report["graphs"], "capture_seconds": report["capture_seconds"]},
        **{"seconds": watch.seconds, "own_bytes": watch.own_bytes},
        "nodes": [sum(nodes) / max(1, len(nodes)) for nodes in watch.nodes],
        "all_nodes": sum(map(sum, watch.nodes)),
    }


def measure_own() -> dict[str, dict[str, Answer]]:
    """Every size with every number of capacities, in one process, all kept until the last."""
    # Else a standard error that is no terminal gets no progress.
    os.environ.update(FORCE_COLOR="1", TERM="xterm")
    options = {hidden: model_options(hidden, layers=LAYERS, tokens=TOKENS) for hidden in HIDDEN}
    trainers = {hidden: made_quickly(Trainer, each) for hidden, each in options.items()}
    measured: dict[str, dict[str, Answer]] = {str(hidden): {} for hidden in HIDDEN}
    for name, (num_seqs, shows_progress) in CAPACITIES.items():
        install_for(TOKENS, *num_seqs, cuda_graph_warmup_steps=1, progress=shows_progress)
        try:
            for hidden, trainer in trainers.items():
                measured[str(hidden)][name] = _capture(trainer, TOKENS)
        finally:
            megagraph.uninstall()
    return measured


RIVALS: dict[str, Callable[[ModelOptions], Answer]] = {
    "torch.cuda.make_graphed_callables": torchs_graphs,
    "Megatron's graphs, local": megatrons_graphs,
}
_OPTIONS = model_options(RIVALS_HIDDEN, layers=LAYERS, tokens=TOKENS)
PARTS: Parts = {"own": measure_own, **{name: partial(rival, _OPTIONS) for name, rival in RIVALS.items()}}


def figures_of(own: dict[str, dict[str, Answer]], rivals: dict[str, Answer]) -> list[Figure]:
    """The figures, from what the processes answered.

    What executables take outside of the allocator only the first capture shows.
    """
    figures: list[Figure] = []
    for hidden, by_capacities in own.items():
        for name, answer in by_capacities.items():
            where, seconds = f"hidden {hidden}, {name}", answer["capture_seconds"]
            scale = 1e3 / answer["graphs"]
            figure = Figure(name=f"{where}: capture", value=scale * seconds, unit="ms a graph", bar=BAR_MS)
            beside = rivals if int(hidden) == RIVALS_HIDDEN else {}
            rows = beside_each(figure, beside, lambda of: 1e3 * float(of["seconds"]) / int(of["graphs"]))
            figures += rows or [figure]
            parts = {what: answer["seconds"][phase] for phase, what in PHASES.items()}
            parts["the rest"] = seconds - sum(parts.values())
            figures += plain(where, {f"of it {p}": (scale * of, "ms a graph") for p, of in parts.items()})
        first = by_capacities["1 capacity"]
        (forward, backward), kib = first["nodes"], first["own_bytes"] / 2**10
        weights = {
            "nodes of a forward graph": (forward, "nodes"),
            "nodes of a backward graph": (backward, "nodes"),
            "executables' own memory": (kib / first["graphs"], "KiB a graph"),
            "executables' own memory, by node": (kib / max(1, first["all_nodes"]), "KiB a node"),
        }
        figures += plain(f"hidden {hidden}", weights)
    return figures


def _everything() -> list[Figure]:
    return figures_of(measure_part(__name__, "own"), {name: try_part(__name__, name) for name in RIVALS})


def measure(measurement: Measurement) -> None:
    measurement.take("capture", _everything)
