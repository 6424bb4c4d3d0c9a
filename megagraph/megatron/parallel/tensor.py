# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel ranks of a model, and how they share rows of hidden states."""

from typing import Any

from torch import Tensor, distributed, nn

from megagraph.megatron.parallel.groups import ModelGroups
from megagraph.megatron.parallel.rows import shared_anew
from megagraph.megatron.seams import GPT_FORWARD

__all__ = ["TensorRanks"]


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
