# SPDX-License-Identifier: Apache-2.0
"""Every kind of model under each set of scopes: the bits of mode `eager`, in all that steps leave. Models
with real Mamba mixers, or of Transformer Engine: test_scope_cells.py."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import moe_rig
import pytest
from mamba_rig import Documented, mamba, mamba_experts
from megatron_rig import LAYERS, ON_GPU, HybridTrainer, Micro, ModelTrainer, Run, compare_runs, ran, steps_of
from model_specs import KINDS
from moe_rig import ATTENTION, BIASED, PERMUTATION, ROUTERS, WAYS, ExpertTrainer, recompute
from moe_rig import GROUPED_EXPERTS as GROUPED
from moe_rig import PADDED_EXPERTS as PADDED
from rope_rig import MROPE, Pictures
from test_hybrid_model import HAS_DETACHED, hybrid_prediction, prediction

from megagraph.demo.trainer import Trainer
from megagraph.megatron import seams

pytestmark = [
    pytest.mark.usefixtures("experts"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of multi-latent attention
    # Of shared experts that overlap, whose gradients Megatron makes on a stream of its own.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
    # Of torch's compiler, which Megatron's fused activations run through on a GPU.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
PACKS = (1, *(3,) * 7) if ON_GPU else (1, 2, 1)  # of each step, of which the first warms up
Scopes = str | Sequence[str]


class Row(NamedTuple):
    """A kind of model, and what of it is graphed."""

    make: Callable[..., Trainer]
    given: dict[str, Any]  # to `make`
    scopes: Scopes = ()
    sites: int = LAYERS  # that have graphs
    masks: bool = False  # of the users'
    counts: str = ""  # what of a step's counts is never empty
    runs: bool = True  # here
    packs: type[Micro] = Micro  # documents are padded in others


TABLE: dict[str, Row] = {}
HYBRIDS: dict[str, Row] = {}  # whose classes have other names in other releases
HAS_HYBRID = seams.HYBRID_FORWARD.problem() is None
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 4000}


def add(table: dict[str, Row], name: str, row: Row) -> None:
    scopes = row.scopes if isinstance(row.scopes, str) else "+".join(row.scopes) or "whole"
    table[f"{name}-{scopes}{', masks' if row.masks else ''}"] = row


# -- dense layers ------------------------------------------------------------------------------------

for scopes, ddp in ((("attn",), BUCKETS), (("mlp",), {}), (("attn", "mlp"), BUCKETS)):
    add(TABLE, "buckets" if ddp else "dense", Row(ModelTrainer, {"ddp": ddp}, scopes))
# Megatron's recompute of an MLP hands out its bias, whose gradient it then looks for for ever.
for scopes, other in ((("attn",), "mlp"), (("mlp",), "core_attn")):
    given = recompute(other, add_bias_linear=False)
    add(TABLE, "under recompute of the other half", Row(ModelTrainer, given, scopes))
add(TABLE, "dense layers of a model with experts", Row(ExpertTrainer, {"kinds": "--"}))
add(TABLE, "query groups", Row(ModelTrainer, {"query_groups": 2, "heads": 4}))
for normalization, is_centered in (("LayerNorm", True), ("RMSNorm", False)):
    norms = {"normalization": normalization, "layernorm_zero_centered_gamma": is_centered}
    norms |= {"persist_layer_norm": True, "qk_layernorm": True}
    add(TABLE, f"{normalization}, {is_centered=}", Row(ModelTrainer, norms))
for scopes, masks in (((), False), (("attn",), True)):
    add(TABLE, "frequencies of each token", Row(ModelTrainer, MROPE, scopes, masks=masks, packs=Pictures))
for kind in KINDS:
    add(TABLE, kind, Row(ModelTrainer, {"mla": kind}, packs=Documented))
for kind, scopes in (("low rank, YaRN", ("attn",)), ("plain, RoPE", ("attn", "mlp"))):
    given = {"mla": kind, "pattern": "+-+-"}
    add(HYBRIDS, f"hybrid, {kind}", Row(ModelTrainer, given, sites=4, runs=HAS_HYBRID))
    add(TABLE, kind, Row(ModelTrainer, {"mla": kind}, scopes, packs=Documented))
for kind, scopes in (("low rank, YaRN", ()), ("plain, YaRN", "attn")):
    fused = {"mla": kind, "config": {"apply_rope_fusion": True}}
    add(TABLE, f"{kind}, fused RoPE", Row(ModelTrainer, fused, scopes))
for position, ddp, masks in (("rope", {}, True), ("none", BUCKETS, False)):
    given = {"arguments": lambda _, it=position: {"position_embedding_type": it}, "ddp": ddp}
    add(HYBRIDS, f"hybrid, {position}", Row(HybridTrainer, given, sites=4, masks=masks, packs=Documented))
for scope in ("attn", "mlp"):  # layers of one half are graphed whole or not at all
    add(HYBRIDS, "hybrid", Row(HybridTrainer, {}, scope, 2, runs=HAS_HYBRID))

# -- Mamba, real but for the mixer -------------------------------------------------------------------

OF_SYMBOL = {"M": "mamba", "*": "attn", "-": "mlp", "E": "moe_router"}


for scopes, ddp in (((), {}), (("mamba",), {}), (("attn", "mlp"), {}), (("mamba", "attn"), BUCKETS)):
    sites = sum(not scopes or OF_SYMBOL[symbol] in scopes for symbol in "M*-M")
    add(TABLE, "mamba", Row(mamba, {"ddp": ddp}, scopes, sites, packs=Documented))
MIXTURE: dict[str, Any] = {"pattern": "ME*E-"}
PADS = {**MIXTURE, **moe_rig.PADS}
for name, given, scopes, sites in (
    ("experts", MIXTURE, (), 5),  # which leaves experts eager alone
    ("experts", MIXTURE, ("moe_router",), 2),
    ("experts", MIXTURE, ("mlp",), 1),
    ("padded experts", PADS, ("mamba", "attn", "moe_router", "moe_preprocess"), 4),
    ("padded experts", PADS, ("mamba", "moe"), 3),
    ("grouped experts", {**MIXTURE, "is_grouped": True}, (), 5),
):
    # What bfloat16 asks for has test_grouped_experts.py.
    runs = not (ON_GPU and "is_grouped" in given)
    row = Row(mamba_experts, given, scopes, sites, counts="metrics", runs=runs, packs=Documented)
    add(HYBRIDS, f"mamba and {name}", row)

# -- experts -----------------------------------------------------------------------------------------


def cell(way: str, case: str, name: str = "", scopes: Any = None, sites: int = LAYERS, **given: Any) -> None:
    changes = WAYS[way].cases[case]
    scopes, masks = WAYS[way].scopes if scopes is None else scopes, given.pop("masks", False)
    runs = way != PERMUTATION or moe_rig.can_permute(changes)
    given = {"is_grouped": way == GROUPED, **changes, **given}
    add(TABLE, f"{way}: {case}{name}", Row(ExpertTrainer, given, scopes, sites, masks, runs=runs))


# Beside attention experts are eager, whatever they are; masks reach all of them.
for way, with_masks, others in (
    (ATTENTION, ("drop", BIASED), ("allgather", "recomputed")),
    (
        ROUTERS,
        ("alltoall", "drop", BIASED),
        (
            *("jitter", "gated shared experts, allgather", "several losses", "groups, no losses"),
            *("one expert, before the choice, in doubles", "global loss, per token"),
        ),
    ),
    (
        PERMUTATION,
        (),
        (
            *("alltoall", "drop by position, allgather", "shared experts, overlapped", BIASED),
            *("gated shared experts, allgather", "drop and pad, shared experts", "global loss, per token"),
        ),
    ),
    (PADDED, (), ("by position", "room for all", "gated shared experts", "recomputed")),
    (
        GROUPED,
        ("top 2", BIASED),
        (
            *("top 1", "swiglu", "fused swiglu", "gated shared experts, allgather", "recomputed"),
            *("jitter", "global loss, per token", "gradients of their own", "inputs recomputed"),
            "inputs recomputed, fused swiglu",
        ),
    ),
):
    for case in (*with_masks, *others):
        cell(way, case, masks=case in with_masks)
for way in (ATTENTION, PADDED, GROUPED):
    cell(way, BIASED, ", buckets", ddp=BUCKETS)
# Bug that was: overlapped shared experts are no part of the graph, which reported their gradients.
for case in ("shared experts", "shared experts, overlapped"):
    cell(ROUTERS, case, ", small buckets", ddp={**BUCKETS, "bucket_size": 1000}, **moe_rig.BIAS)
for scopes in (("attn", "moe_router"), ("moe_router",)):
    cell(ROUTERS, "shared experts", ", recomputed", scopes, **recompute("shared_experts", "core_attn"))
# Two layers of experts among dense ones.
for way, case, scopes, sites in (
    *((ATTENTION, "alltoall", it, sites) for it, sites in ((("attn", "mlp"), 4), ("mlp", 2))),
    (ROUTERS, "gated shared experts, allgather", ("attn", "moe_router", "mlp"), 4),
    (ROUTERS, "gated shared experts, allgather", "moe_router", 2),
    (PERMUTATION, "shared experts", ("mlp", "moe_router", "moe_preprocess"), 4),
    (PERMUTATION, "drop and pad", ("mlp", "moe_router", "moe_preprocess"), 4),
    (PADDED, BIASED, ("attn", "moe", "mlp"), 4),
    (PADDED, BIASED, "moe", 2),
    *((GROUPED, "shared experts", it, 4) for it in ((), ("mlp", "moe"), ("attn", "moe_router"))),
):
    cell(way, case, ", among dense layers", scopes, sites, kinds="E-E-")
# A layer with experts and a dense one.
for kind, scopes, sites in (
    ("plain, RoPE", "moe_router", 1),
    ("plain, RoPE", ("attn", "mlp", "moe_router"), 2),
    ("low rank, YaRN", ("attn", "moe_router"), 2),
):
    given = {"kinds": "E-", "mla": kind, **moe_rig.BIAS, **moe_rig.SHARED}
    add(TABLE, f"experts, {kind}", Row(ExpertTrainer, given, scopes, sites))

# -- multi-token prediction, on packs as they were given, behind graphed layers ----------------------

for name, given, scopes, masks in (
    ("dense", {}, (), False),
    ("dense", {}, "attn", True),  # 0.19 hands masks to prediction, 0.16 does not
    ("one further token", {"mtp_num_layers": 1, "calculate_per_token_loss": True}, (), False),
    ("no rotary tables", {"position": "learned_absolute"}, (), False),
    ("detached and repeated", {"mtp_detach_heads": True, "mtp_use_repeated_layer": True}, (), False),
    ("experts", {"kinds": "EE"}, ("attn", "moe_router"), False),
    (BIASED, {"kinds": "EE", **moe_rig.BIAS}, "attn", True),
    ("drop and pad", {"kinds": "EE", **moe_rig.PADS}, ("attn", "moe"), False),
    ("MLA", {"mla": "low rank, YaRN"}, (), False),
):
    runs = "mtp_detach_heads" not in given or HAS_DETACHED
    row = Row(prediction, given, scopes, LAYERS, masks, counts="logged", runs=runs)
    add(HYBRIDS, f"prediction, {name}", row)
add(HYBRIDS, "prediction, hybrid", Row(hybrid_prediction, {}, (), 4, counts="logged", runs=HAS_HYBRID))

EAGER: dict[str, tuple[Run, Any]] = {}  # what each set of scopes is compared with


def check(row: Row) -> None:
    """Of training steps, and of evaluations before two of them, of which the first warms up."""
    if not row.runs:
        pytest.skip("this release has no such model, or permutes into shapes that only the device knows")
    padded = {"make": row.packs, "align": 1 if row.packs is Micro else 4}
    warm_up = 2 if "moe_input_jitter_eps" in row.given else 1  # whose first call makes a distribution
    packs, counts = steps_of(len(PACKS), masks=row.masks, **padded), (warm_up, *PACKS[1:])
    steps = [micros[:count] for micros, count in zip(packs, counts, strict=True)]
    plugin, replayed = {"cuda_graph_modules": row.scopes}, sum(counts)  # one evaluation, too
    evaluate_at = {step: packs[step][:warm_up] for step in (1, len(packs) - 1)}
    run = compare_runs(steps, row.make, plugin, shared=EAGER, evaluate_at=evaluate_at, **row.given)
    # Graphs are forwards and backwards for training, forwards for evaluation.
    figures = {"layers": row.sites, "graphs": 3 * row.sites, "verified": 2, "unverified": 0}
    ran(run.report, replayed * row.sites, **figures, WARMING_UP=2 * warm_up * row.sites)
    chosen = ["attn", "mlp", "mamba", "moe_router"]
    assert row.given is not MIXTURE or row.scopes or run.report["cuda_graph_modules"] == chosen
    assert not row.counts or all(getattr(left, row.counts) for left in run.steps)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.gpu] if "fused swiglu" in name else []) for name in TABLE]
)
def test_bits(name: str) -> None:
    check(TABLE[name])


@pytest.mark.both
@pytest.mark.parametrize("name", HYBRIDS)
def test_bits_of_hybrid_models(name: str) -> None:
    check(HYBRIDS[name])
