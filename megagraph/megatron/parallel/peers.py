# SPDX-License-Identifier: Apache-2.0
"""The ranks that share a model's communicators: they capture and drop graphs together.

They are those that run the same packs (megagraph/megatron/parallel/groups.py, Note [Groups in a graph]), and
replay and run eager together; or, if each pack says by how many ranks it is shared, all that may ever share
one, of which those of one pack do so. docs/architecture.md, Ranks, says what they ask each other, and when.
Ranks that share experts and run other packs learn their capacities so
(megagraph/megatron/graphs/dispatcher.py, Note [Equal rows]).

A failure between two collectives of one layer cannot be healed: the others wait in the second one, as they
would in eager.
"""

import pickle
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn

from megagraph.bank.sites import SiteSpec
from megagraph.megatron.parallel.context import ContextRanks
from megagraph.megatron.parallel.groups import Ranks, groups_of_pack, held_by, ranks_of, ranks_of_pack
from megagraph.megatron.parallel.model_parallel import TensorRanks
from megagraph.megatron.seams import STAGE_GROUP

__all__ = ["HostGroup", "Peers", "patience_of_job"]


# For all models, by their ranks and what they ask: the group, the store of the world that it is in, and the
# group's number. It stays as long as that world does: a rank that is done must not hang up on another one.
_GLOO_GROUPS: dict[tuple[Ranks, str], tuple[Any, Any, int]] = {}


def _gloo_group(ranks: Ranks, when: str = "between steps") -> Any:
    """A group of these ranks, each of which asks for it equally often.

    `new_group()` names it after the number of groups that a rank is in. Another rank may be in more of
    them, and the two would wait for each other under different names.
    """
    world = distributed.distributed_c10d._get_default_store()
    group, of_world, number = _GLOO_GROUPS.get((ranks, when), (None, None, 0))
    if group is None or of_world is not world:
        members, number = sorted(ranks), number + 1
        name = f"megagraph/{when}/{'-'.join(map(str, members))}/{number}"
        store = distributed.distributed_c10d.PrefixStore(name, world)
        place = members.index(distributed.get_rank())
        group = distributed.ProcessGroupGloo(store, place, len(members), patience_of_job())
        _GLOO_GROUPS[ranks, when] = group, world, number
    return group


def patience_of_job() -> timedelta:
    """How long a rank of this job waits for another one, as `init_process_group()` was told."""
    world: Any = distributed.group.WORLD
    options = world._get_backend(world._device_types[0]).options
    patience: timedelta = getattr(options, "_timeout", distributed.default_pg_timeout)
    return patience


