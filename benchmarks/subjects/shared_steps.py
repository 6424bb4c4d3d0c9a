# SPDX-License-Identifier: Apache-2.0
"""Training steps of real ranks that share packs: in groups of several sizes, or all of them every pack."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from benchmarks.measuring.children import Answer
from benchmarks.subjects.hosts import check_replays, install, seed_streams
from benchmarks.subjects.sharing import SharingTrainer, document_of
from benchmarks.subjects.steps import StepTrainer, without_collection
from megagraph import megatron
from megagraph.cli.demo import quiet_megatron
from megagraph.decide.dispatch import Capacity
from megagraph.demo.lengths import lognormal_lengths
from megagraph.demo.trainer import ModelOptions
from megagraph.megatron.scheduled_steps import MicroBatch, ScheduledStep, ScheduledSteps
from megagraph.packs.schedule import ScheduleLimits

MAX_SEQS = 64
DOCUMENTS = 32  # of a rank and step
WARM_UP_STEPS, STEPS = 4, 8
ROUNDS = 10  # of a long document, after the warm-up


class ScheduledTrainer(StepTrainer):
    """A model on scheduled packs. Losses are per token.

    Args:
        names_ranks: packs say by how many ranks they are shared; else the model's own share all.
    """

    def __init__(self, options: ModelOptions, *, names_ranks: bool, **transformer: Any) -> None:
        self._names_ranks = names_ranks
        super().__init__(options, beside=False, calculate_per_token_loss=True, **transformer)

    def _forward_step(self, packs: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        batch: MicroBatch = next(packs)
        params = batch.packed_seq_params
        if not self._names_ranks:
            params = copy.copy(params)
            params.local_cp_size = params.cp_group = None
        losses = model(
            input_ids=batch.tensors["tokens"],
            position_ids=batch.position_ids,
            attention_mask=None,
            labels=batch.tensors["labels"],
            packed_seq_params=params,
        )
        return losses, partial(_sums, mask=batch.tensors["mask"])


def _sums(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss = (losses.float() * mask).sum()
    return loss, mask.sum().int(), {"loss": loss.detach().clone()}


def _lengths(step: int, rank: int) -> list[int]:
    """Of a rank's documents, those of `mlm-dcp`; the same at every call."""
    seed = 1000 * step + rank
    drawn = lognormal_lengths(DOCUMENTS, mean=1024, sigma=1.5, minimum=128, maximum=8192, seed=seed)
    lengths: list[int] = drawn.tolist()
    return lengths


def _document(length: int) -> dict[str, Tensor]:
    tokens = torch.arange(length) % 256
    mask = torch.ones(length)
    mask[-1] = 0  # its last token has no label
    return {"tokens": tokens, "labels": tokens.roll(-1), "mask": mask}


def _in_step(run: Callable[[], float]) -> float:
    """What it answers, begun on all ranks at once."""
    distributed.all_reduce(torch.zeros(1, device="cuda"))
    return run()


def _start(context_parallel_size: int = 1) -> None:
    """Makes Megatron's groups."""
    from megatron.core import parallel_state

    quiet_megatron()
    parallel_state.initialize_model_parallel(context_parallel_size=context_parallel_size)
    seed_streams()


def _end() -> None:
    """Graphs go before their groups."""
    from megatron.core import parallel_state

    megatron.uninstall()
    parallel_state.destroy_model_parallel()


def train(model: ModelOptions, *, is_static: bool) -> Answer:
    """Trains on lognormal documents; this rank's part.

    Args:
        model: `max_tokens` are the rows of one rank.
        is_static: all ranks share every pack, as the model's own context parallelism; else each pack has as
            many as it needs.

    Returns:
        `graphed` and `eager`, walls in ms of the same steps, eager on canonical packs; of each of them the
        `tokens` and the `rows` of all ranks, padding included; `capture_seconds` of the report.
    """
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    _start(ranks if is_static else 1)
    sizes = (ranks,) if is_static else tuple(2**power for power in range(ranks.bit_length()))
    groups = megatron.context_groups(sizes)
    rows = model.max_tokens
    limits = ScheduleLimits(
        ranks=ranks, cp_sizes=sizes, max_seqlen_per_dp_cp_rank=rows, max_packed_seqs=MAX_SEQS
    )
    capacity = {"cuda_graph_max_packed_seqs": (MAX_SEQS,), "max_seqlen_per_dp_cp_rank": rows}
    install(cp_sizes=() if is_static else sizes, cuda_graph_warmup_steps=1, **capacity)
    own = {"context_parallel_size": ranks} if is_static else {}
    trainer = ScheduledTrainer(model, names_ranks=not is_static, **own)
    documents = [[*map(_document, _lengths(step, rank))] for step in range(WARM_UP_STEPS + STEPS)]
    config, device = trainer.chunk.config, trainer.device
    scheduled = ScheduledSteps(documents, limits=limits, groups=groups, config=config, device=device)
    steps: Sequence[ScheduledStep] = [*scheduled]
    found: Answer = {"graphed": [], "eager": []}
    for step in steps[:WARM_UP_STEPS]:
        trainer.wall_ms(step, graphs=True)  # type: ignore[arg-type]  # hands each micro-batch on as it is
    with without_collection():
        for step in steps[WARM_UP_STEPS:]:
            for name, graphs in (("graphed", True), ("eager", False)):
                found[name].append(_in_step(partial(trainer.wall_ms, step, graphs=graphs)))  # type: ignore[arg-type]
    report = megatron.reports()[-1]
    check_replays(report, "DISABLED")
    _end()
    lengths = [sum(sum(_lengths(step, each)) for each in range(ranks)) for step in range(len(steps))]
    computed = [len(step) * ranks * rows for step in steps]
    counts = {"tokens": lengths[WARM_UP_STEPS:], "rows": computed[WARM_UP_STEPS:]}
    return {**found, **counts, "capture_seconds": report["capture_seconds"]}


def run_document(model: ModelOptions) -> Answer:
    """A step of one document, on every rank alone and on all of them; this rank's part.

    Args:
        model: `max_tokens` are those of the document.

    Returns:
        Walls in ms, `eager` and `graphed`, of each number of ranks.
    """
    _start()
    ranks = distributed.get_world_size()
    sizes = (1, ranks)
    groups = megatron.context_groups(sizes)
    rows = {size: model.max_tokens // size for size in sizes}
    capacities = tuple(Capacity(tokens=each, num_seqs=1, max_seqlen=each) for each in rows.values())
    install(capacities=capacities, cp_sizes=sizes, cuda_graph_warmup_steps=1, verify="off")
    trainer = SharingTrainer(model, beside=False, calculate_per_token_loss=True)
    batches = {size: document_of(groups, size, rows[size], trainer.device) for size in sizes}
    found: Answer = {str(size): {} for size in sizes}
    for size, batch in batches.items():
        for name, graphs in (("graphed", True), ("eager", False)):
            run = partial(trainer.wall_ms, [batch], graphs=graphs)
            found[str(size)][name] = [_in_step(run) for _ in range(WARM_UP_STEPS + ROUNDS)][WARM_UP_STEPS:]
    check_replays(megatron.reports()[-1], "DISABLED")
    _end()
    return found
