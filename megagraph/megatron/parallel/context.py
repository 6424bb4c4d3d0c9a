# SPDX-License-Identifier: Apache-2.0
"""The ranks that may share a model's packs: one group for all packs, or nested ones of several sizes."""

import types
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import distributed

from megagraph.megatron.parallel.groups import ModelGroups
from megagraph.megatron.seams import DATA_AND_CONTEXT_GROUP, hybrid_groups

__all__ = ["ContextGroups", "ContextRanks", "context_groups"]


class ContextRanks:
    """The context-parallel groups of one model.

    Where `cp_sizes` names any, each pack says by how many ranks it is shared, and groups are made for all of
    them, collectively over all ranks of the job. Else all packs are shared by the model's own group.

    Args:
        groups: its process groups.
        cp_sizes: by how many ranks packs may be shared.

    Attributes:
        size: of the model's own group.
        sizes: of all groups, ascending.
        is_dynamic: packs say by how many ranks they are shared.
    """

    def __init__(self, groups: ModelGroups, cp_sizes: Sequence[int] = ()) -> None:
        self._groups = groups
        own = self.own_group()
        self.size: int = 1 if own is None else own.size()
        self._of_sizes = context_groups(cp_sizes) if cp_sizes else None
        self.is_dynamic = self._of_sizes is not None
        self.sizes: tuple[int, ...] = tuple(sorted({self.size, *cp_sizes}))
        self._is_warm = False

    def own_group(self) -> distributed.ProcessGroup | None:
        """The group that the model was built with; None for one rank."""
        group: distributed.ProcessGroup | None = self._groups.of_pack().get("cp")
        return group

    def of_size(self, cp_size: int) -> distributed.ProcessGroup | None:
        """This rank's group of a size; None for one rank."""
        return self.own_group() if self._is_own(cp_size) else self._dynamic().of_size(cp_size)

    def _is_own(self, cp_size: int) -> bool:
        return self._of_sizes is None or cp_size not in self._of_sizes.cp_sizes

    def _dynamic(self) -> "ContextGroups":
        assert self._of_sizes is not None
        return self._of_sizes

    def rank(self, cp_size: int) -> int:
        """This rank's place in its group of a size."""
        group = self.of_size(cp_size)
        return 0 if group is None else group.rank()

    def known(self) -> Iterable[distributed.ProcessGroup]:
        """The groups of several sizes, as far as there are any."""
        groups = (self.of_size(size) for size in self.sizes) if self.is_dynamic else ()
        return [group for group in groups if group is not None]

    def warm_up(self, device: torch.device) -> None:
        """Uses every group of several sizes once, before the first capture. Collective over their ranks."""
        if self._of_sizes is not None and not self._is_warm:
            self._of_sizes.warm_up(device)
            self._is_warm = True


class ContextGroups:
    """Groups of neighbouring ranks of a data-parallel times context-parallel group, nested.

    A group of c ranks begins at a multiple of c. Making them is collective over all ranks of the job, also of
    those in other groups: every rank makes all of them, in one order. A group of one rank is None; one of all
    ranks is the given group itself.

    Args:
        parent: the ranks that share a global batch, in their order: Megatron's data-parallel group, with
            context-parallel ranks in it.
        cp_sizes: how many ranks may share a pack; each divides the number of the parent's ranks.
        given: groups of this rank that exist already, by size; those are not made.

    Raises:
        ValueError: if a size does not divide them.
    """

    def __init__(
        self,
        parent: distributed.ProcessGroup,
        cp_sizes: Sequence[int],
        given: Mapping[int, distributed.ProcessGroup] = types.MappingProxyType({}),
    ) -> None:
        self.parent = parent
        ranks = distributed.get_process_group_ranks(parent)
        for size in cp_sizes:
            if size < 1 or len(ranks) % size:
                raise ValueError(f"expected cp_sizes that divide {len(ranks)} ranks, got {size}")
        self._groups: dict[int, distributed.ProcessGroup | None] = {1: None, len(ranks): parent, **given}
        if missing := sorted(set(cp_sizes) - set(self._groups)):
            self._make(missing, ranks)
        self._sizes = tuple(sorted(set(cp_sizes)))

    def _make(self, sizes: Sequence[int], ranks: Sequence[int]) -> None:
        everywhere: list[Sequence[int]] = [[]] * distributed.get_world_size()
        distributed.all_gather_object(everywhere, ranks)
        for size in sizes:
            for parents in sorted({tuple(found) for found in everywhere}):
                for first in range(0, len(parents), size):
                    members = list(parents[first : first + size])
                    group = distributed.new_group(members)
                    if distributed.get_rank() in members:
                        self._groups[size] = group

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


_MADE: dict[tuple[int, ...], ContextGroups] = {}  # by sizes


def context_groups(cp_sizes: Sequence[int]) -> ContextGroups:
    """The groups of Megatron's data-parallel times context-parallel ranks that may share packs.

    Made at the first call, collectively over all ranks of the job, and anew where Megatron's groups are
    others by then. Those that Megatron has itself (`hybrid_context_parallel`) are Megatron's.

    Args:
        cp_sizes: how many ranks may share a pack.

    Raises:
        RuntimeError: if Megatron's groups are not initialized.
        ValueError: if a size does not divide the number of those ranks.
    """
    try:
        parent = DATA_AND_CONTEXT_GROUP.function()(with_context_parallel=True)
    except AssertionError as error:
        raise RuntimeError("expected Megatron's process groups to be initialized, found none") from error
    sizes = tuple(sorted(set(cp_sizes)))
    for others in [of for of, made in _MADE.items() if made.parent is not parent]:
        del _MADE[others]
    if sizes not in _MADE:
        _MADE[sizes] = ContextGroups(parent, sizes, hybrid_groups(sizes))
    return _MADE[sizes]
