# SPDX-License-Identifier: Apache-2.0
"""The hybrid scheduler of megatron-core itself as a host: one document in a micro-batch, and other numbers of
micro-batches on other ranks."""

from typing import Any

import hybrid_schedule_jobs as hybrid_jobs
import pytest
import torch
from megatron_rig import LAYERS, OPTIONS, refused
from worlds import World

from megagraph._C import as_pack
from megagraph.config import GraphConfig
from megagraph.decide.dispatch import Capacity
from megagraph.demo.trainer import Trainer
from megagraph.megatron.graphs.refusals import refusal_of

pytestmark = [pytest.mark.megatron, pytest.mark.both]

# Over the largest entry of each gradient: sums over rows in another order; in bfloat16 on a GPU.
BOUND = 5e-2 if torch.cuda.is_available() else 2e-5
# By step and rank of data parallelism; a document has as many rows as the release wants on all ranks. Steps
# of four ranks have up to three sub-steps.
ON_TWO = [[[120, 8], [64, 32]], [[40], [128, 4]], [[20, 24, 28], [32]], [[8, 124], [12]]]
ON_TWO.append(ON_TWO[1])  # in which one evaluates before
ON_FOUR = [
    [[120, 8, 16], [64, 32], [248], [16, 24]],
    [[16], [8, 8, 40], [128], [64]],
    [[256], [256], [104, 16, 24, 32, 64], [8]],
    [[24, 40], [72], [8], [16, 16]],
]
ON_FOUR.append(ON_FOUR[1])


def check(runs: list[dict[str, Any]], eager: frozenset[str] = frozenset({"WARMING_UP"})) -> None:
    """Every rank replays all but the first steps, and is as far from one process as sums in another order."""
    for run in runs:
        report = run["report"]
        assert report["failures"] == [] and set(report["eager"]) == eager
        assert run["off"] <= BOUND
        if eager == {"WARMING_UP"}:
            training, evaluation = run["sizes"][:2]
            assert report["eager"]["WARMING_UP"] == LAYERS * (len(training) + len(evaluation))


def sizes_of(runs: list[dict[str, Any]]) -> set[int]:
    return {size for run in runs for of_step in run["sizes"] for size in of_step}


def test_two_ranks(world2: World) -> None:
    """Gradients are reduced in the last backward of each rank."""
    capacities = tuple(Capacity(tokens=rows, num_seqs=1, max_seqlen=2 * rows) for rows in (16, 64))
    ddp = {"overlap_grad_reduce": True, "bucket_size": 4000}
    runs = world2.run(
        hybrid_jobs.train, lengths=ON_TWO, cp_sizes=(1, 2), ddp=ddp, plugin={"capacities": capacities}
    )
    check(runs)
    assert all(run["report"]["graphs"] == LAYERS * 3 * 2 * len(capacities) for run in runs)
    assert sizes_of(runs) == {1, 2}
    one, other = ([len(of_step) for of_step in run["sizes"]] for run in runs)
    assert one != other


def test_four_ranks(world4: World) -> None:
    runs = world4.run(hybrid_jobs.train, lengths=ON_FOUR, cp_sizes=(1, 2, 4))
    check(runs)
    assert sizes_of(runs) == {1, 2, 4}
    for step in range(len(ON_FOUR)):
        assert len({len(run["sizes"][step]) for run in runs}) > 1


def test_beside_tensor_parallelism(world4: World) -> None:
    """Half of the ranks get no data from the scheduler."""
    one, other = [[120, 8], [64]], [[40], [128, 8]]
    parallel = {"tensor_parallel": 2, "sequence_parallel": True}
    lengths = [one, other, other, one, one]
    runs = world4.run(hybrid_jobs.train, lengths=lengths, cp_sizes=(1, 2), **parallel)
    check([run for run in runs if run["sizes"]])
    assert [bool(run["sizes"]) for run in runs] == [True, False] * 2
    assert sizes_of(runs) == {1, 2}
    assert [run["report"]["replays"] for run in runs[::2]] == [run["report"]["replays"] for run in runs[1::2]]


def test_a_model_that_has_a_size_of_its_own(world4: World) -> None:
    """Packs of as many ranks name another group than its layers have."""
    lengths = [of_ranks[:2] for of_ranks in ON_FOUR]
    runs = world4.run(hybrid_jobs.train, lengths=lengths, cp_sizes=(1, 2, 4), static=2)
    check(runs)
    assert sizes_of(runs) == {1, 2, 4}


def test_a_size_that_the_plugin_was_not_told_of(world2: World) -> None:
    runs = world2.run(hybrid_jobs.train, lengths=ON_TWO, cp_sizes=(1,))
    check(runs, frozenset({"WARMING_UP", "CP_SIZE_NOT_CAPTURED"}))
    for run in runs:
        shared = sum(size == 2 for of_step in run["sizes"] for size in of_step)
        assert run["report"]["eager"]["CP_SIZE_NOT_CAPTURED"] == LAYERS * shared


def test_groups_are_those_of_the_release_while_they_last(world4: World) -> None:
    assert world4.run(hybrid_jobs.groups, is_hybrid=True) == [{2: True, 4: True}] * 4
    # The release keeps the group of two ranks beyond the end of its world.
    assert world4.run(hybrid_jobs.groups, is_hybrid=False) == [{2: False, 4: True}] * 4


def test_a_model_is_refused_where_the_plugin_knows_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(OPTIONS)
    monkeypatch.setattr(trainer.chunk.config, "hybrid_context_parallel", True)
    assert refused(trainer.chunk, trainer.model) == (
        "hybrid context parallelism (hybrid_context_parallel=True) without cp_sizes is not supported yet"
    )
    assert refusal_of(trainer.chunk, trainer.model, options=GraphConfig(cp_sizes=(1, 2))) is None


# -- a document that is described as no pack ---------------------------------------------------------


def document(**changes: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, 24])
    fields = {
        "qkv_format": "sbhd",
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), ends),
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), ends.clone()),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), 24),
        "local_cp_size": 1,
    }
    return PackedSeqParams(**{**fields, **changes})


def test_a_document_becomes_a_pack_of_one() -> None:
    ids = torch.zeros(1, 24, dtype=torch.int64)
    pack = as_pack(document(), ids, None)
    assert pack.qkv_format == "thd" and pack.max_seqlen_q == pack.max_seqlen_kv == 24
    assert pack.cu_seqlens_q is pack.cu_seqlens_kv and pack.cu_seqlens_q_padded is None
    assert pack.cu_seqlens_q.dtype == torch.int32 and pack.cu_seqlens_q.tolist() == [0, 24]
    assert pack.local_cp_size == 1 and pack.cp_group is None
    assert as_pack(document(), None, torch.zeros(24, 1, 8)).cu_seqlens_q.tolist() == [0, 24]


@pytest.mark.parametrize("change", [{"qkv_format": "thd"}, {"local_cp_size": None}])
def test_packs_and_what_names_no_ranks_stay(change: dict[str, Any]) -> None:
    given = document(**change)
    assert as_pack(given, torch.zeros(1, 24), None) is given
    assert as_pack(None, torch.zeros(1, 24), None) is None


@pytest.mark.parametrize(
    "change, batch", [({}, 2), ({"cu_seqlens_q": None}, 1), ({"cu_seqlens_q": torch.tensor([0, 8, 24])}, 1)]
)
def test_several_documents_are_an_error(change: dict[str, Any], batch: int) -> None:
    with pytest.raises(ValueError, match="expected a pack"):
        as_pack(document(**change), torch.zeros(batch, 24), None)
