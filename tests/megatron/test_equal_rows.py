# SPDX-License-Identifier: Apache-2.0
"""Experts over ranks that take as many rows from each, while each rank has packs of its own."""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import equal_rows_jobs
import moe_rig
import pytest
from equal_rows_jobs import LARGE, SMALL
from megatron_rig import Micro
from worlds import World

from megagraph.config import GraphConfig
from megagraph.decide.dispatch import Capacity
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.graphs.equal_rows import NEEDS_MEGATRONS, EqualRows
from megagraph.megatron.graphs.micro_batch import MicroBatch
from megagraph.megatron.graphs.model_graphs import ModelGraphs
from megagraph.megatron.parallel.peers import HostGroup
from megagraph.megatron.patch.installation import installed_plugin
from megagraph.packs.packing import TailConvention

pytestmark = pytest.mark.megatron

SCOPES = ("attn", "moe_router", "mlp")
CASES: dict[str, dict[str, Any]] = {
    "allgather": {**moe_rig.CASES["sigmoid, bias, groups"], "moe_token_dispatcher_type": "allgather"},
    "drop and pad": {**moe_rig.CASES["drop and pad"], "moe_shared_expert_intermediate_size": 24},
}
STEPS = 20
SITES = 2
MISFITS = 3 * STEPS // equal_rows_jobs.EVERY * SITES


@pytest.mark.parametrize("case", CASES)
def test_ranks_with_packs_of_their_own(world2: World, case: str) -> None:
    """Where a pack of one rank fits no capacity, both run theirs as they were given."""
    reports = world2.run(
        equal_rows_jobs.train,
        scopes=SCOPES,
        num_steps=STEPS,
        misfits_on=1,
        **CASES[case],
    )
    for report, reason in zip(reports, ("GROUP_DISAGREED", "TOO_MANY_SEQUENCES"), strict=True):
        assert report["failures"] == []
        assert report["eager"] == {"WARMING_UP": 3 * SITES, reason: MISFITS}
        assert report["replays"] == 3 * STEPS * SITES - 3 * SITES - MISFITS


@pytest.mark.parametrize("case", CASES)
def test_capacities_that_are_learned_are_those_of_all(world2: World, case: str) -> None:
    reports = world2.run(equal_rows_jobs.learn, scopes=SCOPES, num_steps=4, **CASES[case])
    assert reports[0]["capacities"] == reports[1]["capacities"]
    for report in reports:
        assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 3 * SITES}


def test_permuted_rows_of_padded_experts(world2: World) -> None:
    scopes = (*SCOPES, "moe_preprocess")
    reports = world2.run(
        equal_rows_jobs.train, scopes=scopes, num_steps=5, misfits_on=0, **CASES["drop and pad"]
    )
    for report, reason in zip(reports, ("TOO_MANY_SEQUENCES", "GROUP_DISAGREED"), strict=True):
        assert report["failures"] == []
        assert report["eager"] == {"WARMING_UP": 3 * SITES, reason: 3 * SITES}


def test_whole_layers_of_padded_experts_stay_eager_by_name(world2: World) -> None:
    """Their dispatch would be in the graph, with what ranks of other packs send."""
    reports = world2.run(
        equal_rows_jobs.train, scopes=("attn", "moe", "mlp"), num_steps=4, **CASES["drop and pad"]
    )
    for report in reports:
        (failure,) = report["failures"]
        assert "its experts are spread over ranks, which run other packs" in failure
        assert report["eager"] == {"WARMING_UP": 3 * SITES, "SCOPE_UNSUPPORTED": 3 * 3}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_skips_graphs_alone_has_the_rows_of_the_others(world2: World, case: str) -> None:
    reports = world2.run(equal_rows_jobs.skip_alone, **CASES[case])
    # Of the packs that fit no capacity one is in each of three steps, and in each evaluation after these.
    misfits, warming_up, skipped = 2 * 3 * SITES, 2 * 3 * SITES, 3 * SITES
    assert reports[0]["eager"] == {
        "DISABLED": skipped,
        "GROUP_DISAGREED": misfits - SITES,
        "WARMING_UP": warming_up,
    }
    assert reports[1]["eager"] == {"TOO_MANY_SEQUENCES": misfits, "WARMING_UP": warming_up}


