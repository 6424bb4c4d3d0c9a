# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel ranks of a model, and how they share rows of hidden states.

Of T rows, rank r of n has those from r*T/n on. Rows are added, or dropped, behind the last one of the last
rank, so that the others have other owners, and rows are handed round.

What a caller hands in between the layers (`decoder_input`) or takes out there (`output_processor`) is shared
out by the pack as it was given, and the layers' rows by the capacity, so that rows are handed round for these
alone. A stage of a pipeline, whose rows other stages see, takes packs that fill their capacity.
"""

from typing import Any

import torch
from torch import Tensor, distributed, nn

from megagraph.megatron.parallel.groups import ModelGroups
from megagraph.megatron.seams import GPT_FORWARD

__all__ = ["TensorRanks", "shared_anew", "splits"]


def _overlap(holder: int, held: int, taker: int, taken: int) -> int:
    """How many of the rows that one rank holds another one is to have."""
    first, end = max(holder * held, taker * taken), min((holder + 1) * held, (taker + 1) * taken)
    return max(0, end - first)


def splits(given: int, wanted: int, rank: int, size: int) -> tuple[list[int], list[int]]:
    """How many rows a rank sends to each rank, and how many it gets from each.

    Args:
        given: rows on each rank.
        wanted: rows on each rank afterwards.
        rank: the rank.
        size: how many ranks there are.
    """
    sent = [_overlap(rank, given, peer, wanted) for peer in range(size)]
    return sent, [_overlap(peer, given, rank, wanted) for peer in range(size)]


class _SharedAnew(torch.autograd.Function):
    """Moves rows, and their gradients the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, wanted: int, group: Any) -> Tensor:
        ctx.given, ctx.group = rows.size(0), group
        sent, got = splits(ctx.given, wanted, distributed.get_rank(group), distributed.get_world_size(group))
        moved = rows.new_empty(wanted, *rows.shape[1:])
        moved[sum(got) :].zero_()
        mine = rows[: sum(sent)].contiguous()
        distributed.all_to_all_single(moved[: sum(got)], mine, got, sent, group=group)
        return moved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows = _SharedAnew.apply(gradients[0], ctx.given, ctx.group)  # type: ignore[no-untyped-call]
        return rows, None, None


def shared_anew(rows: Tensor, wanted: int, group: Any) -> Tensor:
    """This rank's rows once every rank of a group has `wanted` of them.

    Rows that are added are zero; rows that are dropped get a gradient of zero. Nothing is computed, rows move
    only. Every rank of the group calls this equally often, and so its backward.

    Args:
        rows: what this rank has, as many as every other.
        wanted: how many it will have.
        group: the ranks, on whose backend the rows move.
    """
    moved: Tensor = _SharedAnew.apply(rows, wanted, group)  # type: ignore[no-untyped-call]
    return moved


class TensorRanks:
    """The tensor-parallel group of one model.

    Args:
        model: a GPTModel or HybridModel.
        groups: its process groups.

    Attributes:
        size: of the group.
        shards_sequence: each rank holds a share of the rows between the layers.
    """

    def __init__(self, model: nn.Module, groups: ModelGroups) -> None:
        self._groups = groups
        group = self._group()
        self.size: int = 1 if group is None else distributed.get_world_size(group)
        config: Any = model.config
        self.shards_sequence: bool = config.sequence_parallel and self.size > 1
        self._is_gpt = isinstance(model, GPT_FORWARD.owner())

    def _group(self) -> Any:
        return self._groups.of_pack().get("tp")

    def rank(self) -> int:
        """This rank's place in the group."""
        return 0 if self.size == 1 else distributed.get_rank(self._group())

    def shares_masks(self, *, from_ids: bool) -> bool:
        """Whether the model hands its layers those rows of a padding mask that they have of hidden states.

        Args:
            from_ids: it makes the hidden states of token ids.
        """
        return not self.shards_sequence or (self._is_gpt and from_ids)

    def num_tokens(self, hidden_states: Tensor) -> int:
        """Physical tokens of a pack, all ranks together, from the hidden states [T, 1, H] of this one."""
        return hidden_states.size(0) * (self.size if self.shards_sequence else 1)

    def rows(self, tokens: int) -> int:
        """Rows of hidden states between layers on one rank, of a pack of `tokens` physical tokens.

        Raises:
            ValueError: where they cannot be shared out evenly.
        """
        if not self.shards_sequence:
            return tokens
        if tokens % self.size:
            raise ValueError(
                f"sequence parallelism shares the rows of a pack among {self.size} ranks: expected "
                f"capacities of a multiple of {self.size} tokens, got {tokens}"
            )
        return tokens // self.size

    def share_anew(self, hidden_states: Tensor, tokens: int) -> Tensor:
        """This rank's rows of a pack that is made one of `tokens` physical tokens, at its end.

        Every rank of the group calls it. Hidden states that need a gradient need it on every rank.

        Args:
            hidden_states: [T, 1, H], this rank's. Added rows are zero.
            tokens: of the pack that is made.
        """
        return shared_anew(hidden_states, self.rows(tokens), self._group())
