# SPDX-License-Identifier: Apache-2.0
"""The ranks that share a model's communicators: they capture, replay and run eager together.

NCCL wants an operation in a graph on every rank of its communicator or on none. Only tensor parallelism
puts collectives into a layer, so the tensor-parallel group is what has to agree. What ranks ask each other
are a few integers on the host, over gloo: nobody waits for a device.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from megagraph.megatron.parallel.rows import shared_anew

__all__ = ["Peers"]


class Peers:
    """The tensor-parallel group of one model.

    Args:
        model: a GPTModel or HybridModel, with its process groups made.
    """

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config
        self.size: int = config.tensor_model_parallel_size
        # Each rank holds a share of the rows between the layers.
        self.shards_sequence: bool = config.sequence_parallel and self.size > 1
        groups: Any = getattr(model, "pg_collection", None)
        self._tensor_group: Any = getattr(groups, "tp", None)
        self._group: Any = None

    def _group_of_tensors(self) -> Any:
        if self._tensor_group is None:
            from megatron.core import parallel_state

            self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        return self._tensor_group

    def rank(self) -> int:
        """This rank's place in the group."""
        return 0 if self.size == 1 else distributed.get_rank(self._group_of_tensors())

    def _gloo_group(self) -> Any:
        group = self._group_of_tensors()
        # Only the members take part in the call: other groups make theirs whenever they get there.
        return distributed.new_group(
            distributed.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
        )

    def exchange(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the group. Every rank of it calls this equally often."""
        if self.size == 1:
            return list(values)
        if self._group is None:
            self._group = self._gloo_group()
        largest = torch.tensor(list(values), dtype=torch.int64)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=self._group)
        found: list[int] = largest.tolist()
        return found

    def gather(self, what: str) -> list[str]:
        """What each rank of the group says, in the order of ranks."""
        said = [what] * self.size
        if self.size > 1:
            self.exchange([0])  # makes the group where there is none yet
            distributed.all_gather_object(said, what, group=self._group)
        return said

    def use(self, group: Any) -> bool:
        """Whether the graphs hold collectives of a process group; None and the world are every group."""
        everything = group is None or group is distributed.group.WORLD
        return self.size > 1 and (everything or group is self._tensor_group)

    def leave(self) -> None:
        """Forgets the group, which is about to be destroyed; Megatron says which comes after it."""
        self._group = self._tensor_group = None

    def agree_on(self, what: str) -> bool:
        """Whether every rank of the group says the same."""
        said = zlib.crc32(what.encode())
        largest, least = self.exchange([said, -said])
        return largest == -least

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
        return shared_anew(hidden_states, self.rows(tokens), self._group_of_tensors())
