# SPDX-License-Identifier: Apache-2.0
"""Packs by what they declare, models by their rotary tables, and runs of the plugin's three modes on them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from megatron_rig import CAPACITY, OPTIONS, Make, Micro, ModelTrainer, Run, graph_config, hands, train
from same_bits import assert_same_bits
from torch import Tensor

from megagraph._C import Capacity

MODES = ("off", "eager", "graph")
Steps = Sequence[Sequence[Micro]]
Runs = dict[str, Run]  # by mode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared(Micro):
    """A pack that says of itself what a host says, not what its documents are."""

    max_seqlen: int  # what it declares; at least the longest document
    num_seqs: int | None = None  # document slots of its offsets, empty ones included
    aliased: bool = False  # its padded offsets are the actual ones

    def params(self, device: torch.device) -> Any:
        params = super().params(device)
        missing = 0 if self.num_seqs is None else self.num_seqs - len(self.lengths)
        offsets: Tensor = torch.cat([params.cu_seqlens_q, params.cu_seqlens_q[-1:].expand(missing)])
        params.cu_seqlens_q = params.cu_seqlens_kv = offsets
        if self.aliased:
            params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = offsets
        params.max_seqlen_q = params.max_seqlen_kv = self.max_seqlen
        return params


class Pictures(Micro):
    """A pack whose tokens have a time, a height and a width, none of which begins at 0."""

    def position_ids(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(1, 50, (3, 1, self.physical), generator=generator)


# Of a model: multimodal RoPE.
MROPE: dict[str, Any] = {
    "arguments": lambda _config: {"position_embedding_type": "mrope"},
    "config": {"mrope_section": [2, 3, 3]},
}


def canonical(lengths: Sequence[int], *, capacity: Capacity = CAPACITY, **further: Any) -> Declared:
    """A pack of 64 tokens that is canonical already: the capacity's rows, offsets and longest document."""
    assert sum(lengths) == capacity.tokens
    return Declared(
        lengths=tuple(lengths), max_seqlen=capacity.max_seqlen, num_seqs=capacity.num_seqs, **further
    )


SHAPES = [(10, 30, 24), (32, 32), (20, 8, 30, 6), (2, 2, 28, 32), (16, 16, 16, 16), (31, 1, 32)]


def canonical_steps(capacity: Capacity, count: int, shapes: Any = SHAPES, **further: Any) -> list[list[Any]]:
    return [
        [
            canonical(shapes[(2 * index + m) % len(shapes)], capacity=capacity, seed=7 * index + m, **further)
            for m in range(2)
        ]
        for index in range(count)
    ]


def run(
    mode: str,
    steps: Steps,
    make: Make = ModelTrainer,
    given: dict[str, Any] | None = None,  # to `make`
    **changes: Any,  # of the plugin's config
) -> Run:
    """Trains a fresh model, the same one each time, in a mode of the plugin; `off` patches nothing."""
    return train(graph_config(mode=mode, **changes), steps, make, **(given or {}))


def three_modes(steps: Steps, make: Make = ModelTrainer, capacities: Any = (CAPACITY,), **given: Any) -> Runs:
    """The same run in each mode, all of the same bits."""
    runs = {mode: run(mode, steps, make, given, capacities=tuple(capacities)) for mode in MODES}
    for mode in MODES[1:]:
        assert_same_bits(runs["off"], runs[mode])
    return runs


def padded_modes(steps: Steps, **given: Any) -> tuple[Run, Run]:
    """The runs of mode `eager` and of graphs, of the same bits; Megatron's losses differ by roundings."""
    off, eager, graphed = (run(mode, steps, given=given) for mode in MODES)
    assert_same_bits(eager, graphed)
    losses = ([step.losses for step in run.steps] for run in (graphed, off))
    torch.testing.assert_close(*losses, **({"rtol": 0.0, "atol": 0.05} if OPTIONS.bf16 else {}))
    return eager, graphed


def scatter(model: Any) -> Any:
    """Puts unrelated angles into a model's rotary tables, so that a wrong row is no matter of roundings."""
    config = model.config
    is_mla = config.multi_latent_attention
    dim = config.qk_pos_emb_head_dim if is_mla else config.kv_channels
    angles = torch.randn(64, 1, 1, dim, generator=torch.Generator().manual_seed(3)) * 10

    @functools.cache
    def table(rows: int, **_given: Any) -> Tensor:
        return angles[:rows].to(next(model.parameters()).device)

    for owner in [layer.self_attention for layer in model.decoder.layers] if is_mla else [model]:
        owner.rotary_pos_emb.forward = table
    return model


def hand_out_frequencies(model: Any) -> None:
    """Hands a model's decoder a row of frequencies for each token, gathered by its position."""
    positions: list[Tensor] = []
    preprocess = model._preprocess

    @functools.wraps(preprocess)
    def remember(*args: Any, **given: Any) -> Any:
        positions[:] = [given["position_ids"]]
        return preprocess(*args, **given)

    model._preprocess = remember
    hands(model.decoder, lambda it: {**it, "rotary_pos_emb": it["rotary_pos_emb"][positions[0][0]]})


def scatter_frequencies(model: Any) -> None:
    """Both."""
    hand_out_frequencies(scatter(model))
