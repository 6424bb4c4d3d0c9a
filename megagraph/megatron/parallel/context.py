# SPDX-License-Identifier: Apache-2.0
"""The ranks that may share a model's packs, and what its modules take for them.

There is one group for all packs, or nested ones of several sizes, of which each pack names one.

Note [View of a micro-batch]
Released layers know one context-parallel group, the model's own. Attention rotates by it whoever shares the
pack, multi-latent attention cuts its rotary tables by the config's number of ranks and refuses packs that
name their own. So while a micro-batch of some ranks runs, eager or in a capture, these stand wherever a
module looks for the model's group, and the pack names none. Afterwards everything is as before, after an
error, too.
What runs in the backward does not look there: ops keep the group they ran with, and recomputing is refused.

Every rank that shares a pack records its part of a router's loss. At the end of a step Megatron adds the
parts up over one group, and takes the mean over all others. That is right for packs which the ranks of that
group share; a part of any other pack would count too little, or too often. So metrics of packs that other
ranks share than the model's own are counted as if those had shared them.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn

from megagraph import _C
from megagraph.log import log
from megagraph.megatron import seams
from megagraph.megatron.parallel.groups import COLLECTIONS, groups_of_pack, ranks_of
from megagraph.megatron.parallel.model_parallel import has_experts, need_equal_rows
from megagraph.megatron.watch import IGNORED_ATTRIBUTES
from megagraph.modules import VarlenAttention

__all__ = ["ContextGroups", "ContextRanks", "context_groups", "unsupported_sharing"]

_Group = distributed.ProcessGroup


class ContextRanks:
    """The context-parallel groups of one model, which is held weakly.

    If `cp_sizes` names any, each pack says by how many ranks it is shared, and groups are made for all of
    them, collectively over all ranks of the job. Else all packs are shared by the model's own group.
    """

    def __init__(self, model: nn.Module, cp_sizes: Sequence[int] = ()) -> None:
        self._model, self._cp_sizes = weakref.ref(model), tuple(cp_sizes)
        self.size = self._own_size()
        self.sizes: tuple[int, ...] = tuple(sorted({self.size, *cp_sizes}))  # of all groups
        self.is_dynamic = bool(cp_sizes)  # packs say by how many ranks they are shared
        # None of the groups of several sizes, here or on a rank that was heard since, has been destroyed by
        # its ranks alone: else nothing is captured any more.
        self.is_whole = True
        self._has_others = self.sizes != (self.size,)
        self._of_sizes: ContextGroups | None = None
        # csrc/watch/state_watch.h, Note [State]: while the model's is as it was, so are the places that show
        # ranks, and what would not look there.
        self._watch: _C.StateWatch | None = None
        self._state = 0
        self._unsupported: str | None = None
        self.follow()
        config: Any = model.config
        if self._has_others and not config.calculate_per_token_loss:
            log.warning(
                "cp_sizes: losses are means of micro-batches (calculate_per_token_loss=False): packs weigh "
                "alike however many tokens they hold"
            )

    # -- groups ----------------------------------------------------------------------------------

    def follow(self) -> None:
        """Before steps: looks for groups of several sizes that were forgotten, and for modules of now.

        Collective, as the forgetting was. Raises `ValueError` if the group of the model's own size is of
        other ranks than the model's own, and for what would not look where this shows the ranks, naming it.
        """
        model: Any = self._model()
        if model is None or not self.is_dynamic:
            return
        if self._of_sizes is None:
            found, own, own_size = context_groups(self._cp_sizes), self.own_group, self._own_size()
            if self.size != own_size:
                raise ValueError(
                    f"cp_sizes: expected a group of the model's own {self.size} context-parallel ranks, as "
                    f"when it was first called, got {'none' if own is None else f'one of {own_size}'}"
                )
            if self.size in self._cp_sizes and not self.are_own(self.size, other := found.of_size(self.size)):
                raise ValueError(
                    f"cp_sizes: expected the model's own {self.size} context-parallel ranks to be neighbours "
                    f"among those that may share packs, {_in_order(other)}, got {_in_order(own)}"
                )
            self._of_sizes, self.is_whole = found, True
        if self._watch is None or self._watch.now(True) != self._state:
            modules, block = [weakref.ref(module) for module in model.modules()], weakref.ref(model.decoder)
            self._watch = _C.StateWatch(modules, block, IGNORED_ATTRIBUTES, lambda _hook: True)
            self._places = _C.RankPlaces(
                *(model.modules(), COLLECTIONS, seams.moe_records),
                weighs_losses=not seams.router_losses_count_ranks(),
            )
            self._unsupported = next(_unsupported_dynamic_sharing(model), None)
            self._state = self._watch.now(True)
        if self._has_others:
            self._check()

    @functools.cached_property
    def own_group(self) -> _Group | None:
        """The group that the model was built with, found while no other one is shown; None for one rank."""
        return groups_of_pack(self._model()).get("cp")

    def _own_size(self) -> int:
        own = self.own_group
        return 1 if own is None else own.size()

    def leave(self, group: _Group | None) -> None:
        """A group is about to be destroyed; None and the world are every group.

        Those are destroyed by all ranks of the job, which look up others. One alone is destroyed by its own
        ranks, which cannot make another without the rest.
        """
        vars(self).pop("own_group", None)
        if group is None or group is distributed.group.WORLD:
            self._of_sizes = None
        elif group in self.known():
            self.is_whole = False

    def are_own(self, cp_size: int, group: _Group | None) -> bool:
        """Whether ranks that share a pack, of a group if the pack names one, are the model's own in order."""
        own = self.own_group
        is_all = cp_size == 1 or group is None or group is own
        return cp_size == self.size and (is_all or _in_order(group) == _in_order(own))

    def of_size(self, cp_size: int) -> _Group | None:
        """This rank's group of a size; None for one rank, and if groups have been forgotten."""
        if cp_size not in self._cp_sizes:
            return self.own_group
        return None if self._of_sizes is None else self._of_sizes.of_size(cp_size)

    def by_size(self) -> dict[int, tuple[_Group | None, ...]]:
        """This rank's groups of every size: that of the graphs, and of the model's own size its own too."""
        groups = {size: (self.of_size(size),) for size in self.sizes}
        return {**groups, self.size: (*groups[self.size], self.own_group)}

    def known(self) -> Iterable[_Group]:
        """The groups of several sizes, as far as there are any."""
        return () if self._of_sizes is None else self._of_sizes.known().values()

    def warm_up(self, device: torch.device) -> None:
        """Uses every group of several sizes once, before the first capture. Collective over their ranks."""
        if self._of_sizes is not None:
            self._of_sizes.warm_up(device)

    # -- what modules see ------------------------------------------------------------------------

    def _check(self) -> None:
        if self._unsupported is not None:
            raise ValueError(
                "cp_sizes: expected a model that can run packs of several context-parallel sizes, got "
                f"{self._unsupported}"
            )

    def refuse(self, what: str) -> None:
        """Raises `ValueError` for a model that `what` keeps eager, if eager may not see its ranks."""
        if self._has_others:
            raise ValueError(f"cp_sizes: expected a model that graphs take, got: {what}")

    def showing_size(self, cp_size: int) -> contextlib.AbstractContextManager[None]:
        """Around what runs for ranks of the model's group of a size."""
        return self._showing(cp_size, self.of_size(cp_size), leaves_metrics=False)

    def showing_pack(self, params: Any) -> contextlib.AbstractContextManager[None]:
        """Around a model that runs a pack as given, or none, by the ranks that it names."""
        size = getattr(params, "local_cp_size", None)
        return self._showing(self.size if size is None else size, getattr(params, "cp_group", None))

    @contextlib.contextmanager
    def _showing(self, cp_size: int, group: _Group | None, *, leaves_metrics: bool = True) -> Iterator[None]:
        if not self.is_dynamic or self.are_own(cp_size, group):
            yield
            return
        self._check()
        if cp_size != 1 and (group is None or group.size() != cp_size):
            found = "none" if group is None else f"one of {group.size()} ranks"
            raise ValueError(f"expected a cp_group of local_cp_size {cp_size}, got {found}")
        shown = self._places.show(group, cp_size, cp_size / self.size, leaves_metrics=leaves_metrics)
        try:
            yield
        finally:
            shown.put_back()


