# SPDX-License-Identifier: Apache-2.0
"""Packs by what they declare, models by their rotary tables, and runs of the plugin's three modes on them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron_rig import CAPACITY, OPTIONS, Micro, Run, graph_config, train
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph.decide.dispatch import Capacity
from megagraph.demo.trainer import Trainer, gpt_model

MODES = ("off", "eager", "graph")


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


def canonical(lengths: Sequence[int], *, capacity: Capacity = CAPACITY, **further: Any) -> Declared:
    """A pack of 64 tokens that is canonical already: the capacity's rows, offsets and longest document."""
    assert sum(lengths) == capacity.tokens
    return Declared(
        lengths=tuple(lengths), max_seqlen=capacity.max_seqlen, num_seqs=capacity.num_seqs, **further
    )


def run(
    mode: str,
    steps: Sequence[Sequence[Micro]],
    make: Callable[[], Trainer] = lambda: Trainer(OPTIONS),
    **changes: Any,
) -> Run:
    """Trains a fresh model, the same one each time, in a mode of the plugin; `off` patches nothing."""
    return train(graph_config(mode=mode, **changes), steps, make)


def three_modes(
    steps: Sequence[Sequence[Micro]], make: Callable[[], Trainer] = lambda: Trainer(OPTIONS), **changes: Any
) -> dict[str, Run]:
    """The same run in each mode, all of the same bits."""
    runs = {mode: run(mode, steps, make, **changes) for mode in MODES}
    for mode in MODES[1:]:
        assert_same_bits(runs["off"], runs[mode])
    return runs


def assert_close_losses(one: Run, other: Run) -> None:
    """Losses that differ by roundings at most."""
    tolerance = {"rtol": 0.0, "atol": 0.05} if OPTIONS.bf16 else {}
    for left, right in zip(one.steps, other.steps, strict=True):
        for wanted, found in zip(left.losses, right.losses, strict=True):
            torch.testing.assert_close(found, wanted, **tolerance)


class Scattered(Trainer):
    """A model whose rotary table holds unrelated angles, so that a wrong row is no matter of roundings."""

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        model: Any = gpt_model(self.options, config, spec)
        generator = torch.Generator().manual_seed(3)
        angles = torch.randn(64, 1, 1, OPTIONS.hidden // OPTIONS.heads, generator=generator) * 10

        @functools.cache
        def table(rows: int, **_given: Any) -> Tensor:
            return angles[:rows].to(self.device)

        model.rotary_pos_emb.forward = table
        return model  # type: ignore[no-any-return]


def hand_out_frequencies(model: Any) -> nn.Module:
    """Hands a model's decoder a row of frequencies for each token, gathered by its position."""
    positions: list[Tensor] = []
    preprocess = model._preprocess

    @functools.wraps(preprocess)
    def remember(*args: Any, **given: Any) -> Any:
        positions[:] = [given["position_ids"]]
        return preprocess(*args, **given)

    def gather(_block: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**given, "rotary_pos_emb": given["rotary_pos_emb"][positions[0][0]]}

    model._preprocess = remember
    model.decoder.register_forward_pre_hook(gather, with_kwargs=True)
    found: nn.Module = model
    return found


class PerToken(Trainer):
    """A model whose layers get frequencies of each token."""

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        return hand_out_frequencies(super().make_chunk(config, spec))


class PerTokenScattered(Scattered):
    """Both."""

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        return hand_out_frequencies(super().make_chunk(config, spec))
