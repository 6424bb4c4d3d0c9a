# SPDX-License-Identifier: Apache-2.0
"""Rows of a pack that two ranks share, handed in or out; experts over ranks that run packs of their own."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import megatron_rig as rig
import moe_rig
import parallel_jobs
import pytest
import torch
from host_rig import HAS_OUTPUT_PROCESSOR, HostTrainer, OwnBlock, OwnModel
from megatron_rig import Micro, step
from moe_rig import ExpertTrainer
from parallel_jobs import OPTIONS
from same_bits import assert_same_bits
from streams import make_groups
from torch import Tensor, distributed
from worlds import World, on_ranks

import megagraph
from megagraph._C import Capacity
from megagraph.demo.trainer import Trainer
from megagraph.megatron.graphs import dispatcher
from megagraph.megatron.parallel import peers
from megagraph.megatron.parallel.model_parallel import splits

LAYERS = OPTIONS.layers
SHARED_ROWS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PACKS = (rig.Micro(lengths=(20, 8)), rig.Micro(lengths=(40, 24), seed=1))  # the second fills its capacity
LOPSIDED = rig.Micro(lengths=(33, 9), seed=2)  # of the capacity's rows, both ranks have some of its own
WAYS: dict[str, dict[str, bool]] = {
    "decoder_input": {"is_embedded": True},
    "decoder_input, its gradient on one rank alone": {"is_embedded": True, "on_one_rank_alone": True},
}
if HAS_OUTPUT_PROCESSOR:
    WAYS["output_processor"] = {"is_processed": True}
    WAYS["output_processor beside decoder_input"] = {"is_embedded": True, "is_processed": True}
ROUTES = ("no pack", "block arguments", "padding mask", "inference mode", "mask inside", "table inside")


def call(
    chunk: Any,
    micro: rig.Micro,
    device: torch.device,
    *,
    is_embedded: bool = False,  # the decoder's input comes in place of token ids
    on_one_rank_alone: bool = False,  # nobody asks for the gradient of the other rank's rows
    is_processed: bool = False,  # a function, in place of the output layer, sees this rank's rows
) -> tuple[Tensor, Tensor | None]:
    """What a model hands out, and the leaf that its gradient reaches, if there is one."""
    given = micro.given(device)
    with torch.no_grad():
        hidden: Tensor = chunk.embedding(given["input_ids"], given["position_ids"])
    hidden.requires_grad_(is_embedded and not (on_one_rank_alone and distributed.get_rank() != 0))
    given["input_ids"] = None if is_embedded else given["input_ids"]
    seen = []

    def process(*, hidden_states: Tensor, output_layer: Any, context: float, **other: Any) -> Tensor:
        compute = other.pop("compute_language_model_loss")
        seen.append(other)
        assert hidden_states.shape == other["decoder_input"].shape == hidden.shape
        losses = compute(other["labels"], output_layer(hidden_states)[0] / context)
        assert losses.shape == (1, micro.physical)
        # The rows themselves count, too, as does what went in.
        rows = hidden_states.square().sum(-1) + other["decoder_input"].detach().mean(-1)
        return torch.cat([losses.view(-1), rows.view(-1)])

    processor = {"output_processor": process, "output_processor_context": 2.0} if is_processed else {}
    out = chunk(**given, decoder_input=hidden if is_embedded else None, **processor)
    assert is_processed or out.shape == (1, micro.physical)
    for other in seen:
        assert all(other[name] is given[name] for name in given.keys() - {"attention_mask"})
        assert torch.equal(other["decoder_input"], hidden)
    assert len(seen) == is_processed
    return out, hidden if hidden.requires_grad else None


def _summed(chunk: Any, left: dict[str, Tensor]) -> dict[str, Tensor]:
    """With gradients of norms and biases summed, as at a step's end: each rank has those of its own rows."""
    shared = [name for name, param in chunk.named_parameters() if getattr(param, "sequence_parallel", False)]
    assert shared
    summed = {name: value.clone() for name, value in left.items()}
    for name in shared:
        distributed.all_reduce(summed[name])
    return summed


