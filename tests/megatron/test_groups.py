# SPDX-License-Identifier: Apache-2.0
"""A graph holds collectives only of groups whose ranks run the same pack; they agree on what they learn."""

import dataclasses
import logging
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import megatron_rig as rig
import parallel_jobs
import pytest
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from notes import told
from same_bits import assert_same_bits
from streams import make_groups, seeded
from torch import Tensor, distributed, nn
from worlds import on_ranks

import megagraph
from megagraph._C import PackForm, VariantKey
from megagraph.bank.sites import SiteSpec
from megagraph.config import GraphConfig
from megagraph.demo.trainer import Trainer, transformer_config
from megagraph.megatron.graphs.dispatcher import Dispatcher
from megagraph.megatron.graphs.verifying import Verifier
from megagraph.megatron.parallel.groups import ranks_of_pack
from megagraph.megatron.parallel.peers import Peers, patience_of_job
from megagraph.reasons import EagerReason

LAYERS, MICROS = 2, parallel_jobs.PACKS
STEP_CALLS = MICROS * LAYERS
COMES_AT = 2  # in which step a layer gets a group
TENSOR_PARALLEL = {"tensor_model_parallel_size": 2}


def model(**groups: Any) -> nn.Module:
    """A module with a config, and groups where it is given any."""
    made: Any = nn.Identity()
    made.config = transformer_config(rig.OPTIONS)
    if groups:
        made.pg_collection = ProcessGroupCollection(**groups)
    return made


def test_of_tensor_and_context_parallelism_together_all_ranks_are_peers() -> None:
    tensor, context, both = frozenset({0, 1}), frozenset({0, 2}), frozenset({0, 1, 2, 3})
    assert ranks_of_pack({"tp": tensor, "cp": context, "tp_cp": both}) == both
    assert ranks_of_pack({"tp": tensor, "tp_cp": tensor}) == tensor
    assert ranks_of_pack({"cp": context}) == context
    # No group has them all: the context-parallel one cannot be in a graph.
    assert ranks_of_pack({"tp": tensor, "cp": context}) == tensor
    # Of a model whose own layers share nothing.
    assert ranks_of_pack({"tp_cp": both}) == frozenset()


@on_ranks(2, tensor_parallel=2)
def test_ranks_that_have_left_their_groups_still_ask_each_other() -> None:
    """Ranks agree only on what all of them say. Bugs: torch names a group by its ranks and by how many groups
    a rank is in; there was none where one rank was in more, nor a second where one had been destroyed."""
    rank, without = distributed.get_rank(), model()
    if rank == 0:
        distributed.new_group([0], use_local_synchronization=True)
    own = [distributed.new_group([each]) for each in range(2)][rank]
    peers, alone = Peers(without), Peers(model(tp=own))
    said = "the same", f"of rank {rank}", "", "x" * rank, "the same"
    assert [peers.agree_on(what) for what in said] == [True, False, True, False, True]
    assert sorted(peers.same_pack()) == [0, 1] and not alone.same_pack()
    group = parallel_state.get_tensor_model_parallel_group()
    other, world = distributed.new_group([0, 1]), distributed.group.WORLD
    assert peers.use(group) and peers.use(None) and peers.use(world) and not peers.use(other)
    assert not alone.use(group) and not alone.use(None) and alone.max_over_ranks([3]) == [3]
    assert peers.max_over_ranks([3, rank]) == peers.max_over_ranks([3, 1]) == [3, 1]
    assert peers.gather("ab"[:rank]) == ["", "a"]
    distributed.destroy_process_group(other)
    assert Peers(without).max_over_ranks([rank]) == [1]
    assert sorted(Peers(model(tp=other)).same_pack()) == [0, 1]
    peers.leave(None)
    assert not peers.use(group) and peers.use(None)
    assert peers.max_over_ranks([rank]) == [1] and peers.use(group)


@on_ranks(2, tensor_parallel=2)
def test_a_group_that_only_released_graphs_had_is_used_no_more() -> None:
    """Else whoever destroys it would drop the graphs of now, and it would stay in memory."""
    peers, layer, other = Peers(model()), nn.Linear(3, 3), distributed.new_group([0, 1])
    layer.ep_group = other
    assert not peers.use(other)
    peers.hold([SiteSpec(name="layer", module=layer)])
    del layer.ep_group
    assert peers.use(other)
    peers.let_go()
    assert not peers.use(other) and peers.use(None)


