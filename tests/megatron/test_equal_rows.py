# SPDX-License-Identifier: Apache-2.0
"""Experts over ranks that take as many rows from each, while each rank has packs of its own."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import moe_rig
import parallel_jobs
import pytest
import torch
from host_rig import OwnModel
from megatron_rig import Micro, Pair, evaluate, forget_metrics, forward, graph_config, step, the_plugin
from moe_rig import ExpertTrainer
from same_bits import assert_same_bits
from streams import make_groups, seeded
from torch import distributed
from worlds import on_ranks

import megagraph
from megagraph.config import GraphConfig
from megagraph.decide.dispatch import Capacity
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.graphs import dispatcher
from megagraph.megatron.graphs.dispatcher import MicroBatch
from megagraph.megatron.parallel import peers

pytestmark = pytest.mark.megatron

FEW = Capacity(tokens=64, num_seqs=3, max_seqlen=48)
MANY = Capacity(tokens=64, num_seqs=5, max_seqlen=48)
SCOPES = ("attn", "moe_router", "mlp")
CASES: dict[str, dict[str, Any]] = {
    "allgather": {**moe_rig.CASES["sigmoid, bias, groups"], "moe_token_dispatcher_type": "allgather"},
    "drop and pad": {**moe_rig.CASES["drop and pad"], "moe_shared_expert_intermediate_size": 24},
}
SITES = 2
MISFITS = ("TOO_MANY_SEQUENCES", "SEQUENCE_TOO_LONG")
# Packs of other rows on each rank.
steps_of = partial(
    parallel_jobs.steps_of,
    shapes=[(10, 30, 24), (20, 8), (30,), (2, 2, 2, 20), (16, 16, 16, 16), (7, 9), (33, 7)],
    of_misfits=(parallel_jobs.MISFIT, (60,)),
)


def to_learn_from(count: int, *, seed: int, misfits: bool) -> list[list[Micro]]:
    """A step of packs of equal rows and of other documents on each rank; steps of other rows."""
    shapes = [(16, 48), (60, 2, 2), (64,)] if seed else [(64,), (8, 56), (12, 50, 1, 1)]
    warm_up = [Micro(lengths=lengths, seed=100 * seed + index) for index, lengths in enumerate(shapes)]
    later = [(9, 4), (61,), (30, 3)] if seed else [(55,), (20, 3), (7, 8, 9)]
    return [warm_up, *([Micro(lengths=lengths, seed=seed) for lengths in later] for _ in range(count - 1))]


def train(*, times_asked: int = 0, **options: Any) -> dict[str, Any]:
    """The report of a training on such packs, in which this rank asks others so often on the host."""
    given = {"scopes": SCOPES, "steps_of": steps_of, "plugin": {"capacities": (FEW, MANY)}, **options}
    with mock.patch.object(peers, "_gloo_group", wraps=peers._gloo_group) as asked:
        report = parallel_jobs.train_spread(**given)
    assert asked.call_count == 2 + times_asked  # each model compares options once
    return report


@pytest.mark.both
@pytest.mark.parametrize(
    ("case", "scopes"), [("allgather", SCOPES), ("drop and pad", (*SCOPES, "moe_preprocess"))]
)
@on_ranks(2)
def test_ranks_with_packs_of_their_own_ask_each_other_nothing_once_they_have_met(
    case: str, scopes: tuple[str, ...]
) -> None:
    """A pack of one rank that fits no capacity runs eager there, on as many rows; the other rank replays."""
    report = train(scopes=scopes, num_steps=5, misfits_on=1, **CASES[case])
    misfits = dict.fromkeys(MISFITS, SITES) if distributed.get_rank() else {}
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 3 * SITES, **misfits}
    assert report["replays"] == 4 * 3 * SITES - sum(misfits.values())


@on_ranks(2)
def test_capacities_that_are_learned_are_those_of_all() -> None:
    """Ranks ask each other at one step boundary, in each of two runs."""
    learning = {"steps_of": to_learn_from, "plugin": {"capacities": ()}}
    report = train(times_asked=2, **learning, **CASES["drop and pad"])
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 3 * SITES}
    everywhere: list[Any] = [None, None]
    distributed.all_gather_object(everywhere, report["capacities"])
    assert everywhere == [report["capacities"]] * 2


@on_ranks(2)
def test_ranks_that_learn_the_same_capacities_have_the_same_options() -> None:
    """Bug: one that was refused, or in another mode, learned nothing, and the others waited for it."""
    mode = "eager" if distributed.get_rank() else "graph"
    told = "^mode: expected the same on all ranks that share the experts, got 'graph' on rank 0, 'eager' on"
    with pytest.raises(ValueError, match=told):
        train(steps_of=to_learn_from, plugin={"capacities": (), "mode": mode}, **CASES["drop and pad"])


@on_ranks(2)
def test_whole_layers_of_padded_experts_stay_eager_by_name() -> None:
    """Their dispatch would be in the graph, with what ranks of other packs send."""
    report = train(scopes=("attn", "moe", "mlp"), **CASES["drop and pad"])
    (failure,) = report["failures"]
    assert "its experts are spread over ranks, which run other packs" in failure
    assert report["eager"] == {"WARMING_UP": 3 * SITES, "SCOPE_UNSUPPORTED": 2 * 3}


@on_ranks(2)
@moe_rig.experts_on_cpu()
def test_a_rank_that_skips_graphs_alone_has_the_rows_of_the_others() -> None:
    """For one step; both evaluate between steps."""
    rank, sizes = distributed.get_rank(), {"expert_model_parallel_size": 2}
    make_groups(**sizes)
    megagraph.install(graph_config(capacities=(FEW, MANY), cuda_graph_modules=("attn", "moe_router")))
    pair = Pair(seeded(partial(ExpertTrainer, "E-", **sizes, **CASES["allgather"])))

    def train(trainer: ExpertTrainer) -> list[Any]:
        forget_metrics()
        left: list[Any] = []
        for index, micros in enumerate(steps_of(5, seed=rank, misfits=rank == 1)):
            is_skipped = trainer is pair.graphed and index == 3 and rank == 0
            with megagraph.disable_cuda_graphs_this_step() if is_skipped else nullcontext():
                left.append(step(trainer, micros))
            left.append(evaluate(trainer, micros))
        return left

    assert_same_bits(*pair.each(train))
    # One in each of two steps, and in each evaluation after these.
    alone = {"DISABLED": 3 * SITES} if rank == 0 else dict.fromkeys(MISFITS, 2 * SITES)
    assert pair.report()["eager"] == {"WARMING_UP": 2 * 3 * SITES, **alone}


# -- one rank, as one of several -----------------------------------------------------------------------


@pytest.fixture
def make(
    install: Callable[..., GraphConfig], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ExpertTrainer]]:
    """Makes a model of these capacities whose experts need equal rows."""
    monkeypatch.setattr(dispatcher, "need_equal_rows", lambda config: True)

    def with_capacities(*capacities: Capacity) -> ExpertTrainer:
        install(capacities=capacities, cuda_graph_modules=("attn", "moe_router"))
        return ExpertTrainer(moe_token_dispatcher_type="allgather")

    with moe_rig.experts_on_cpu():
        yield with_capacities


def test_every_pack_has_as_many_rows(make: Callable[..., ExpertTrainer]) -> None:
    trainer = make(FEW, MANY)
    for _ in range(2):
        step(trainer, [Micro(lengths=(9,))])
    many, few = (Capacity(tokens=64, num_seqs=number, max_seqlen=64) for number in (7, 2))
    graphs = the_plugin().graphs_of_model(trainer.chunk)
    for lengths, capacity, reason in (
        ((9, 4), FEW, None),
        ((3,) * 4, MANY, None),
        ((3,) * 7, many, EagerReason.TOO_MANY_SEQUENCES),
        ((50, 2), few, EagerReason.SEQUENCE_TOO_LONG),
        ((50, *(2,) * 6), many, EagerReason.TOO_MANY_SEQUENCES),
    ):
        micro = Micro(lengths=lengths)
        params = micro.params(trainer.device)
        batch = graphs.dispatcher.enter(params, micro.physical, None, True, False, True, True)
        assert isinstance(batch, MicroBatch) and (batch.capacity, batch.reason) == (capacity, reason), lengths


ROUTES = ("no pack", "block arguments", "padding mask", "inference mode", "mask inside", "table inside")


def _run_as_given(trainer: ExpertTrainer, route: str, micro: Micro) -> None:
    """Calls a model so that no graph can take it, or hands its block what it has not made."""
    no_mask = torch.zeros(1, micro.physical, device=trainer.device)
    changes: dict[str, dict[str, Any]] = {
        "no pack": {"packed_seq_params": None},
        "block arguments": {"extra_block_kwargs": {}},
        "padding mask": {"padding_mask": no_mask},
    }

    def model(**kwargs: Any) -> Any:
        return trainer.model(**{**kwargs, **changes.get(route, {})})

    def inside(_block: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        rows, dim = kwargs["hidden_states"].size(0), kwargs["rotary_pos_emb"].size(-1)
        if route == "mask inside":
            return args, {**kwargs, "padding_mask": no_mask.new_zeros(1, rows)}
        more = int(route == "table inside")  # or it would have a row for each token
        return args, {**kwargs, "rotary_pos_emb": no_mask.new_ones(rows + more, 1, 1, dim)}

    if route.endswith("inside"):
        trainer.chunk.decoder.register_forward_pre_hook(inside, with_kwargs=True)
    with torch.inference_mode(route == "inference mode"):
        forward(model, micro, trainer.device)


@pytest.mark.parametrize(("route", "is_warm"), [("no pack", False), *((route, True) for route in ROUTES)])
def test_a_pack_that_runs_as_given_has_as_many_rows(
    make: Callable[..., ExpertTrainer], route: str, is_warm: bool
) -> None:
    trainer = make(FEW, MANY)
    for _ in range(2 * is_warm):
        step(trainer, [Micro(lengths=(9, 20))])
    trainer.zero_grad()
    if route != "no pack":  # of which our attention makes nothing
        _run_as_given(trainer, route, Micro(lengths=(30, 34)))  # has as many
    name = "NO_PACK_METADATA" if route == "no pack" else "SIGNATURE_CHANGED"
    with pytest.raises(RuntimeError, match=rf"take 64 rows from each.* one of 29 that .* \({name}\)"):
        _run_as_given(trainer, route, Micro(lengths=(9, 20)))


def test_frequencies_of_each_token_are_padded_as_packs_are(make: Callable[..., ExpertTrainer]) -> None:
    trainer = make(FEW)
    _run_as_given(trainer, "frequencies inside", Micro(lengths=(30, 34)))  # shows what they are
    _run_as_given(trainer, "frequencies inside", Micro(lengths=(9, 20)))
    (report,) = megagraph.reports()
    assert {*report["eager"]} == {"WARMING_UP"}


def test_a_pack_of_too_many_tokens_is_an_error(make: Callable[..., ExpertTrainer]) -> None:
    trainer = make(FEW)
    with pytest.raises(RuntimeError, match=r"one of 65 .*TOO_MANY_TOKENS\); set max_seqlen_per_dp_cp_rank"):
        step(trainer, [Micro(lengths=(40, 25))])


def test_capacities_of_several_rows_are_an_error(make: Callable[..., ExpertTrainer]) -> None:
    trainer = make(FEW, Capacity(tokens=32, num_seqs=9, max_seqlen=32))
    with pytest.raises(ValueError, match=r"tokens, got 32, 64; set max_seqlen_per_dp_cp_rank"):
        step(trainer, [Micro(lengths=(9,))])


def test_a_forward_that_overrides_megatrons_is_refused(make: Callable[..., ExpertTrainer]) -> None:
    """Each of its calls may reach Megatron's forward or not, whatever other ranks do."""
    trainer = make(FEW)
    trainer.chunk.__class__ = OwnModel
    for _ in range(3):
        step(trainer, [Micro(lengths=(28, 20))])
    (report,) = megagraph.reports()
    sites = report["layers"]
    assert report["eager"] == {"WARMING_UP": sites, "SCOPE_UNSUPPORTED": 2 * sites}
    (failure,) = report["failures"]
    assert "experts over several ranks that need equal rows, in a model with a forward" in failure