class HostGroup:
    """Ranks, this one among them, that ask each other for a few integers; none if there is no other one.

    `who` says what they have in common, for an error.
    """

    def __init__(self, ranks: Ranks, who: str) -> None:
        self._first, self._who = ranks, who
        self.size: int = max(len(ranks), 1)

    def _ranks(self) -> Ranks:
        """Those of now."""
        return self._first

    def max_over_ranks(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the ranks. Every one of them calls this equally often."""
        if self.size == 1:
            return list(values)
        largest = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        self._group().allreduce([largest], distributed.ReduceOp.MAX).wait()
        return largest.tolist()

    def gather(self, what: object) -> list[Any]:
        """What each of them says, in the order of ranks; it costs little if all say nothing: None."""
        if self.size == 1:
            return [what]
        own = b"" if what is None else pickle.dumps(what)
        (longest,) = self.max_over_ranks([len(own)])
        if longest == 0:
            return [None] * self.size
        padded = torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8)
        said = [torch.empty_like(padded) for _ in range(self.size)]
        self._group().allgather([said], [padded]).wait()
        return [pickle.loads(bytes(each.tolist())) if each.any() else None for each in said]

    def agree_on(self, what: str) -> bool:
        """Whether all of them say the same."""
        said = zlib.crc32(what.encode())
        largest, least = self.max_over_ranks([said, -said])
        return largest == -least

    def compare(self, options: Mapping[str, object]) -> None:
        """Raises `ValueError` on all of them if they have not the same options, naming one that differs."""
        own = {name: repr(value) for name, value in options.items()}
        if self.agree_on(repr(own)):
            return
        said = self.gather(own)
        name = next(name for name in options if len({each.get(name) for each in said}) > 1)
        each = ", ".join(
            f"{it.get(name)} on rank {rank}" for rank, it in zip(sorted(self._ranks()), said, strict=True)
        )
        raise ValueError(f"{name}: expected the same on all ranks that {self._who}, got {each}")

    def _group(self) -> Any:
        ranks = self._ranks()
        if len(ranks) != self.size:
            raise RuntimeError(
                f"expected the process groups of the {self.size} ranks that {self._who}, as when "
                f"the model was first called, found those of {max(len(ranks), 1)}"
            )
        return _gloo_group(ranks)


class Peers(HostGroup):
    """The ranks that run, or may run, the same packs of a model: all that share communicators of its graphs.

    If its packs say by how many ranks they are shared, these are `cp_sizes`.
    """

    def __init__(self, model: nn.Module, cp_sizes: Sequence[int] = ()) -> None:
        self._model = weakref.ref(model)
        self._of_pack: Mapping[str, Any] | None = None  # until a group is destroyed
        self._same_pack: Ranks = frozenset()
        self.tensor = TensorRanks(model)
        self.context = ContextRanks(model, cp_sizes)
        self.run_other_packs = self.context.is_dynamic  # some of them may do so at the same time
        super().__init__(self._ranks(), "may share packs" if self.run_other_packs else "run the same packs")
        self._held: dict[int, Any] = {}  # groups that captured layers hold, by id
        # Answers with what says how the layers' state has changed. Weak, since graphs lead here.
        self.what_changed: Callable[[], Callable[[], str] | None] = lambda: None

    def _ranks(self) -> Ranks:
        if not self.run_other_packs:
            return self.same_pack()
        # All that hold a part of the same layers, or a copy: of tensor, context and data parallelism.
        return ranks_of(STAGE_GROUP.function()(check_initialized=False, with_context_parallel=True))

    def same_pack(self) -> Ranks:
        """The ranks that run the same pack, this one among them; none if no other one does."""
        if self._of_pack is None:
            self._of_pack = groups_of_pack(self._model())
            self._same_pack = ranks_of_pack({name: ranks_of(it) for name, it in self._of_pack.items()})
        return self._same_pack

    def rank(self) -> int:
        """This rank's place among them."""
        return 0 if self.size == 1 else sorted(self._ranks()).index(distributed.get_rank())

    def run_eager_alike(self, number: int, variant: int, site: int, why: str) -> None:
        """Inside of a step, where this rank has to run eager: waits until all that share the pack have to.

        Raises `RuntimeError`, which says why, if they do not come to it as long as the job waits for a rank.
        """
        own, asked = distributed.get_rank(), (number, variant, site)
        here = [*asked, *(-each for each in asked)]
        ranks = self.same_pack()
        if self.run_other_packs:  # those of now, as the modules see them
            groups = groups_of_pack(self._model())
            tensor, context = (ranks_of(groups.get(name)) or {own} for name in ("tp", "cp"))
            ranks = frozenset(one + other - own for one in tensor for other in context)
        if len(ranks) < 2:
            return
        largest = torch.tensor(here, device="cpu")
        try:
            _gloo_group(ranks, "inside of steps").allreduce([largest], distributed.ReduceOp.MAX).wait()
        except RuntimeError as error:  # nobody came
            raise self._alone(site, why) from error
        if largest.tolist() != here:
            raise self._alone(site, why)

    def _alone(self, site: int, why: str) -> RuntimeError:
        what = "a micro-batch" if site == -1 else f"site {site} of one" if site >= 0 else f"layer {-2 - site}"
        if changed := (self.what_changed() or str)():
            why += f"; changed: {changed}"
        return RuntimeError(
            f"rank {distributed.get_rank()} has to run {what} eager ({why}), and other ranks that share the "
            "pack do not: their graphs would wait for it in collectives. Expected what keeps it eager on all "
            "of them, or from the beginning of a step on"
        )

    def hold(self, sites: Iterable[SiteSpec]) -> None:
        """Remembers the groups of sites that are about to be captured: these may hold others by and by."""
        held = [group for site in sites for group in held_by(site).values()]
        self._held |= {id(group): group for group in held if ranks_of(group) <= self.same_pack()}

    def let_go(self) -> None:
        """Forgets the groups of sites, whose graphs have been released."""
        self._held.clear()

    def use(self, group: Any) -> bool:
        """Whether the graphs, or these ranks, need a process group; None and the world are every group."""
        if group is None or group is distributed.group.WORLD:
            return self.size > 1
        return group in (*(self._of_pack or {}).values(), *self.context.known(), *self._held.values())

    def leave(self, group: Any) -> None:
        """Forgets the groups: one is about to be destroyed, or every group if it is None or the world."""
        self.let_go()
        self._of_pack = None
        self.context.leave(group)
