# SPDX-License-Identifier: Apache-2.0
"""The ranks that may share a model's packs: one group for all packs, or nested ones of several sizes."""

import types
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import distributed

from megagraph.megatron.parallel.groups import ModelGroups, ranks_of
from megagraph.megatron.seams import DATA_AND_CONTEXT_GROUP, PACK_GROUPS, hybrid_groups

__all__ = ["ContextGroups", "ContextRanks", "context_groups"]


class ContextRanks:
    """The context-parallel groups of one model.

    If `cp_sizes` names any, each pack says by how many ranks it is shared, and groups are made for all of
    them, collectively over all ranks of the job. Else all packs are shared by the model's own group.

    Attributes:
        size: of the model's own group.
        sizes: of all groups, ascending.
        is_dynamic: packs say by how many ranks they are shared.
        is_whole: none of the groups of several sizes, here or on a rank that was heard since, has been
            destroyed by its ranks alone.
    """

    def __init__(self, groups: ModelGroups, cp_sizes: Sequence[int] = ()) -> None:
        self._groups, self._cp_sizes = groups, tuple(cp_sizes)
        own = self.own_group()
        self.size: int = 1 if own is None else own.size()
        self.is_dynamic = bool(cp_sizes)
        self.sizes: tuple[int, ...] = tuple(sorted({self.size, *cp_sizes}))
        self._of_sizes: ContextGroups | None = None
        self._is_warm, self.is_whole = False, True
        self.look_up()

    def look_up(self) -> None:
        """Looks up groups of several sizes that have been forgotten: collective, as the forgetting was.

        Raises `ValueError` if the group of the model's own size is of other ranks than the model's own.
        """
        if self.is_dynamic and self._of_sizes is None:
            found = context_groups(self._cp_sizes)
            self._check_own(found)
            self._of_sizes, self._is_warm, self.is_whole = found, False, True

    def _check_own(self, found: "ContextGroups") -> None:
        own = self.own_group()
        if self.size != (1 if own is None else own.size()):
            raise ValueError(
                f"cp_sizes: expected a group of the model's own {self.size} context-parallel ranks, as when "
                f"it was first called, got {'none' if own is None else f'one of {own.size()}'}"
            )
        if self.size in self._cp_sizes and not self.are_own(self.size, other := found.of_size(self.size)):
            raise ValueError(
                f"cp_sizes: expected the model's own {self.size} context-parallel ranks to be neighbours "
                f"among those that may share packs, {_in_order(other)}, got {_in_order(own)}"
            )

    def leave(self, group: distributed.ProcessGroup | None) -> None:
        """A group is about to be destroyed; None and the world are every group.

        Those are destroyed by all ranks of the job, which look up others. One alone is destroyed by its own
        ranks, which cannot make another without the rest.
        """
        if group is None or group is distributed.group.WORLD:
            self._of_sizes = None
        elif any(group is known for known in self.known()):
            self.give_up()

    def give_up(self) -> None:
        """Ranks have destroyed a group of theirs alone, here or elsewhere: nothing is captured any more."""
        self.is_whole = False

    def own_group(self) -> distributed.ProcessGroup | None:
        """The group that the model was built with; None for one rank."""
        group: distributed.ProcessGroup | None = self._groups.of_pack().get("cp")
        return group

    def are_own(self, cp_size: int, group: distributed.ProcessGroup | None) -> bool:
        """Whether ranks that share a pack, of a group if the pack names one, are the model's own in order."""
        own = self.own_group()
        if cp_size != self.size:
            return False
        return cp_size == 1 or group is None or group is own or _in_order(group) == _in_order(own)

    def of_size(self, cp_size: int) -> distributed.ProcessGroup | None:
        """This rank's group of a size; None for one rank, and if groups have been forgotten."""
        if cp_size not in self._cp_sizes:
            return self.own_group()
        return None if self._of_sizes is None else self._of_sizes.of_size(cp_size)

    def by_size(self) -> Mapping[int, tuple[distributed.ProcessGroup | None, ...]]:
        """This rank's groups of every size: that of the graphs, and of the model's own size its own too."""
        groups = {size: (self.of_size(size),) for size in self.sizes}
        return {**groups, self.size: (*groups[self.size], self.own_group())}

    def rank(self, cp_size: int) -> int:
        """This rank's place in its group of a size."""
        group = self.of_size(cp_size)
        return 0 if group is None else group.rank()

    def known(self) -> Iterable[distributed.ProcessGroup]:
        """The groups of several sizes, as far as there are any."""
        return () if self._of_sizes is None else self._of_sizes.known().values()

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
        given: groups of this rank that exist already, by size, the preferred ones first. One of the ranks
            that are wanted takes the place of a group that would be made; others are left aside, destroyed
            ones among them: Megatron keeps those of hybrid context parallelism beyond the end of their world.

    Attributes:
        cp_sizes: ascending.
        num_ranks: of the parent.
        rank: this one's place in it.

    Raises:
        ValueError: if a size does not divide them.
    """

    def __init__(
        self,
        parent: distributed.ProcessGroup,
        cp_sizes: Sequence[int],
        given: Mapping[int, Sequence[distributed.ProcessGroup]] = types.MappingProxyType({}),
    ) -> None:
        self.parent, self.num_ranks, self.rank = parent, parent.size(), parent.rank()
        ranks = distributed.get_process_group_ranks(parent)
        for size in cp_sizes:
            if size < 1 or len(ranks) % size:
                raise ValueError(f"expected cp_sizes that divide {len(ranks)} ranks, got {size}")
        self._groups: dict[int, distributed.ProcessGroup | None] = {len(ranks): parent}
        for size, groups in given.items():
            first = self.rank // size * size
            fitting = [group for group in groups if _in_order(group) == ranks[first : first + size]]
            self._groups |= {size: fitting[0]} if fitting else {}
        self._groups[1] = None
        if missing := sorted(set(cp_sizes) - set(self._groups)):
            self._make(missing, ranks)
        self.cp_sizes = tuple(sorted(set(cp_sizes)))

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

    def of_size(self, cp_size: int) -> distributed.ProcessGroup | None:
        """This rank's group of a size; None for one rank."""
        return self._groups[cp_size] if cp_size > 1 else None

    def known(self) -> dict[int, distributed.ProcessGroup]:
        """Those of several ranks, by size."""
        found = ((size, self.of_size(size)) for size in self.cp_sizes)
        return {size: group for size, group in found if group is not None}

    def warm_up(self, device: torch.device) -> None:
        """Uses every group once, the largest first: no communicator is made later, while graphs are captured.

        Collective.
        """
        for group in reversed(self.known().values()):
            distributed.all_reduce(torch.zeros(1, device=device), group=group)