@pytest.mark.parametrize("case", CASES)
def test_packs_as_given_of_other_rows_are_an_error_on_all_ranks(world2: World, case: str) -> None:
    said = world2.run(equal_rows_jobs.differ, **CASES[case])
    for words, rows in zip(said, ("pack has 40 rows", "pack (TOO_MANY_SEQUENCES) has 30 rows"), strict=True):
        assert rows in words and "expected packs that capacities of equal rows hold" in words


def test_a_forward_of_a_hosts_is_refused(world2: World) -> None:
    for report in world2.run(equal_rows_jobs.override, **CASES["allgather"]):
        assert report["replays"] == 0 and report["eager"] == {
            "WARMING_UP": SITES,
            "SCOPE_UNSUPPORTED": 2 * SITES,
        }
        assert any(NEEDS_MEGATRONS in failure for failure in report["failures"])


# -- one rank, and what another one says ---------------------------------------------------------------


MANY = Capacity(tokens=32, num_seqs=9, max_seqlen=32)
# A pack, whether another one has no place in 32 rows and in 64, and what comes out.
VOTES: Sequence[tuple[tuple[int, ...], tuple[int, int], Capacity | None]] = (
    ((9, 4), (0, 0), SMALL),
    ((9, 4), (1, 0), LARGE),
    ((9, 4), (0, 1), SMALL),
    ((9, 4), (1, 1), None),
    ((40, 4), (0, 0), LARGE),
    ((40, 4), (0, 1), None),
    ((3,) * 7, (0, 1), MANY),
    ((3,) * 7, (1, 0), None),
    ((3,) * 12, (0, 0), None),
)


@pytest.fixture
def graphs(install: Callable[..., GraphConfig]) -> Iterator[ModelGraphs]:
    """Of a model that has run once."""
    with moe_rig.experts_on_cpu():
        install(capacities=(SMALL, MANY, LARGE), cuda_graph_modules=("attn", "moe_router"))
        moe_rig.expert_step(trainer := moe_rig.ExpertTrainer(), [Micro(lengths=(9,))])
        plugin = installed_plugin()
        assert plugin is not None
        yield plugin.graphs_of_model(trainer.chunk)


def vote(graphs: ModelGraphs, micro: Micro, others: Sequence[int], rows: int) -> MicroBatch | EagerReason:
    """What comes out where another rank says this, and has a pack of so many rows."""

    def max_over_ranks(values: Sequence[int]) -> list[int]:
        return [max(pair) for pair in zip(values, (*others, rows, -rows), strict=True)]

    ranks = cast(HostGroup, SimpleNamespace(max_over_ranks=max_over_ranks))
    of_rows = EqualRows(ranks, lambda rows: rows, graphs._capacities, TailConvention.HIDDEN, graphs._tables)
    params = micro.params(graphs.block.device)
    batch = graphs.decide(params, micro.physical, None, is_mask_shared=True, is_skipped=False)
    return of_rows.agree(batch, micro.physical)


@pytest.mark.parametrize(("lengths", "others", "expected"), VOTES, ids=str)
def test_the_least_rows_that_all_packs_have_a_place_in(
    graphs: ModelGraphs, lengths: tuple[int, ...], others: Sequence[int], expected: Capacity | None
) -> None:
    micro = Micro(lengths=lengths)
    found = vote(graphs, micro, others, micro.physical)
    if expected is not None:
        assert isinstance(found, MicroBatch) and found.capacity == found.key[0] == expected
        assert found.reason is None
    elif len(lengths) > MANY.num_seqs:
        assert found is EagerReason.TOO_MANY_SEQUENCES
    else:
        assert isinstance(found, MicroBatch) and found.reason is EagerReason.GROUP_DISAGREED
        assert found.canonical_params().max_seqlen_q == micro.longest


def test_rows_as_given_need_not_be_equal_where_packs_are_padded(graphs: ModelGraphs) -> None:
    found = vote(graphs, micro := Micro(lengths=(9, 4)), (1, 0), micro.physical + 1)
    assert isinstance(found, MicroBatch) and found.capacity == LARGE
    with pytest.raises(RuntimeError, match="this rank's pack has 13 rows"):
        vote(graphs, micro, (1, 1), micro.physical + 1)
