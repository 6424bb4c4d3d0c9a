# SPDX-License-Identifier: Apache-2.0
"""Models of ranks that share some of their packs, and have others of their own."""

from typing import Any

import context_models
import megatron_rig as rig
import torch
from context_jobs import OwnMicro
from torch import Tensor

import megagraph
from megagraph.demo.trainer import Trainer

STEPS = 2  # one warms up


def new_trainer(
    *, model: dict[str, Any] | None = None, cp_sizes: tuple[int, ...] = (1, 2), **config: Any
) -> Trainer:
    install(cp_sizes=cp_sizes, has_experts="experts" in (model or {}))
    return context_models.trainer(config={"calculate_per_token_loss": True, **config}, **(model or {}))


def install(*, cp_sizes: tuple[int, ...] = (1, 2), has_experts: bool = False) -> None:
    capacity = {"capacities": (), "cuda_graph_max_packed_seqs": (5,), "max_seqlen_per_dp_cp_rank": 64}
    scopes = {"cuda_graph_modules": ("attn", "moe_router")} if has_experts else {}
    megagraph.install(rig.graph_config(cp_sizes=cp_sizes, **capacity, **scopes))


def micros_of(group: Any) -> list[OwnMicro]:
    """One of both ranks, and one of this rank alone."""
    packs = ((20, 8), group), ((12, 4, 8), None)
    return [
        OwnMicro(lengths=lengths, padded=lengths, seed=index, group=each)
        for index, (lengths, each) in enumerate(packs)
    ]


def warmed(trainer: Trainer) -> list[OwnMicro]:
    """Trains until everything has graphs."""
    micros = micros_of(megagraph.context_groups((1, 2)).of_size(2))
    for _ in range(STEPS):
        rig.step(trainer, micros)
    return micros


def losses_of(trainer: Trainer, micro: OwnMicro) -> Tensor:
    trainer.zero_grad()
    return torch.cat(rig.schedule(trainer.model, [micro], 1, trainer.device))


def eager_calls(trainer: Trainer, before: dict[str, Any]) -> dict[str, int]:
    """Eager calls of each layer since a report, by their reason."""
    now = rig.report_of(trainer)["eager"]
    found = {name: (now[name] - before["eager"].get(name, 0)) // rig.LAYERS for name in now}
    return {name: number for name, number in found.items() if number}
