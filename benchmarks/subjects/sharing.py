# SPDX-License-Identifier: Apache-2.0
"""Models on packs that ranks share in groups of several sizes, on one GPU: every other rank is a pretence.

torch's fake process groups do nothing. So shapes, kernels and pools are those of one rank of many, what comes
from other ranks is whatever the memory held, and NCCL has no memory of its own. Times are those of a rank's
own work, and what it sends and waits for takes none.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.children import Answer
from benchmarks.subjects.hosts import check_replays, install
from benchmarks.subjects.inside import pretended_ranks
from benchmarks.subjects.steps import Batch, StepTrainer, mean_loss, rows_of
from megagraph import megatron
from megagraph.demo.trainer import ModelOptions, packed_seq_params
from megagraph.megatron.parallel.context import ContextGroups
from megagraph.packs.ops import thd_partition_indices

NUM_SEQS = 32
STEPS = 3  # the last two replay
ROUNDS = 5  # after them, of which the median counts


def batches_of(groups: ContextGroups, rows: int, device: torch.device) -> list[Batch]:
    """A pack of each size, all of whose ranks have `rows` rows."""
    batches = []
    for size in groups.cp_sizes:
        documents = NUM_SEQS // 2
        length = rows * size // documents // (2 * size) * 2 * size
        offsets = torch.arange(0, (documents + 1) * length, length, dtype=torch.int32, device=device)
        tokens = torch.randint(256, (1, documents * length // size), device=device)
        batches.append(
            {
                **{"tokens": tokens, "labels": tokens, "mask": torch.ones_like(tokens)},
                **{"positions": torch.zeros_like(tokens), "offsets": offsets, "longest": length},
                **{"cp_size": size, "cp_group": groups.of_size(size)},
            }
        )
    return batches


class SharingTrainer(StepTrainer):
    """A model whose batches say by how many ranks they are shared."""

    def _forward_step(self, packs: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        batch: Batch = next(packs)
        params = packed_seq_params(batch["offsets"], batch["longest"])
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = batch["offsets"].clone()
        params.local_cp_size, params.cp_group = batch["cp_size"], batch["cp_group"]
        losses = model(**rows_of(batch), packed_seq_params=params)
        return losses, lambda losses: mean_loss(losses, batch["mask"])


def measure_pools(model: ModelOptions, cp_sizes: Sequence[int]) -> Answer:
    """Graphs and their pools, where packs may be shared in groups of these sizes.

    Nothing is verified: eager and graphs would read different remains of other memory.
    """
    with pretended_ranks(cp_sizes) as groups:
        install(
            cuda_graph_max_packed_seqs=(NUM_SEQS,),
            max_seqlen_per_dp_cp_rank=model.max_tokens,
            cp_sizes=cp_sizes,
            cuda_graph_warmup_steps=1,
            verify="off",
        )
        trainer = SharingTrainer(model, beside=False, calculate_per_token_loss=True)
        batches = batches_of(groups, model.max_tokens, trainer.device)
        for _ in range(STEPS):
            trainer.wall_ms(batches, graphs=True)
        report = megatron.reports()[-1]
        check_replays(report)
        replayed = {size: counts.get("replayed", 0) for size, counts in report["cp_sizes"].items()}
        if set(replayed.values()) != {STEPS - 1}:
            raise RuntimeError(f"expected {STEPS - 1} replayed micro-batches of each size, got {replayed}")
        return {"graphs": report["graphs"], "pools": report["pool_bytes"]}


def measure_document(model: ModelOptions, cp_size: int, rank: int) -> Answer:
    """A step of one document that fills all rows of its ranks: a rank's own work.

    Args:
        model: its packs have that rank's rows.
        cp_size: ranks that share the document.
        rank: which of them this one is.

    Returns:
        `eager` and `graphed`, milliseconds of a step, forward and backward; `pairs`, of queries with the
        keys that they attend to, on this rank.
    """
    with pretended_ranks((cp_size,), rank) as groups:
        install(
            cuda_graph_max_packed_seqs=(1,),
            max_seqlen_per_dp_cp_rank=model.max_tokens,
            cp_sizes=(cp_size,),
            cuda_graph_warmup_steps=1,
            verify="off",
        )
        trainer = SharingTrainer(model, beside=False, calculate_per_token_loss=True)
        batch = document_of(groups, cp_size, model.max_tokens, trainer.device)
        found: Answer = {}
        for name, graphs in (("graphed", True), ("eager", False)):
            times = [trainer.wall_ms([batch], graphs=graphs) for _ in range(STEPS + ROUNDS)]
            found[name] = statistics.median(times[STEPS:])
            if graphs:
                check_replays(megatron.reports()[-1])
    tokens = model.max_tokens * cp_size
    offsets = torch.tensor([0, tokens], dtype=torch.int32)
    mine = thd_partition_indices(offsets, tokens, cp_size, rank)
    return {**found, "pairs": int((mine.long() + 1).sum())}


def document_of(groups: ContextGroups, cp_size: int, rows: int, device: torch.device) -> Batch:
    """One document, of which each of its ranks has as many rows."""
    tokens = torch.randint(256, (1, rows), device=device)
    return {
        **{"tokens": tokens, "labels": tokens, "mask": torch.ones_like(tokens)},
        **{"positions": torch.zeros_like(tokens), "longest": rows * cp_size},
        "offsets": torch.tensor([0, rows * cp_size], dtype=torch.int32, device=device),
        **{"cp_size": cp_size, "cp_group": groups.of_size(cp_size)},
    }
