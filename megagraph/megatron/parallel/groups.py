# SPDX-License-Identifier: Apache-2.0
"""The process groups of one model: which ones its layers hold, and whose ranks run the same pack.

Note [Groups in a graph]
A graph holds collectives only of groups whose ranks run the same pack. All of them replay the same variant
then, so that a communicator finds its operations in a graph on every rank or on none, and of the same shapes.
Ranks run the same pack if they share it: those of tensor and of context parallelism. Whether those of
another group do is a matter of its ranks, and not of its name: expert parallelism may be folded into tensor
parallelism, and go over data-parallel ranks in the next run.

Nothing tells which of its groups a module will use. One that is an attribute of a module or parameter counts
as used, but of a module that a site bypasses, calling what is inside; but a router's for a loss that it does
not have, and the one over which experts are saved. A `ProcessGroupCollection` has every group of the job, of
which any layer uses those of tensor and context parallelism; others count if a module has taken them out
of it.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import distributed, nn

from megagraph.bank.sites import SiteSpec
from megagraph.megatron.seams import PACK_GROUPS, SAVING_GROUP
from megagraph.reasons import EagerReason, Why

__all__ = [
    *("COLLECTIONS", "Ranks", "groups_of_pack", "held_by", "ranks_of", "ranks_of_pack"),
    "refused_for_groups",
]

Ranks = frozenset[int]
COLLECTIONS = ("pg_collection", "_pg_collection")  # attributes of modules that hold groups
# Of a router of experts, which has one loss that is reduced over data-parallel ranks.
_OF_GLOBAL_LOSS = "tp_dp_cp_group"


def ranks_of(group: object) -> Ranks:
    """The ranks of a process group; none if it is no group, or is one no more."""
    with contextlib.suppress(KeyError):  # destroyed
        if isinstance(group, distributed.ProcessGroup):
            return frozenset(distributed.get_process_group_ranks(group))
    return frozenset()


def _is_used(name: str, owner: object) -> bool:
    """Whether a module or parameter is taken to use a group that it has as an attribute."""
    if name == _OF_GLOBAL_LOSS and (coefficient := getattr(owner, "get_aux_loss_coeff", None)) is not None:
        return bool(coefficient("global_aux_loss") > 0)
    return (type(owner).__module__, name) != SAVING_GROUP


def _used_by(owner: object) -> Iterator[tuple[str, object]]:
    """What may be a group, of a module or parameter: by name, as seen from it."""
    for name, value in vars(owner).items():
        if name in COLLECTIONS:
            yield from ((f"{name}.{used}", getattr(value, used, None)) for used in ("tp", "cp"))
        elif isinstance(value, distributed.ProcessGroup) and _is_used(name, owner):
            yield name, value


def ranks_of_pack(groups: Mapping[str, Ranks]) -> Ranks:
    """The ranks of the smallest of some groups that has those of tensor and of context parallelism.

    `groups` are by Megatron's names, without those of one rank. If none has both it is the tensor-parallel
    one, and the other one leaves the graph.
    """
    tensor, context = groups.get("tp", frozenset()), groups.get("cp", frozenset())
    fitting = (ranks for ranks in groups.values() if ranks >= tensor | context)
    return min(fitting, key=len, default=tensor) if tensor or context else frozenset()


def groups_of_pack(model: Any) -> Mapping[str, Any]:
    """The groups of several ranks over which a model shares its packs, by Megatron's names.

    As the model has them; if its tensor-parallel one is missing or destroyed, as Megatron has them.
    """
    own = getattr(model, "pg_collection", None)
    if ranks_of(getattr(own, "tp", None)):
        groups = {name: getattr(own, name, None) for name in PACK_GROUPS}
    else:
        groups = {name: seam.function()(check_initialized=False) for name, seam in PACK_GROUPS.items()}
    return {name: group for name, group in groups.items() if len(ranks_of(group)) > 1}


def held_by(site: SiteSpec) -> Mapping[str, Any]:
    """The groups of several ranks that modules and parameters of a site hold, each once: by attribute."""
    groups: dict[int, tuple[str, object]] = {}
    for path, owner in (*site.named_modules(), *site.named_parameters()):
        for name, group in () if path in site.bypassed else _used_by(owner):
            if len(ranks_of(group)) > 1:
                groups.setdefault(id(group), (f"{path}.{name}" if path else name, group))
    return dict(groups.values())


def refused_for_groups(sites: Sequence[SiteSpec], same_pack: Ranks, model: nn.Module) -> Mapping[int, Why]:
    """Sites of a model, by index, that hold groups of others than the ranks that run the same pack: why."""
    found: dict[int, Why] = {}
    own = getattr(model, "pg_collection", None)
    names = {} if own is None else {id(group): name for name, group in reversed(vars(own).items())}
    held = ((index, *each) for index, site in enumerate(sites) for each in held_by(site).items())
    for index, holder, group in held:
        if not ranks_of(group) <= same_pack:
            attribute = holder.rpartition(".")[2].strip("_").removesuffix("_group")
            who = f"{names.get(id(group), attribute)}, {len(ranks_of(group))} ranks: {holder}"
            why = f"collectives of ranks that run other packs ({who}) are not supported yet"
            found.setdefault(index, (EagerReason.SCOPE_UNSUPPORTED, why))
    return found
