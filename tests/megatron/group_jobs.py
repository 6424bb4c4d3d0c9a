# SPDX-License-Identifier: Apache-2.0
"""What ranks run whose layers hold process groups of several kinds, and ranks that count other packs."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import megatron_rig as rig
import torch
from parallel_jobs import steps_of
from same_bits import assert_same_bits
from streams import make_groups, seed_streams, seeded
from torch import Tensor, distributed, nn

import megagraph
from megagraph.bank.sites import SiteSpec
from megagraph.demo.trainer import Trainer
from megagraph.megatron.parallel.groups import ModelGroups
from megagraph.megatron.parallel.peers import Peers

NUM_STEPS = 4
COMES_AT = 2


class _Model(nn.Module):
    """A module with a config, and groups where it is given any."""

    def __init__(self, **groups: Any) -> None:
        super().__init__()
        self.config = rig.transformer_config(rig.OPTIONS)
        if groups:
            from megatron.core.process_groups_config import ProcessGroupCollection

            self.pg_collection = ProcessGroupCollection(**groups)


def _regroup(**sizes: int) -> Any:
    """Megatron's groups for some sizes, in a collection of all of them."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    make_groups(**sizes)
    return ProcessGroupCollection.use_mpu_process_groups()


def _of_each_rank() -> Any:
    """A group of this rank alone."""
    return [distributed.new_group([rank]) for rank in range(2)][distributed.get_rank()]


# -- which groups a model has ----------------------------------------------------------------------


def groups_of_pack(*, sizes: dict[str, int]) -> tuple[list[str], list[int]]:
    """The groups over which packs are shared in a layout, and the ranks that run the same packs."""
    _regroup(**sizes)
    groups = ModelGroups(_Model())
    return [*groups.of_pack()], sorted(groups.ranks())


def own_groups() -> tuple[list[int], list[int], list[int]]:
    """With tensor parallelism, the ranks that run the packs of three models.

    One has a group of its own for each rank, one had one that was destroyed, and one has nothing.
    """
    destroyed = distributed.new_group([0, 1])
    distributed.destroy_process_group(destroyed)
    models = _Model(tp=_of_each_rank()), _Model(tp=destroyed), _Model()
    found = tuple(sorted(ModelGroups(model).ranks()) for model in models)
    return found  # type: ignore[return-value]


def agreements() -> list[bool]:
    """What the ranks of a tensor-parallel group agree on: the same, what each alone says, and again."""
    peers, rank = Peers(_Model()), distributed.get_rank()
    return [peers.agree_on(what) for what in ("the same", f"of rank {rank}", "", "x" * rank, "the same")]


def use_and_leave() -> None:
    """Which groups peers use, before and after they leave them; that they ask each other all the time.

    Bugs: torch names a group by its ranks and by how many groups a rank is in. A second one of the same ranks
    could not be made when some group had been destroyed, and none where one rank was in more groups.
    """
    from megatron.core import parallel_state

    model, rank = _Model(), distributed.get_rank()
    if rank == 0:
        distributed.new_group([0], use_local_synchronization=True)
    peers, alone = Peers(model), Peers(_Model(tp=_of_each_rank()))
    group = parallel_state.get_tensor_model_parallel_group()
    other = distributed.new_group([0, 1])
    world = distributed.group.WORLD
    assert peers.use(group) and peers.use(None) and peers.use(world) and not peers.use(other)
    assert not alone.use(group) and not alone.use(None) and alone.max_over_ranks([3]) == [3]
    assert peers.max_over_ranks([3, rank]) == peers.max_over_ranks([3, 1]) == [3, 1]
    assert peers.gather("ab"[:rank]) == ["", "a"]
    distributed.destroy_process_group(other)
    assert Peers(model).max_over_ranks([rank]) == [1]
    peers.leave(None)
    assert not peers.use(group) and peers.use(None)
    assert peers.max_over_ranks([rank]) == [1] and peers.use(group)


def hold_and_let_go() -> None:
    """Which groups peers use while graphs have another group of a layer's, and once these are released."""
    peers, layer, other = Peers(_Model()), nn.Linear(3, 3), distributed.new_group([0, 1])
    layer.ep_group = other
    assert not peers.use(other)
    peers.hold([SiteSpec(name="layer", module=layer)])
    del layer.ep_group
    assert peers.use(other)
    peers.let_go()
    assert not peers.use(other) and peers.use(None)


# -- layers that hold groups -----------------------------------------------------------------------


