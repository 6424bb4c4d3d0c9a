# SPDX-License-Identifier: Apache-2.0
"""Prepares what Megatron's parts ask for, and runs a part of a benchmark among them."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.measuring.children import Answer, caught
from megagraph import megatron
from megagraph.cli.demo import quiet_megatron
from megagraph.config import GraphConfig
from megagraph.demo.compare import time_steps
from megagraph.demo.packs import Pack
from megagraph.demo.trainer import Trainer, process_groups


def answer_ours(measure: Callable[[], Answer], *, seeded: bool = False) -> None:
    """In a process of its own: measures among Megatron's groups, and prints the answer."""
    quiet_megatron()
    with process_groups():
        if seeded:
            seed_streams()
        print(json.dumps(measure()), flush=True)
        megatron.uninstall()


def answer_rival(measure: Callable[[], Answer]) -> None:
    """As `answer_ours()`, of a rival that may fail. Ends the process."""
    quiet_megatron()
    with process_groups():
        print(json.dumps(caught(measure)), flush=True)
        os._exit(0)  # the group may wait for ever for what a rival's graph holds of it


def install(**options: Any) -> None:
    """Installs the plugin, with no line of its own."""
    megatron.install(GraphConfig(**{"progress": False, "log_interval": 0, **options}))


def install_for(tokens: int, *num_seqs: int, **options: Any) -> None:
    """As `install()`, for packs of `tokens`, a capacity for each number of documents."""
    install(cuda_graph_max_packed_seqs=num_seqs, max_seqlen_per_dp_cp_rank=tokens, **options)


def check_replays(report: dict[str, Any], *expected: str) -> None:
    """Raises `RuntimeError` where nothing replayed, or something was eager beside `expected` reasons."""
    if not report["replays"] or report["failures"] or set(report["eager"]) - {"WARMING_UP", *expected}:
        raise RuntimeError(f"expected replays, got {report['eager']}, {report['failures']}")


def walls_ms(trainer: Trainer, steps: Sequence[Sequence[Pack]], *, graphs: bool) -> tuple[list[float], int]:
    """Walls of whole forward-backward steps, and the most memory that torch reserved meanwhile."""
    walls, reserved = [], 0
    for packs in steps:
        walls.append(time_steps(trainer, [packs], graphs=graphs).median_ms)
        reserved = max(reserved, torch.cuda.max_memory_reserved())
    return walls, reserved


def seed_streams(*, for_graphs: bool = False) -> None:
    """Megatron's random streams, from which weights are drawn; `for_graphs` a graph can advance them."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1234, te_rng_tracker=for_graphs, force_reset_rng=True)


def prepare_megatrons_graphs(micro_batches: int) -> None:
    """Before a model with Megatron's own graphs is built: they also ask how many micro-batches there are."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    seed_streams(for_graphs=True)
    init_num_microbatches_calculator(0, None, micro_batches, 1, 1)


@contextlib.contextmanager
def on_side_stream() -> Iterator[None]:
    """Runs what is inside on a stream of its own, and has the current one wait for it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