# The parent of the groups that were made last, and these by size.
_kept: tuple[distributed.ProcessGroup | None, Mapping[int, distributed.ProcessGroup]] = (None, {})


def _in_order(group: distributed.ProcessGroup | None) -> list[int]:
    """The ranks of a group in the order of their places; none if it is one no more."""
    return distributed.get_process_group_ranks(group) if group is not None and ranks_of(group) else []


def context_groups(cp_sizes: Sequence[int]) -> ContextGroups:
    """The groups of Megatron's data-parallel times context-parallel ranks that may share packs.

    Each is made when it is first asked for, collectively over all ranks of the job, and anew once
    Megatron's groups are others. Those that Megatron has itself (`hybrid_context_parallel`) are
    Megatron's.

    Args:
        cp_sizes: how many ranks may share a pack.

    Raises:
        RuntimeError: if Megatron's groups are not initialized.
        ValueError: if a size does not divide the number of those ranks, or a group of it was destroyed,
            and Megatron's were not: other ranks may still have theirs, and would not make it anew.
    """
    global _kept
    try:
        parent = DATA_AND_CONTEXT_GROUP.function()(with_context_parallel=True)
    except AssertionError as error:
        raise RuntimeError("expected Megatron's process groups to be initialized, found none") from error
    kept = _kept[1] if _kept[0] is parent else {}
    if destroyed := [size for size in cp_sizes if size in kept and not _in_order(kept[size])]:
        raise ValueError(
            f"expected the groups of {cp_sizes} ranks that were made before, got none of {destroyed}: they "
            "have been destroyed; make Megatron's groups anew as well"
        )
    static = PACK_GROUPS["cp"].function()(check_initialized=False)  # the same for all packs
    sources = hybrid_groups(cp_sizes), kept, {} if static is None else {static.size(): static}
    given = {size: [found[size] for found in sources if size in found] for size in cp_sizes}
    made = ContextGroups(parent, cp_sizes, given)
    _kept = parent, {**kept, **made.known()}
    return made