def unsupported_sharing(model: Any) -> Iterator[str]:
    """What of a model ranks cannot share packs in, in words."""
    cores = [core for it in model.modules() if (core := getattr(it, "core_attention", None)) is not None]
    engines = (seams.ENGINE_ATTENTION.owner(),) if seams.has_engine() else ()
    of_engine = [core for core in cores if isinstance(core, engines)]
    known = [core for core in of_engine if not seams.is_replaced(core, seams.ENGINE_ATTENTION)]
    foreign = [core for core in cores if not isinstance(core, VarlenAttention) and core not in known]
    for name in sorted({type(core).__name__ for core in foreign}):
        yield f"attention of class {name}"
    # It gets the rows past a pack's end as one document more, of padding alone.
    if of_engine and not seams.packs_have("pad_between_seqs"):
        yield "Transformer Engine's attention, of packs that cannot say pad_between_seqs"
    if any(hasattr(module, "mixer") for module in model.modules()):
        yield "Mamba layers"
    if getattr(model, "mtp", None) is not None:
        yield "multi-token prediction"
    if need_equal_rows(model.config):
        yield "experts over several ranks that need equal rows"
    # Its ranks are in two groups, which Megatron makes for one number of them.
    if any(getattr(core, "cp_comm_type", None) == "a2a+p2p" for core in cores):
        yield "cp_comm_type='a2a+p2p'"


