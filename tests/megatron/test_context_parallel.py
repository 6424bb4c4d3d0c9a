# SPDX-License-Identifier: Apache-2.0
"""Models whose context-parallel ranks share every pack: graphs have the bits of eager, and eager is right."""

from typing import Any

import context_jobs
import pytest
import torch
from context_jobs import EMPTY_DUMMY, MANY_KINDS, OF_ENGINE, ROUTERS
from megatron_rig import needs_engine
from worlds import Worlds

pytestmark = pytest.mark.megatron

ON_GPU = torch.cuda.is_available()
# Over the largest entry: sums over rows in another order, in float32 on the CPU, in bfloat16 on a GPU.
BOUND = 5e-2 if ON_GPU else 2e-5
Options = dict[str, Any]
EXPERTS: Options = {"model": {"experts": True}}
MISFITS: Options = {"misfits": True, "has_tails": False}
engine = [pytest.mark.gpu, needs_engine]
both = pytest.mark.both


def spread(mla: str, **options: Any) -> Options:
    """Experts over both ranks."""
    model = {"experts": True, "mla": mla}
    return {"model": model, "plugin": ROUTERS, "expert_model_parallel_size": 2, **MANY_KINDS, **options}


TRAININGS: dict[str, tuple[Any, Options]] = {
    "heads exchanged": (both, {"cp_comm_type": "a2a"}),
    "packs that fit no capacity": (both, MISFITS),
    "a tail that is a document": (both, {"plugin": EMPTY_DUMMY}),
    # Bug: longer than a rank's rows, which is 64, the longest document could not be said.
    "a longest document that is said": ((), {"plugin": {"max_seqlen": 112}}),
    "MLA experts": (both, spread("plain, RoPE", **MISFITS)),
    # Megatron makes its table on a GPU.
    "MLA experts, YaRN": (pytest.mark.gpu, spread("low rank, YaRN", **MISFITS)),
    "experts beside tensor parallelism": (
        both,
        {
            **EXPERTS,
            "tp_size": 2,
            "sequence_parallel": True,
            "plugin": ROUTERS,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
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


EXCHANGED: Options = {
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 16,
    "cp_comm_type": "a2a",
}
ENGINE: Options = {"model": {"engine": True}}
# Marks, ranks, whether the model is made for them or packs say so (more: test_dynamic_context.py), options.
MODELS: dict[str, tuple[Any, int, bool, Options]] = {
    "gathered": ((), 4, True, {"num_attention_heads": 4, "num_query_groups": 2}),
    "heads exchanged, as packs say": ((), 4, False, EXCHANGED),
    "MLA, heads exchanged": ((), 2, True, {"model": {"mla": "plain, RoPE"}, "cp_comm_type": "a2a"}),
    "experts": (both, 2, True, EXPERTS),
    "experts, as packs say": (both, 2, False, {**EXPERTS, "calculate_per_token_loss": True}),
    "a tail that is a document": (both, 2, True, {"plugin": EMPTY_DUMMY}),
    "Transformer Engine": (engine, 2, True, ENGINE),
    "Transformer Engine, as packs say": (engine, 2, False, ENGINE),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, (marks, *_) in MODELS.items()])
def test_each_rank_has_its_share_of_whole_packs(worlds: Worlds, name: str) -> None:
    """Of documents, too, that are empty or end right at, before or behind a border between two ranks' rows.

    Losses of routers are those of whole packs, and are logged as these. Bug: in 0.16 they weighed the less
    the more ranks shared a pack, where losses are per token. Where all packs are shared alike that is
    Megatron's own, and all weigh alike.
    """
    _marks, ranks, is_static, options = MODELS[name]
    given = {"cp_size": ranks, "is_static": is_static, **options}
    for losses, gradients, metrics in worlds.of(ranks).run(context_jobs.beside_one_process, **given):
        assert losses <= BOUND and gradients <= BOUND and metrics <= BOUND
        assert metrics >= 0 or "experts" not in name