def _averaging(mlp: Any, group: Any) -> None:
    """Lets a module add the average over a group of what the first token of each rank's pack has."""
    forward = mlp.forward

    def with_average(hidden: Tensor, **arguments: Any) -> Any:
        out, bias = forward(hidden, **arguments)
        average = out[0].detach().mean()
        distributed.all_reduce(average, group=group)
        return out + average / group.size(), bias

    mlp.forward = with_average


def _holds(chunk: Any, how: str, group: Any) -> None:
    """Gives the second layer a group."""
    mlp = chunk.decoder.layers[1].mlp
    if how == "parameter":
        mlp.linear_fc1.weight.group = group
    elif how == "collection":
        from megatron.core.process_groups_config import ProcessGroupCollection

        mlp.pg_collection = ProcessGroupCollection(tp=group)
    elif how == "whole collection":
        mlp.pg_collection = chunk.pg_collection
    else:
        mlp.ep_group = group
        _averaging(mlp, group)


def _compared(
    make: rig.Make, steps: Sequence[Sequence[rig.Micro]], before: Callable[..., Any] = lambda *_: None
) -> dict[str, Any]:
    """Trains eager and graphed; `before` is called before each step of both. The report of the latter."""

    def around(trainer: Trainer, index: int) -> AbstractContextManager[None]:
        before(trainer, index)
        return nullcontext()

    return rig.compare_runs(steps, seeded(make), around=around).report


def hold_other_packs(*, how: str) -> dict[str, Any]:
    """Each rank trains on packs of its own, and a layer holds Megatron's group of experts over both."""
    group = _regroup(expert_model_parallel_size=2).ep
    steps = steps_of(NUM_STEPS, seed=distributed.get_rank())
    return _compared(partial(rig.plain, prepare=partial(_holds, how=how, group=group)), steps)


def hold_later() -> dict[str, Any]:
    """As before, but the layer gets the group when there are graphs."""
    group = _regroup(expert_model_parallel_size=2).ep

    def give(trainer: Trainer, index: int) -> None:
        if index == COMES_AT:
            _holds(trainer.chunk, "attribute", group)

    steps = steps_of(NUM_STEPS, seed=distributed.get_rank())
    return _compared(lambda: Trainer(rig.OPTIONS), steps, give)


def hold_same_packs(*, transformer: dict[str, Any]) -> dict[str, Any]:
    """Tensor-parallel ranks, of whose layers one holds another group of theirs; it is replaced later on."""
    first, second = (distributed.new_group([0, 1]) for _ in range(2))
    gone: list[tuple[int, int]] = []

    def replace(trainer: Trainer, index: int) -> None:
        if index != COMES_AT:
            return
        (before,) = megagraph.reports()
        mlp = trainer.chunk.decoder.layers[1].mlp
        mlp.ep_group = second
        del mlp.forward
        _averaging(mlp, second)
        unused = distributed.new_group([0, 1])
        distributed.destroy_process_group(unused)
        (between,) = megagraph.reports()
        if before["graphs"]:  # or both runs could not have it
            distributed.destroy_process_group(first)
        (after,) = megagraph.reports()
        gone.append((between["graphs"] - before["graphs"], after["graphs"]))

    prepare = partial(_holds, how="attribute", group=first)
    make = partial(rig.plain, prepare=prepare, config=transformer)
    report = _compared(make, steps_of(NUM_STEPS), replace)
    return {**report, "gone": gone[-1]}


# -- ranks that count other packs ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Unreadable(rig.Micro):
    """A pack whose keys have offsets of their own, for all that anybody can tell without waiting."""

    def params(self, device: torch.device) -> Any:
        params = super().params(device)
        params.cu_seqlens_kv = params.cu_seqlens_kv.clone()
        return params


def learn_apart(*, how: str, transformer: dict[str, Any]) -> dict[str, Any]:
    """Trains without capacities, while rank 0 has other attributes of the same packs in its first step."""
    many = [rig.Micro(lengths=(4,) * 10 + (24,)), rig.Micro(lengths=(33, 7), seed=1)]
    steps = [many, *(micros[::2] for micros in steps_of(NUM_STEPS - 1, seed=1))]
    if distributed.get_rank() == 0:
        fields = [vars(micro) for micro in many]
        if how == "unreadable":
            steps[0] = [_Unreadable(**each) for each in fields]
        else:  # its offsets end in empty documents
            steps[0] = [rig.Micro(**{**each, "lengths": each["lengths"] + (0,) * 20}) for each in fields]
    runs = {}
    for mode in ("eager", "graph"):
        seed_streams()
        runs[mode] = rig.train(rig.graph_config(capacities=(), mode=mode), steps, config=transformer)
    assert_same_bits(runs["eager"], runs["graph"])
    return {mode: run.report for mode, run in runs.items()}
