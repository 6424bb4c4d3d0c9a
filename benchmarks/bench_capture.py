# SPDX-License-Identifier: Apache-2.0
"""How long the capture of a graph takes and on what, how many nodes a graph has, and what it weighs.

Stacks of 24 layers, with one and with two capacities. Ours and the rivals run in a process each
(`python -m benchmarks.bench_capture PART`).
"""

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks import tables
from benchmarks.parts import Answer, against, caught, measure_part, try_part
from benchmarks.rival_layers import (
    LAYERS,
    a_pack,
    made_quickly,
    megatrons_graphs,
    model_options,
    torchs_graphs,
)
from megagraph import _C, megatron
from megagraph.backends import CudaBackend
from megagraph.bank import Bank
from megagraph.cli.demo import quiet_megatron
from megagraph.cli.trainer import Trainer, process_groups
from megagraph.config import GraphConfig
from megagraph.megatron.installation import installed_plugin
from megagraph.results import Figure

HIDDEN = (512, 1024, 2048)
RIVALS_HIDDEN = 1024
TOKENS = 1024
CAPACITIES = {"1 capacity": (8,), "2 capacities": (8, 16)}
BAR_MS = 40.0
TORCH, LOCAL = "torch.cuda.make_graphed_callables", "Megatron's graphs, local"
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


def _bytes_outside() -> int:
    """Device memory in use that is not the allocator's."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@contextmanager
def _watched(watch: _Watch) -> Iterator[None]:
    """Watches the captures inside; on the host there is nothing to see."""
    if not torch.cuda.is_available():
        yield
        return
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
        before = _bytes_outside()
        capture(self, *args, **kwargs)
        watch.own_bytes += _bytes_outside() - before

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


def measure_own(
    sizes: tuple[int, ...] = HIDDEN, layers: int = LAYERS, tokens: int = TOKENS
) -> dict[str, dict[str, Answer]]:
    """Every size with every number of capacities, in one process, all kept until the last."""
    trainers = {
        hidden: made_quickly(Trainer, model_options(hidden, layers=layers, tokens=tokens)) for hidden in sizes
    }
    measured: dict[str, dict[str, Answer]] = {str(hidden): {} for hidden in sizes}
    for name, num_seqs in CAPACITIES.items():
        megatron.install(
            GraphConfig(
                cuda_graph_max_packed_seqs=num_seqs,
                max_seqlen_per_dp_cp_rank=tokens,
                cuda_graph_warmup_steps=1,
                progress=False,
            )
        )
        try:
            for hidden, trainer in trainers.items():
                measured[str(hidden)][name] = _capture(trainer, tokens)
        finally:
            megatron.uninstall()
    return measured


def _measure_rivals() -> dict[str, Answer]:
    options = model_options(RIVALS_HIDDEN, tokens=TOKENS)
    return {
        TORCH: caught(lambda: torchs_graphs(options)),
        LOCAL: caught(lambda: megatrons_graphs(options)),  # last: it changes the process's streams
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"own": measure_own, "rivals": _measure_rivals}


# -- figures -------------------------------------------------------------------------------------


def _ms_a_graph(rival: Answer) -> float:
    milliseconds: float = 1e3 * rival["seconds"] / rival["graphs"]
    return milliseconds


def _figures(own: dict[str, dict[str, Answer]], rivals: dict[str, Answer]) -> list[Figure]:
    figures = []
    for hidden, by_capacities in own.items():
        for name, answer in by_capacities.items():
            where = f"hidden {hidden}, {name}"
            value = 1e3 * answer["capture_seconds"] / answer["graphs"]
            if int(hidden) == RIVALS_HIDDEN:
                for rival, theirs in rivals.items():
                    figures.append(
                        against(
                            f"{where}: capture", value, "ms a graph", rival, theirs, _ms_a_graph, bar=BAR_MS
                        )
                    )
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
    own = measure_part(_MODULE, "own")
    tables.publish("capture", _figures(own, try_part(_MODULE, "rivals", (TORCH, LOCAL))))


def _measure(part: str) -> None:
    quiet_megatron()
    with process_groups():
        measured = PARTS[part]()
    print(json.dumps(measured))


if __name__ == "__main__":
    _measure(*sys.argv[1:])
