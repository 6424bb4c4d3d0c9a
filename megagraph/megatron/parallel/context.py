# SPDX-License-Identifier: Apache-2.0
"""The ranks that share a model's packs, and process groups of ranks that may share one, of several sizes."""

from collections.abc import Sequence

import torch
from torch import distributed

from megagraph.megatron.parallel.groups import ModelGroups

__all__ = ["ContextGroups", "ContextRanks"]


class ContextRanks:
    """The context-parallel group of one model, all of whose ranks share each pack.

    Args:
        groups: its process groups.

    Attributes:
        size: of the group.
    """

    def __init__(self, groups: ModelGroups) -> None:
        self._groups = groups
        group = self._group()
        self.size: int = 1 if group is None else distributed.get_world_size(group)

    def _group(self) -> distributed.ProcessGroup | None:
        group: distributed.ProcessGroup | None = self._groups.of_pack().get("cp")
        return group

    def rank(self) -> int:
        """This rank's place in the group."""
        return 0 if self.size == 1 else distributed.get_rank(self._group())


class ContextGroups:
    """Groups of neighbouring ranks of a data-parallel times context-parallel group, nested.

    A group of c ranks begins at a multiple of c. Making them is collective over all ranks of the job, also of
    those in other groups: every rank makes all of them, in one order. A group of one rank is None; one of all
    ranks is the given group itself.

    Args:
        parent: the ranks that share a global batch, in their order: Megatron's data-parallel group, with
            context-parallel ranks in it.
        cp_sizes: how many ranks may share a pack; each divides the number of the parent's ranks.

    Raises:
        ValueError: if a size does not divide them.
    """

    def __init__(self, parent: distributed.ProcessGroup, cp_sizes: Sequence[int]) -> None:
        self.parent = parent
        ranks = distributed.get_process_group_ranks(parent)
        for size in cp_sizes:
            if size < 1 or len(ranks) % size:
                raise ValueError(f"expected cp_sizes that divide {len(ranks)} ranks, got {size}")
        everywhere: list[list[int]] = [[]] * distributed.get_world_size()
        distributed.all_gather_object(everywhere, ranks)
        self._groups: dict[int, distributed.ProcessGroup | None] = {1: None, len(ranks): parent}
        for size in sorted(set(cp_sizes) - {1, len(ranks)}):
            for parents in sorted({tuple(found) for found in everywhere}):
                for first in range(0, len(parents), size):
                    members = list(parents[first : first + size])
                    group = distributed.new_group(members)
                    if distributed.get_rank() in members:
                        self._groups[size] = group
        self._sizes = tuple(sorted(set(cp_sizes)))

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """The sizes, ascending."""
        return self._sizes

    @property
    def num_ranks(self) -> int:
        """Ranks of the parent."""
        return self.parent.size()

    @property
    def rank(self) -> int:
        """This rank's place in the parent."""
        return self.parent.rank()

    def of_size(self, cp_size: int) -> distributed.ProcessGroup | None:
        """This rank's group of a size; None for one rank."""
        return self._groups[cp_size] if cp_size > 1 else None

    def warm_up(self, device: torch.device) -> None:
        """Uses every group once, the largest first: no communicator is made later, while graphs are captured.

        Collective.
        """
        for size in reversed(self._sizes):
            group = self.of_size(size)
            if group is not None:
                distributed.all_reduce(torch.zeros(1, device=device), group=group)
