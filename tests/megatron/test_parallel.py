# SPDX-License-Identifier: Apache-2.0
"""Ranks of data parallelism, with what Megatron's DDP overlaps, and of context parallelism: eager's bits."""

from functools import partial
from typing import Any

import context_jobs
import megatron_rig as rig
import parallel_jobs
import pytest
from context_jobs import BOUND, EMPTY_DUMMY, MANY_KINDS, OF_ENGINE, ROUTERS
from notes import noting
from parallel_jobs import PACKS
from same_bits import assert_same_bits
from worlds import World, Worlds

from megagraph.demo.trainer import Trainer

OVERLAP = {"overlap_grad_reduce": True}
BUCKETS = {**OVERLAP, "bucket_size": 4000}
SHARDED = {**BUCKETS, "use_distributed_optimizer": True, "overlap_param_gather": True}
SMALL = {**SHARDED, "bucket_size": 1000}
ATTENTION, MLPS = ({"cuda_graph_modules": scope} for scope in ("attn", "mlp"))
hooked = partial(rig.ModelTrainer, layers=4, heads=4, prepare=parallel_jobs.hook_second)
# Fields of DDP's config, further options, and calls that each rank runs eager once it has graphs.
TRAININGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, int], dict[str, int]]] = {
    "gathered alike": ({**SHARDED, "align_param_gather": True}, {}, {}, {}),
    "attention": (SMALL, {"plugin": ATTENTION}, {}, {}),
    "MLPs": (SHARDED, {"plugin": MLPS}, {}, {}),
    # Bug: a replay told DDP of gradients in another order than eager, and ranks reduced different buckets.
    "one rank runs eager": (SMALL, {"misfits_on": 1}, {}, {"TOO_MANY_SEQUENCES": rig.LAYERS}),
    # Each layer that replays is told of by itself beside one that does not, and buckets lie across layers.
    "one layer runs eager": (BUCKETS, {"make": hooked}, *[{"FOREIGN_HOOK": PACKS}] * 2),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_bits(world2: World, name: str) -> None:
    """Ranks see packs of their own. A layer that ran before its weights are gathered would read old ones."""
    ddp, options, *eager = TRAININGS[name]
    reports = world2.run(parallel_jobs.train_pair, ddp=ddp, own_packs=True, evaluate_at=(1,), **options)
    for report, later in zip(reports, eager, strict=True):
        layers = report["layers"]
        figures = {"failures": int("FOREIGN_HOOK" in later), "calls": (2 + 1) * PACKS * layers}
        figures |= {"verified": 1, "unverified": 0}  # also while parameters are still to be gathered
        rig.ran(report, **figures, WARMING_UP=2 * PACKS * layers, **later)


def test_a_wrong_graph_is_found_while_parameters_are_still_to_be_gathered(world2: World) -> None:
    """Bug: these were NaN, in tests alone, and any graph had eager's bits."""
    reports = world2.run(parallel_jobs.disagree, how={0: "wrong"}, ddp=SHARDED, own_packs=True)
    assert ["VERIFY_FAILED" in report["eager"] for report in reports] == [True, False]


def _heard(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the bucket groups of a model hear and do in their order: a host's own functions are in between."""
    names = {param: name for name, param in trainer.model.named_parameters()}
    heard: list[str] = []

    def hear(index: int, param: Any, *_further: Any) -> None:
        heard.append(f"group {index} hears of {names[param]}")

    def reduce(index: int, **_how: Any) -> None:
        heard.append(f"group {index} reduces")

    for index, group in enumerate(trainer.model.bucket_groups):
        noting(monkeypatch, group, "register_grad_ready", partial(hear, index))
        noting(monkeypatch, group, "start_grad_sync", partial(reduce, index))
    return heard


@pytest.mark.parametrize("bucket_size", [1000, 4000, None])
def test_buckets_hear_and_are_reduced_in_the_order_of_eager(monkeypatch: Any, bucket_size: Any) -> None:
    pair = rig.Pair(layers=4, ddp={**OVERLAP, "bucket_size": bucket_size})
    pair.step(rig.ONE, rig.TWO, times=3)

    def accumulate(trainer: Trainer) -> Any:
        with rig.unsynchronized(trainer):
            return rig.schedule(trainer.model, [rig.ONE], 1, trainer.device)

    for is_trained in (False, True):  # graphs that know fewer gradients come later
        for trainer in pair.both:
            for layer in trainer.chunk.decoder.layers:
                layer.mlp.linear_fc2.requires_grad_(is_trained)
        for _ in range(2):
            assert_same_bits(*pair.each(accumulate))
    eager, graphed = (_heard(trainer, monkeypatch) for trainer in pair.both)
    pair.step(rig.ONE)
    groups = len(pair.graphed.model.bucket_groups)
    assert groups == 1 if bucket_size is None else groups > 2
    for index in range(groups):
        of_group = [[it for it in heard if it.startswith(f"group {index} ")] for heard in (eager, graphed)]
        assert of_group[0] == of_group[1]
    reduced = [[line for line in heard if line.endswith("reduces")] for heard in (eager, graphed)]
    assert reduced[0] == reduced[1] and len(set(reduced[0])) == len(reduced[0]) == groups


def test_counts_add_up_where_every_micro_batch_is_the_last() -> None:
    """As without `no_sync`: DDP compares how often it has heard of each parameter with the first step."""
    pair = rig.Pair(ddp=OVERLAP)
    for trainer in pair.both:
        trainer.chunk.config.no_sync_func = None
    for _ in range(4):
        pair.step(rig.ONE, rig.TWO)
        for trainer in pair.both:
            (group,) = trainer.model.bucket_groups
            assert set(group.per_param_grad_ready_counts.values()) <= {2}
    assert group.golden_per_param_grad_ready_counts == group.per_param_grad_ready_counts != {}
    assert pair.report()["replays"] == 3 * 2 * rig.LAYERS


# -- packs that context-parallel ranks share ---------------------------------------------------------

Options = dict[str, Any]
EXPERTS: Options = {"model": {"experts": True}}
ENGINE: Options = {"model": {"engine": True}}
MISFITS: Options = {"misfits": True, "has_tails": False}
engine = [pytest.mark.gpu, rig.needs_engine]
both = pytest.mark.both


def spread(mla: str, **options: Any) -> Options:
    model = {"experts": True, "mla": mla}
    return {"model": model, "plugin": ROUTERS, "expert_model_parallel_size": 2, **MANY_KINDS, **options}


SHARED_PACKS: dict[str, tuple[Any, Options]] = {
    "heads exchanged": (both, {"cp_comm_type": "a2a"}),
    "a tail that is a document": (both, {"plugin": EMPTY_DUMMY}),
    # Bug: longer than a rank's rows, which is 64, the longest document could not be said.
    "a longest document that is said": ((), {"plugin": {"max_seqlen": 112}}),
    "MLA experts": (both, spread("plain, RoPE", **MISFITS)),
    # Megatron makes its table on a GPU.
    "MLA experts, YaRN": (pytest.mark.gpu, spread("low rank, YaRN", **MISFITS)),
    "experts beside tensor parallelism": (
        both,
        {
            **{**EXPERTS, "tp_size": 2, "sequence_parallel": True, "plugin": ROUTERS},
            **{"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
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
        f"Transformer Engine, {comm_type}": (engine, {"num_steps": 3, **ENGINE, "cp_comm_type": comm_type})
        for comm_type in ("a2a", "all_gather")
    },
}


@pytest.mark.parametrize("name", [pytest.param(it, marks=marks) for it, (marks, _) in SHARED_PACKS.items()])
def test_graphs_have_eager_bits(worlds: Worlds, name: str) -> None:
    _marks, options = SHARED_PACKS[name]
    reports = worlds.of(2 * options.get("tp_size", 1)).run(context_jobs.train_shared, cp_size=2, **options)
    reasons = {"WARMING_UP", *["TOO_MANY_SEQUENCES"] * options.get("misfits", False)}
    for report in reports:
        assert report["failures"] == [] and set(report["eager"]) == reasons
        assert report["eager"] == reports[0]["eager"] and report["replays"] > 0
        assert 0 < report["padding_share"] < 1


GROUPS: Options = {"num_attention_heads": 4, "num_query_groups": 2}
HEADS: Options = {"num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 16}
# Marks, ranks, whether the model is made for them or packs say so (more: test_dynamic_context.py), options.
MODELS: dict[str, tuple[Any, int, bool, Options]] = {
    "heads exchanged, as packs say": ((), 4, False, {**HEADS, "cp_comm_type": "a2a"}),
    "MLA, heads exchanged": ((), 2, True, {"model": {"mla": "plain, RoPE"}, "cp_comm_type": "a2a"}),
    "experts": (both, 2, True, EXPERTS),
    "experts, as packs say": (both, 2, False, {**EXPERTS, "calculate_per_token_loss": True}),
    "gathered, a tail that is a document": (both, 2, True, {**GROUPS, "plugin": EMPTY_DUMMY}),
    "Transformer Engine": (engine, 2, True, ENGINE),
    "Transformer Engine, as packs say": (engine, 2, False, ENGINE),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, (marks, *_) in MODELS.items()])
def test_each_rank_has_its_share_of_whole_packs(worlds: Worlds, name: str) -> None:
    """Of documents, too, that are empty or end at, before or behind a border between two ranks' rows. Losses
    of routers are those of whole packs. Bug: in 0.16 they weighed the less the more ranks shared one."""
    _marks, ranks, is_static, options = MODELS[name]
    given = {"cp_size": ranks, "is_static": is_static, **options}
    for losses, gradients, metrics in worlds.of(ranks).run(context_jobs.beside_one_process, **given):
        assert losses <= BOUND and gradients <= BOUND and metrics <= BOUND
        assert metrics >= 0 or "experts" not in name
