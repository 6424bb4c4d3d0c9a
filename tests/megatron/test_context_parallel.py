# SPDX-License-Identifier: Apache-2.0
"""Models whose context-parallel ranks share every pack: graphs have the bits of eager, and eager is right."""

from typing import Any

import context_jobs
import pytest
import torch
from context_models import EMPTY_DUMMY, MANY_KINDS, OF_ENGINE, ROUTERS
from megatron_rig import needs_engine
from worlds import World, Worlds

pytestmark = pytest.mark.megatron

ON_GPU = torch.cuda.is_available()
# Over the largest entry: sums over rows in another order, in float32 on the CPU, in bfloat16 on a GPU.
BOUND = 5e-2 if ON_GPU else 2e-5
Options = dict[str, Any]
EXPERTS: Options = {"model": {"experts": True}}
SPREAD: Options = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
MISFITS: Options = {"misfits": True, "has_tails": False}
OF_TWO: Options = {"tp_size": 2, "sequence_parallel": True}
engine = [pytest.mark.gpu, needs_engine]
both = pytest.mark.both


def spread(mla: str | None = None, **options: Any) -> Options:
    """Experts over both ranks."""
    model = {"experts": True, "mla": mla}
    return {"model": model, "plugin": ROUTERS, "expert_model_parallel_size": 2, **MANY_KINDS, **options}


TRAININGS: dict[str, tuple[Any, Options]] = {
    "gathered": (both, {}),
    "heads exchanged": ((), {"cp_comm_type": "a2a"}),
    "packs that fit no capacity": (both, MISFITS),
    "a tail that is a document": (both, {"plugin": EMPTY_DUMMY}),
    "beside tensor parallelism": (both, OF_TWO),
    "experts": (both, spread(**MISFITS)),
    "MLA experts": ((), spread("plain, RoPE", **MISFITS)),
    # Megatron makes its table on a GPU.
    "MLA experts, YaRN": (pytest.mark.gpu, spread("low rank, YaRN", **MISFITS)),
    "experts beside tensor parallelism": (both, {**EXPERTS, **OF_TWO, **SPREAD, "plugin": ROUTERS}),
    "experts beside tensor parallelism, whose packs say who shares them": (
        (),
        {**EXPERTS, **OF_TWO, **SPREAD, "plugin": {**ROUTERS, "cp_sizes": (2,)}, "has_tails": False},
    ),
    **{
        f"Transformer Engine, {name}, {tail}": (
            engine,
            {
                **{"num_steps": 10, "model": {"engine": True, **model}, **options},
                "plugin": {**EMPTY_DUMMY, "tail": tail, **scopes},
            },
        )
        # The zero-valid document at the end, and rows that no offset tells of.
        for tail in ("hidden", "empty-dummy")
        for name, (model, scopes, options) in OF_ENGINE.items()
    },
    **{
        f"Transformer Engine, {comm_type}": (engine, {"model": {"engine": True}, "cp_comm_type": comm_type})
        for comm_type in ("a2a", "all_gather")
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks) for name, (marks, _options) in TRAININGS.items()]
)
def test_graphs_have_eager_bits(worlds: Worlds, name: str) -> None:
    _marks, options = TRAININGS[name]
    reports = worlds.of(2 * options.get("tp_size", 1)).run(context_jobs.train_shared, cp_size=2, **options)
    reasons = {"WARMING_UP", *["TOO_MANY_SEQUENCES"] * options.get("misfits", False)}
    for report in reports:
        assert report["failures"] == [] and set(report["eager"]) == reasons
        assert report["eager"] == reports[0]["eager"] and report["replays"] > 0
        assert 0 < report["padding_share"] < 1


def test_capacities_are_learned(world2: World) -> None:
    plugin = {"cuda_graph_max_packed_seqs": (), "max_seqlen_per_dp_cp_rank": None}
    reports = world2.run(context_jobs.train_shared, cp_size=2, has_tails=False, plugin=plugin)
    assert reports[0]["capacities"] == reports[1]["capacities"]
    for report in reports:
        (capacity, *_) = report["capacities"]
        assert capacity["max_seqlen"] == 2 * capacity["tokens"] and report["replays"] > 0


HEADS = {"num_attention_heads": 4}
MODELS: dict[str, Options] = {
    "gathered": HEADS,
    "heads exchanged": {**HEADS, "cp_comm_type": "a2a"},
    "grouped queries": {**HEADS, "num_query_groups": 2},
    "mla": {"model": {"mla": "low rank, RoPE"}},
    "mla, heads exchanged": {"model": {"mla": "plain, RoPE"}, "cp_comm_type": "a2a"},
    "experts": EXPERTS,
    "a tail that is a document": {"plugin": EMPTY_DUMMY},
    "Transformer Engine": {"model": {"engine": True}},
}
MARKS = {"experts": both, "a tail that is a document": both, "Transformer Engine": engine}


@pytest.mark.parametrize(
    ("ranks", "case", "is_static"),
    [
        *(pytest.param(2, case, True, marks=MARKS.get(case, ())) for case in MODELS),
        *(
            pytest.param(2, case, False, marks=engine if "Engine" in case else ())
            for case in MODELS
            if "tail" not in case
        ),
        *((4, "gathered", True), (4, "heads exchanged", False), (4, "mla", False), (4, "experts", False)),
    ],
)
def test_each_rank_has_its_share_of_whole_packs(
    worlds: Worlds, ranks: int, case: str, is_static: bool
) -> None:
    """Of documents, too, that end right at, before or behind each border between two ranks' rows.

    Losses of routers are those of whole packs, and are logged as these. Bug: in 0.16 they weighed the less
    the more ranks shared a pack, where losses are per token. Where all packs are shared alike that is
    Megatron's own, and all weigh alike.
    """
    options = {"cp_size": ranks, "is_static": is_static, **MODELS[case]}
    if case == "experts":
        options["calculate_per_token_loss"] = not is_static
    for losses, gradients, metrics in worlds.of(ranks).run(context_jobs.beside_one_process, **options):
        assert losses <= BOUND and gradients <= BOUND and metrics <= BOUND
        assert metrics >= 0 or case != "experts"