def _unsupported_dynamic_sharing(model: Any) -> Iterator[str]:
    """The same if each pack says by how many ranks it is shared.

    What runs in the backward does not see them. A router's losses are summed over one group of tensor- and
    context-parallel ranks, which Megatron has for one number of them, and its global loss in each micro-batch
    over ranks of other packs.
    """
    yield from unsupported_sharing(model)
    config: Any = model.config
    if config.recompute_granularity is not None:
        yield f"recompute_granularity={config.recompute_granularity!r}"
    losses = config.moe_router_load_balancing_type if has_experts(config) else ()  # one name, or a list
    if "global_aux_loss" in losses:
        yield "routers with a global_aux_loss"
    if has_experts(config) and config.tensor_model_parallel_size > 1:
        yield "experts with tensor parallelism"


class ContextGroups:
    """Groups of neighbouring ranks of a data-parallel times context-parallel group, nested.

    A group of c ranks begins at a multiple of c. Making them is collective over all ranks of the job, also of
    those in other groups: every rank makes all of them, in one order. A group of one rank is None; one of all
    ranks is the parent itself: Megatron's data-parallel group, with context-parallel ranks in it.

    Groups of this rank that are `given`, the preferred ones first, take the place of those that would be made
    if they are of the ranks that are wanted. Others are left aside, destroyed ones among them: Megatron keeps
    those of hybrid context parallelism beyond the end of their world.
    """

    def __init__(self, parent: _Group, cp_sizes: Sequence[int], given: Iterable[_Group] = ()) -> None:
        self.parent, self.num_ranks, self.rank = parent, parent.size(), parent.rank()
        self.cp_sizes, self._is_warm = tuple(sorted(set(cp_sizes))), False
        ranks, given = _in_order(parent), [*given, parent]
        for size in cp_sizes:
            if size < 1 or len(ranks) % size:
                raise ValueError(f"expected cp_sizes that divide {len(ranks)} ranks, got {size}")
        self._groups: dict[int, _Group | None] = {1: None}
        for size in {*self.cp_sizes} - {1}:
            first = self.rank // size * size
            fitting = [group for group in given if _in_order(group) == ranks[first : first + size]]
            self._groups |= {size: fitting[0]} if fitting else {}
        if missing := [size for size in self.cp_sizes if size not in self._groups]:
            everywhere: list[list[int]] = [[]] * distributed.get_world_size()
            distributed.all_gather_object(everywhere, ranks)
            for size in missing:
                parents = sorted({tuple(found) for found in everywhere})
                cuts = [[*of[at : at + size]] for of in parents for at in range(0, len(of), size)]
                self._groups[size], _every = distributed.new_subgroups_by_enumeration(cuts)

    def of_size(self, cp_size: int) -> _Group | None:
        """This rank's group of a size; None for one rank."""
        return self._groups[cp_size]

    def known(self) -> dict[int, _Group]:
        """Those of several ranks, by size."""
        return {size: group for size in self.cp_sizes if (group := self._groups[size]) is not None}

    def warm_up(self, device: torch.device) -> None:
        """Uses every group, the largest first, once: no capture makes a communicator. Collective."""
        if not self._is_warm:
            self._is_warm = True
            for group in reversed(self.known().values()):
                distributed.all_reduce(torch.zeros(1, device=device), group=group)


# The parent of the groups that were made last, and these by size.
_kept: tuple[_Group | None, Mapping[int, _Group]] = (None, {})


def _in_order(group: _Group | None) -> list[int]:
    """The ranks of a group in the order of their places; none if it is one no more."""
    return distributed.get_process_group_ranks(group) if ranks_of(group) else []


def context_groups(cp_sizes: Sequence[int]) -> ContextGroups:
    """The groups of Megatron's data-parallel times context-parallel ranks, some of which may share a pack.

    Each is made when it is first asked for, collectively over all ranks of the job, and anew once
    Megatron's groups are others. Those that Megatron has itself (`hybrid_context_parallel`) are
    Megatron's.

    Raises:
        RuntimeError: if Megatron's groups are not initialized.
        ValueError: if a size does not divide the number of those ranks, or a group of it was destroyed,
            and Megatron's were not: other ranks may still have theirs, and would not make it anew.
    """
    global _kept
    try:
        parent = seams.DATA_AND_CONTEXT_GROUP.function()(with_context_parallel=True)
    except AssertionError as error:
        raise RuntimeError("expected Megatron's process groups to be initialized, found none") from error
    kept = _kept[1] if _kept[0] is parent else {}
    if destroyed := [size for size in cp_sizes if size in kept and not _in_order(kept[size])]:
        raise ValueError(
            f"expected the groups of {cp_sizes} ranks that were made before, got none of {destroyed}: they "
            "have been destroyed; make Megatron's groups anew as well"
        )
    static = seams.PACK_GROUPS["cp"].function()(check_initialized=False)  # the same for all packs
    given = (*seams.hybrid_groups(cp_sizes), *kept.values(), static)
    made = ContextGroups(parent, cp_sizes, given)
    _kept = parent, {**kept, **made.known()}
    return made