def averaging(mlp: Any, group: Any) -> None:
    """Lets a module add the average over a group of what the first token of each rank's pack has."""

    def with_average(out: Tensor) -> Tensor:
        average = out[0].detach().mean()
        distributed.all_reduce(average, group=group)
        return out + average / group.size()

    rig.changes_output(mlp, with_average)


def holds(chunk: Any, how: str, group: Any) -> None:
    """Gives the second layer a group."""
    mlp = chunk.decoder.layers[1].mlp
    if how == "parameter":
        mlp.linear_fc1.weight.group = group
    elif "collection" in how:
        is_whole = how == "whole collection"
        mlp.pg_collection = chunk.pg_collection if is_whole else ProcessGroupCollection(tp=group)
    else:
        mlp.ep_group = group
        averaging(mlp, group)


@pytest.mark.parametrize("how", ["parameter", "collection", "whole collection", "attribute, later"])
@on_ranks(2)
def test_a_layer_with_collectives_of_other_packs_leaves_the_graphs(how: str) -> None:
    """By name, as soon as it gets such a group; the other layer replays, on packs of each rank's own.
    Groups of the job that no layer has taken keep nothing eager: dense layers hold the collection of all."""
    make_groups(expert_model_parallel_size=2)
    group = ProcessGroupCollection.use_mpu_process_groups().ep
    at = COMES_AT if "later" in how else 0
    around = rig.at(at, lambda trainer: holds(trainer.chunk, how, group))
    make = partial(Trainer, rig.OPTIONS)
    report = parallel_jobs.train_pair(make=make, around=around, own_packs=True, num_steps=at + 2)
    if how == "whole collection":
        rig.ran(report, WARMING_UP=STEP_CALLS)
        return
    eager = {"SCOPE_UNSUPPORTED": STEP_CALLS // 2}
    eager |= {"STATE_CHANGED": STEP_CALLS} if at else {}
    (failure,) = rig.ran(report, failures=1, WARMING_UP=STEP_CALLS, **eager)["failures"]
    assert failure.startswith("layer 1 (TransformerLayer) stays eager (SCOPE_UNSUPPORTED): collectives of")
    assert "other packs (ep, 2 ranks: mlp." in failure and failure.endswith("are not supported yet")


@on_ranks(2, tensor_parallel=2)
def test_another_group_of_the_same_ranks_is_in_the_graphs_until_it_goes() -> None:
    """Experts may be spread over tensor-parallel ranks: what counts is who they are."""
    first, second = (distributed.new_group([0, 1]) for _ in range(2))

    def replace(trainer: Trainer) -> None:
        (before,) = megagraph.reports()
        mlp = trainer.chunk.decoder.layers[1].mlp
        mlp.ep_group = second
        del mlp.forward
        averaging(mlp, second)
        third = distributed.new_group([0, 1])
        distributed.barrier(third)  # or torch, told to end too early, waits 8 min for its thread
        distributed.destroy_process_group(third)
        (between,) = megagraph.reports()
        assert between["graphs"] == before["graphs"]  # which go not with a group that nobody holds
        if before["graphs"]:  # or both runs could not have it
            distributed.destroy_process_group(first)
        (after,) = megagraph.reports()
        assert after["graphs"] == 0

    prepare = partial(holds, how="attribute", group=first)
    make = partial(rig.ModelTrainer, prepare=prepare, config=TENSOR_PARALLEL)
    report = parallel_jobs.train_pair(make=make, around=rig.at(COMES_AT, replace), num_steps=COMES_AT + 2)
    assert report["failures"] == [] and report["replays"] >= 2 * STEP_CALLS


@pytest.mark.parametrize("granularity", ["layer", "chunk"])
@on_ranks(2, tensor_parallel=2)
def test_ranks_capture_the_same_layers_whatever_one_of_them_has_forgotten(granularity: str) -> None:
    """Bug: a rank that got other layers forgot which graphs had been wrong, captured more, and waited."""
    failing, wrong = Verifier.failing, [{0: (EagerReason.VERIFY_FAILED, "wrong once")}]
    pair = rig.Pair(config=TENSOR_PARALLEL, plugin={"cuda_graph_granularity": granularity})
    with mock.patch.object(Verifier, "failing", lambda *args: wrong.pop() if wrong else failing(*args)):
        pair.step(rig.ONE, rig.TWO, times=2)
        if distributed.get_rank() == 0:
            for block in (trainer.chunk.decoder for trainer in pair.both):
                block.layers = nn.ModuleList(reversed(block.layers))
        pair.step(rig.ONE, rig.TWO, times=2)
    report = pair.report()
    of_graphs = {name: report[name] for name in ("sites", "graphs", "replays")}
    said: list[Any] = [None, None]
    distributed.all_gather_object(said, of_graphs)
    assert said[0] == said[1] and of_graphs["sites"] == LAYERS
    assert of_graphs["graphs"] == 2 * (LAYERS if granularity == "chunk" else 1)


def dispatcher(cp_sizes: tuple[int, ...] = (1,), shares: int = 1) -> Dispatcher:
    """One of a model whose packs as many ranks share, and rows between its layers `shares` ranks."""
    context = mock.Mock(size=cp_sizes[0], sizes=cp_sizes, is_dynamic=False)
    arguments = mock.Mock(depend_on_max_seqlen=False, are_cut=False, is_by_token=False)
    model_config = mock.Mock(num_moe_experts=None, apply_rope_fusion=False, cuda_graph_warmup_steps=3)
    tensor = mock.Mock(shards_sequence=shares > 1, row_shares=shares)
    peers = mock.Mock(context=context, tensor=tensor, size=1, run_other_packs=False)
    return Dispatcher(model_config, GraphConfig(), arguments, peers)


def test_a_rank_that_waits_long_to_learn_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    made = dispatcher()
    with caplog.at_level(logging.WARNING, logger="megagraph"):
        for step in range(50):
            made.learn(lambda said: [1, *said[1:]])
            assert made.by_cp_size == {}
            if step == 0:  # its warm-up is over from now on
                made.due.note(VariantKey(None, PackForm(False, False, None), grad=False))
                made.due.end_step()
                assert made.due.warmed_up
    (sentence,) = caplog.messages
    assert "20 steps after its warm-up" in sentence and "cuda_graph_max_packed_seqs" in sentence


@pytest.mark.parametrize(
    ("cp_sizes", "shares", "tokens"), [((1,), 1, 61), ((1, 2), 1, 62), ((2,), 3, 66), ((1,), 3, 63)]
)
def test_learned_tokens_are_such_as_ranks_can_share(cp_sizes: Any, shares: int, tokens: int) -> None:
    """Bug: the first capture of a model whose ranks share rows raised, though nobody had set an option."""
    made = dispatcher(cp_sizes, shares)
    made.learn(lambda said: [0, 0, 61, 4, 8])
    found = [(it.tokens, it.max_seqlen) for size in cp_sizes for it in made.by_cp_size[size]]
    assert found == [(tokens, size * tokens) for size in cp_sizes for _ in range(2)]


@pytest.mark.parametrize("how", ["unreadable", "longer"])
@on_ranks(2, tensor_parallel=2)
def test_ranks_learn_the_same_capacities_from_other_packs(how: str) -> None:
    """Bug: each rank learned its own, so that they used no graph. On rank 0 the first packs say otherwise."""
    many = [rig.Micro(lengths=(4,) * 10 + (24,)), rig.Micro(lengths=(33, 7), seed=1)]
    steps = [many, *(micros[::2] for micros in parallel_jobs.steps_of(2, seed=1))]
    if distributed.get_rank() == 0:
        if how == "unreadable":
            steps[0] = [dataclasses.replace(micro, pack=rig.split) for micro in many]
        else:  # its offsets end in empty documents
            steps[0] = [dataclasses.replace(micro, lengths=micro.lengths + (0,) * 20) for micro in many]
    runs, train = {}, seeded(rig.train)
    for mode in ("eager", "graph"):
        runs[mode] = train(rig.graph_config(capacities=(), mode=mode), steps, config=TENSOR_PARALLEL)
        capacities = runs[mode].report["capacities"]
        everywhere: list[Any] = [None, None]
        distributed.all_gather_object(everywhere, capacities)
        assert everywhere == [capacities] * 2 and runs[mode].report["failures"] == []
        assert max(it["num_seqs"] for it in capacities) == (32 if how == "unreadable" else 64)
    assert_same_bits(runs["eager"], runs["graph"])
    assert runs["graph"].report["replays"] == (1 if how == "unreadable" else 2) * 2 * LAYERS


def test_ranks_wait_for_each_other_as_long_as_their_job_does() -> None:
    """Bug: half an hour, however long the checkpoint of a rank takes, or however short its patience is."""
    world: Any = distributed.group.WORLD
    tell, patience = partial(distributed.distributed_c10d._set_pg_timeout, group=world), timedelta(seconds=77)
    with told(tell, patience, patience_of_job()):
        assert patience_of_job() == patience