@on_ranks(2, tensor_parallel=2)
def test_rows_that_a_caller_hands_in_or_takes_out_keep_no_pack_eager() -> None:
    """Each rank has other rows of the capacity's than of the pack's: they are handed round."""
    megagraph.install(rig.graph_config())
    trainer = Trainer(OPTIONS, config=SHARED_ROWS)
    rig.step(trainer, PACKS, update=False, times=2)

    def run(way: str, micro: rig.Micro) -> dict[str, Tensor]:
        trainer.model.zero_grad_buffer()
        out, leaf = call(trainer.chunk, micro, trainer.device, **WAYS[way])
        out.sum().backward()
        left = {"out": out.detach().clone(), **rig.grads(trainer.chunk)}
        if leaf is not None:
            assert leaf.grad is not None
            left["input"] = leaf.grad.clone()
        return left

    given = [*itertools.product(WAYS, (*PACKS, LOPSIDED))]
    graphed = [run(*each) for each in given]
    with megagraph.disable_cuda_graphs_this_step():
        eager = [run(*each) for each in given]
    calls = len(given) * LAYERS
    rig.ran(rig.report_of(trainer), 2 * LAYERS + calls, WARMING_UP=2 * LAYERS, DISABLED=calls)
    if HAS_OUTPUT_PROCESSOR:  # which has no rows to see there; padding would have hidden it
        with pytest.raises(AssertionError, match="divisible by tensor parallel size"):
            call(trainer.chunk, rig.Micro(lengths=(20, 7)), trainer.device, is_processed=True)
    megagraph.uninstall()
    for each, replayed, canonical in zip(given, graphed, eager, strict=True):
        alone = run(*each)
        assert alone.keys() == replayed.keys() == canonical.keys()
        assert [name for name in replayed if not torch.equal(replayed[name], canonical[name])] == []
        # Gradients of parameters are sums over rows: in other parts, of which added ones are zero.
        found, expected = (_summed(trainer.chunk, left) for left in (replayed, alone))
        if trainer.device.type == "cpu":
            exact = {"out", "input"} & alone.keys()
            assert [name for name in exact if not torch.equal(alone[name], replayed[name])] == []
            torch.testing.assert_close(found, expected)
        else:  # which chooses its kernels by the number of rows; in bfloat16 single entries may cancel out
            near = {it: (of - found[it]).norm() <= 2**-6 * of.norm() for it, of in expected.items()}
            assert [name for name, is_near in near.items() if not is_near] == []


@on_ranks(2, tensor_parallel=2)
def test_a_stage_that_others_follow_keeps_the_rows_that_were_given_outside_of_schedules() -> None:
    """Bug: the block's output got as many rows on each rank as they have together."""
    outs: dict[str, list[Tensor]] = {"eager": [], "graph": []}
    for mode, found in outs.items():
        megagraph.install(rig.graph_config(mode=mode))
        given = {"prepare": lambda chunk: setattr(chunk, "post_process", False), "config": SHARED_ROWS}
        trainer = rig.ModelTrainer(heads=4, **given)
        for micro in PACKS * 3:
            out = trainer.chunk(**{**micro.given(trainer.device), "labels": None})
            assert out.shape == (micro.physical // 2, 1, OPTIONS.hidden)
            out.sum().backward()
            found.append(out.detach().clone())
        (report,) = megagraph.reports()
        megagraph.uninstall()
    # A pack that does not fill its capacity would be padded, and handed on in shares of other rows.
    assert_same_bits(*outs.values())
    rig.ran(report, 3 * LAYERS, SIGNATURE_CHANGED=3 * LAYERS)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(("given", "wanted"), [(7, 16), (16, 7), (1, 8), (5, 5)])
def test_what_a_rank_sends_is_what_its_peers_expect(size: int, given: int, wanted: int) -> None:
    sent, got = zip(*(splits(given, wanted, rank, size) for rank in range(size)), strict=True)
    assert [list(column) for column in zip(*sent, strict=True)] == list(got)
    total = min(given, wanted) * size  # of which each rank has those from its own multiple on
    assert [sum(rows) for rows in sent] == [min(given, max(0, total - rank * given)) for rank in range(size)]
    assert [sum(rows) for rows in got] == [min(wanted, max(0, total - rank * wanted)) for rank in range(size)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2, tensor_parallel=2)
def test_a_model_with_forwards_of_its_own_on_several_ranks(sequence_parallel: bool) -> None:
    """Under sequence parallelism it gets no rows that were not given: what it does with them is unknown."""
    config = {**SHARED_ROWS, "sequence_parallel": sequence_parallel}
    pair = rig.Pair(HostTrainer, model_class=OwnModel, block_class=OwnBlock, options=OPTIONS, config=config)
    pair.step(*PACKS, times=3)
    report = pair.report()
    assert report["calls"] == 3 * 2 * LAYERS and report["failures"] == []
    assert {*report["eager"]} == {"WARMING_UP", *["SIGNATURE_CHANGED"] * sequence_parallel}
    assert report["replays"] >= (1 if sequence_parallel else 2) * LAYERS


# -- experts that take as many rows from each rank ---------------------------------------------------

Make = Callable[..., ExpertTrainer]
FEW = Capacity(tokens=64, num_seqs=3, max_seqlen=48)
MANY = Capacity(tokens=64, num_seqs=5, max_seqlen=48)
ROUTERS = ("attn", "moe_router")
SCOPES = (*ROUTERS, "mlp")
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
@pytest.mark.parametrize(("case", "more"), [("allgather", ()), ("drop and pad", ("moe_preprocess",))])
@on_ranks(2)
def test_ranks_with_packs_of_their_own_ask_nothing_once_they_have_met(case: str, more: Any) -> None:
    """A pack of one rank that fits no capacity runs eager there, on as many rows; the other rank replays."""
    report = train(scopes=(*SCOPES, *more), num_steps=4, misfits_on=1, **CASES[case])
    misfits = dict.fromkeys(MISFITS, SITES) if distributed.get_rank() else {}
    rig.ran(report, 3 * 3 * SITES - sum(misfits.values()), WARMING_UP=3 * SITES, **misfits)


def test_capacities_that_are_learned_are_those_of_all(world2: World) -> None:
    """Ranks ask each other at one step boundary, in each of two runs."""
    learning = {"times_asked": 2, "steps_of": to_learn_from, "plugin": {"capacities": ()}}
    reports = world2.run(train, **learning, **CASES["drop and pad"])
    for report in reports:
        assert rig.ran(report, WARMING_UP=3 * SITES)["capacities"] == reports[0]["capacities"]


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
    rig.ran(report, failures=1, WARMING_UP=3 * SITES, SCOPE_UNSUPPORTED=3)
    assert "its experts are spread over ranks, which run other packs" in report["failures"][0]


@on_ranks(2)
def test_a_rank_that_skips_graphs_alone_has_the_rows_of_the_others() -> None:
    """For one step; both evaluate between steps."""
    rank = distributed.get_rank()
    steps = steps_of(4, seed=rank, misfits=rank == 1)
    skips = rig.at(3, lambda _: megagraph.disable_cuda_graphs_this_step() if rank == 0 else None)
    further = {"evaluate_at": dict(enumerate(steps[:3], 1)), "tamper": skips, **CASES["allgather"]}
    report = train(scopes=ROUTERS, steps_of=lambda *_, **__: steps, **further)
    # One in each of two steps, and in the evaluation behind the first of these.
    alone = {"DISABLED": 3 * SITES} if rank == 0 else dict(zip(MISFITS, (2 * SITES, SITES), strict=True))
    rig.ran(report, WARMING_UP=2 * 3 * SITES, **alone)


BALANCE = "moe_router_load_balancing_type"
WITH_OTHERS = "collectives of ranks that run other packs (tp_dp_cp, 2 ranks"
# What is named beside MLPs, further options, and what keeps a router eager, or None of experts over ranks.
OWN_PACKS: dict[str, tuple[Sequence[str], moe_rig.Config, str | None]] = {
    "routers": (ROUTERS, moe_rig.BIAS, ""),
    # Bug that was: experts have the group that saves their shards over ranks, and no forward uses it.
    "whole layers": (("attn", "moe"), moe_rig.PADS, ""),
    "a loss that is reduced over them": (ROUTERS, {BALANCE: "global_aux_loss"}, WITH_OTHERS),
    "dropless, bias": (ROUTERS, moe_rig.BIAS, None),
    **{case: (ROUTERS, moe_rig.CASES[case], None) for case in ("drop", "shared experts, overlapped")},
    # Bug: experts behind a graph had a backward, for which the rank waited that ran eager.
    "frozen below": (ROUTERS, {**moe_rig.BIAS, "prepare": parallel_jobs.freeze_below}, None),
    # Counts are gathered over the ranks in the eager part.
    "permuted": ((*ROUTERS, "moe_preprocess"), {**moe_rig.BIAS, **moe_rig.SHARED, BALANCE: "aux_loss"}, None),
}


@pytest.mark.parametrize("case", OWN_PACKS)
def test_ranks_with_packs_of_their_own(world2: World, case: str) -> None:
    """What is in a graph holds no communicator of experts: a pack of one rank alone may fit no capacity."""
    scopes, changes, failure = OWN_PACKS[case]
    if case == "permuted" and not moe_rig.can_permute(changes):
        pytest.skip("this release permutes into shapes that only the device knows")
    job = parallel_jobs.train_spread if failure is None else parallel_jobs.train_experts
    misfits = {"misfits_on": 1} if failure is None else {}
    eager = {"SCOPE_UNSUPPORTED": parallel_jobs.PACKS} if failure else {}
    for report in world2.run(job, scopes=(*scopes, "mlp"), **misfits, **changes):
        rig.ran(report, failures=bool(failure), WARMING_UP=parallel_jobs.PACKS * 2, **eager)
        assert not failure or failure in report["failures"][0]
        eager |= {"TOO_MANY_SEQUENCES": 2} if misfits else {}  # on rank 1


@pytest.mark.parametrize(("mode", "expert_parallel"), [("eager", 1), ("graph", 2)])
@on_ranks(2)
def test_rows_of_padding_reach_no_expert(mode: str, expert_parallel: int) -> None:
    """Experts of all ranks count what documents' rows have chosen, also where one rank has padding alone."""
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": expert_parallel}
    sizes["expert_tensor_parallel_size"] = 1
    make_groups(**sizes)
    changes = {**sizes, "sequence_parallel": True, **moe_rig.BIAS}
    micros = [Micro(lengths=(20, 8), tail=10, seed=1), Micro(lengths=(10, 4), seed=2)]
    config = rig.graph_config(mode=mode, cuda_graph_modules=ROUTERS)
    for left in rig.train(config, [micros] * 2, ExpertTrainer, **changes).steps:
        for counts in left.counts:
            distributed.all_reduce(counts)
            assert int(counts.sum()) == 2 * (20 + 8 + 10 + 4)


# -- one rank, as one of several -----------------------------------------------------------------------


@pytest.fixture
def make(install: rig.Install, experts: None, monkeypatch: Any) -> Make:
    """Makes a model of these capacities whose experts need equal rows."""
    monkeypatch.setattr(dispatcher, "need_equal_rows", lambda config: True)

    def with_capacities(*capacities: Capacity) -> ExpertTrainer:
        install(capacities=capacities, cuda_graph_modules=("attn", "moe_router"))
        return ExpertTrainer(moe_token_dispatcher_type="allgather")

    return with_capacities


def _run_as_given(trainer: ExpertTrainer, route: str, micro: Micro) -> None:
    """Calls a model so that no graph can take it, or hands its block what it has not made."""
    no_mask = torch.zeros(1, micro.physical, device=trainer.device)
    changes: Any = {"no pack": {"packed_seq_params": None}, "block arguments": {"extra_block_kwargs": {}}}
    changes["padding mask"] = {"padding_mask": no_mask}

    def inside(kwargs: dict[str, Any]) -> dict[str, Any]:
        rows, dim = kwargs["hidden_states"].size(0), kwargs["rotary_pos_emb"].size(-1)
        if route == "mask inside":
            return {**kwargs, "padding_mask": no_mask.new_zeros(1, rows)}
        more = int(route == "table inside")  # or it would have a row for each token
        return {**kwargs, "rotary_pos_emb": no_mask.new_ones(rows + more, 1, 1, dim)}

    if route.endswith("inside"):
        rig.hands(trainer.chunk.decoder, inside)
    with torch.inference_mode(route == "inference mode"):
        trainer.model(**{**micro.given(trainer.device), **changes.get(route, {})})


@pytest.mark.parametrize(("route", "is_warm"), [("no pack", False), *((route, True) for route in ROUTES)])
def test_a_pack_that_runs_as_given_has_as_many_rows(make: Make, route: str, is_warm: bool) -> None:
    trainer = make(FEW, MANY)
    for _ in range(2 * is_warm):
        step(trainer, [Micro(lengths=(9, 20))])
    trainer.zero_grad()
    if route != "no pack":  # of which our attention makes nothing
        _run_as_given(trainer, route, Micro(lengths=(30, 34)))  # has as many
    name = "NO_PACK_METADATA" if route == "no pack" else "SIGNATURE_CHANGED"
    with pytest.raises(RuntimeError, match=rf"take 64 rows from each.* one of 29 that .* \({name}\)"):
        _run_as_given(trainer, route, Micro(lengths=(9, 20)))


def test_frequencies_of_each_token_are_padded_as_packs_are(make: Make) -> None:
    trainer = make(FEW)
    _run_as_given(trainer, "frequencies inside", Micro(lengths=(30, 34)))  # shows what they are
    _run_as_given(trainer, "frequencies inside", Micro(lengths=(9, 20)))
    assert {*rig.report_of(trainer)["eager"]} == {"WARMING_UP"}


def test_a_pack_of_too_many_tokens_and_capacities_of_several_rows_are_errors(make: Make) -> None:
    trainer = make(FEW)
    with pytest.raises(RuntimeError, match=r"one of 65 .*TOO_MANY_TOKENS\); set max_seqlen_per_dp_cp_rank"):
        step(trainer, [Micro(lengths=(40, 25))])
    megagraph.uninstall()
    trainer = make(FEW, Capacity(tokens=32, num_seqs=9, max_seqlen=32))
    with pytest.raises(ValueError, match=r"tokens, got 32, 64; set max_seqlen_per_dp_cp_rank"):
        step(trainer, [Micro(lengths=(9,))])


def test_a_forward_that_overrides_megatrons_is_refused(make: Make) -> None:
    """Each of its calls may reach Megatron's forward or not, whatever other ranks do."""
    trainer = make(FEW)
    trainer.chunk.__class__ = OwnModel
    step(trainer, [Micro(lengths=(28, 20))], times=3)
    sites = (report := rig.report_of(trainer))["layers"]
    (failure,) = rig.ran(report, failures=1, SCOPE_UNSUPPORTED=3 * sites)["failures"]
    assert "experts over several ranks that need equal rows, in a model with a forward" in failure
