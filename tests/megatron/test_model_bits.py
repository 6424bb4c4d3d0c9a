# SPDX-License-Identifier: Apache-2.0
"""Every kind of model under each set of scopes: the bits of mode `eager`, in all that steps leave.

Models with real Mamba mixers, or of Transformer Engine: test_scope_cells.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import moe_rig
import pytest
from context_models import MlaExpertTrainer
from mamba_rig import Documented, HybridExpertTrainer, MambaTrainer, grouped_hybrid
from megatron_rig import LAYERS, ON_GPU, HybridTrainer, Micro, Run, compare_runs, plain, steps_of
from mla_rig import KINDS, MlaHybridTrainer, MlaTrainer
from moe_rig import ATTENTION, BIASED, PERMUTATION, ROUTERS, WAYS, ExpertTrainer
from moe_rig import GROUPED_EXPERTS as GROUPED
from moe_rig import PADDED_EXPERTS as PADDED

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
STEPS = 8 if ON_GPU else 3
Scopes = str | Sequence[str]


class Row(NamedTuple):
    """A kind of model, and what of it is graphed."""

    make: Callable[..., Trainer]
    given: dict[str, Any]  # to `make`
    scopes: Scopes = ()
    sites: int = LAYERS  # that have graphs
    masks: bool = False  # of the users'
    records: bool = False  # routers do, in every step
    runs: bool = True  # here
    packs: type[Micro] = Micro  # documents are padded in others


def written(scopes: Scopes) -> str:
    return scopes if isinstance(scopes, str) else "+".join(scopes) or "whole"


TABLE: dict[str, Row] = {}
HYBRIDS: dict[str, Row] = {}  # whose classes have other names in other releases
HAS_HYBRID = seams.HYBRID_FORWARD.problem() is None
HALVES: list[Scopes] = [("attn",), ("mlp",), ("attn", "mlp")]
OVERLAP = {"overlap_grad_reduce": True}
BUCKETS = {**OVERLAP, "bucket_size": 4000}
DDP: dict[str, dict[str, Any]] = {"plain": {}, "overlap, buckets": BUCKETS}

# -- dense layers ------------------------------------------------------------------------------------

for scopes in HALVES:
    TABLE |= {f"{name}-{written(scopes)}": Row(plain, {"ddp": ddp}, scopes) for name, ddp in DDP.items()}
TABLE |= {f"{groups} query groups": Row(plain, {"query_groups": groups, "heads": 4}) for groups in (1, 2)}
for kind in KINDS:
    for scopes in ((), *(HALVES if kind in ("low rank, YaRN", "plain, RoPE") else ())):
        TABLE[f"{kind}-{written(scopes)}"] = Row(MlaTrainer, {"kind": kind}, scopes, packs=Documented)
    HYBRIDS[f"hybrid, {kind}"] = Row(MlaHybridTrainer, {"kind": kind}, sites=4, runs=HAS_HYBRID)
for kind in ("low rank, YaRN", "plain, YaRN"):
    for scopes in ((), HALVES[0]):
        fused = {"kind": kind, "config": {"apply_rope_fusion": True}}
        TABLE[f"{kind}, fused RoPE-{written(scopes)}"] = Row(MlaTrainer, fused, scopes)
for position in ("rope", "none"):
    for name in DDP:
        given = {"position": position, "ddp": DDP[name]}
        HYBRIDS[f"hybrid, {position}, {name}"] = Row(HybridTrainer, given, sites=4, packs=Documented)
for scope in ("attn", "mlp"):  # layers of one half are graphed whole or not at all
    HYBRIDS[f"hybrid-{scope}"] = Row(HybridTrainer, {}, scope, 2, runs=HAS_HYBRID)

# -- Mamba, real but for the mixer -------------------------------------------------------------------

OF_SYMBOL = {"M": "mamba", "*": "attn", "-": "mlp", "E": "moe_router"}


def sites_of(pattern: str, scopes: Scopes) -> int:
    return sum(not scopes or OF_SYMBOL[symbol] in scopes for symbol in pattern)


MAMBA: list[Scopes] = [
    (),
    ("mamba",),
    ("attn",),
    ("mamba", "attn"),
    ("attn", "mlp"),
    ("mamba", "attn", "mlp"),
]
for scopes in MAMBA:
    TABLE[f"mamba-{written(scopes)}"] = Row(
        MambaTrainer, {}, scopes, sites_of("M*-M", scopes), packs=Documented
    )
TABLE["mamba, buckets"] = Row(MambaTrainer, {"ddp": BUCKETS}, ("mamba", "attn"), 3, packs=Documented)
MIXTURE = "ME*E-"
OF_MIXTURE: dict[str, Any] = {"records": True, "packs": Documented}
for scopes in (
    *(("mamba", "attn", "moe_router"), ("attn", "moe_router"), ("mamba", "attn", "mlp", "moe_router")),
    *(("moe_router",), ("mamba",), ("mlp",)),
):
    sites = sites_of(MIXTURE, scopes)
    HYBRIDS[f"mamba and experts-{written(scopes)}"] = Row(
        HybridExpertTrainer, {"pattern": MIXTURE}, scopes, sites, **OF_MIXTURE
    )
for scopes, sites in ((("mamba", "attn", "moe_router", "moe_preprocess"), 4), (("mamba", "moe"), 3)):
    given = {"pattern": MIXTURE, **moe_rig.CASES["drop and pad"]}
    HYBRIDS[f"mamba and padded experts-{written(scopes)}"] = Row(
        HybridExpertTrainer, given, scopes, sites, **OF_MIXTURE
    )
# What bfloat16 asks for has test_grouped_experts.py.
HYBRIDS["mamba and grouped experts"] = Row(
    grouped_hybrid, {"pattern": MIXTURE}, sites=5, runs=not ON_GPU, **OF_MIXTURE
)

# -- experts -----------------------------------------------------------------------------------------


def of_way(way: str, case: str, scopes: Any = None, sites: int = LAYERS, **given: Any) -> Row:
    """Layers of experts, graphed in this way."""
    changes = WAYS[way].cases[case]
    runs = way != PERMUTATION or moe_rig.can_permute(changes)
    scopes = WAYS[way].scopes if scopes is None else scopes
    masks = given.pop("masks", False)
    make = moe_rig.grouped_trainer if way == GROUPED else ExpertTrainer
    return Row(make, {**changes, **given}, scopes, sites, masks, runs=runs)


for way, (_scopes, cases) in WAYS.items():
    TABLE |= {f"{way}: {case}": of_way(way, case) for case in cases}
MASKED = [(way, case) for way in (ATTENTION, ROUTERS) for case in ("alltoall", "drop", BIASED)]
for way, case in (*MASKED, (GROUPED, "top 2"), (GROUPED, BIASED)):
    TABLE[f"{way}: {case}, masks"] = of_way(way, case, masks=True)
for way in (ATTENTION, PADDED, GROUPED):
    TABLE[f"{way}: {BIASED}, buckets"] = of_way(way, BIASED, ddp=BUCKETS)
# Bug that was: overlapped shared experts are no part of the graph, which reported their gradients.
for case in ("shared experts", "shared experts, overlapped"):
    ddp = {**OVERLAP, "bucket_size": 1000}
    TABLE[f"{ROUTERS}: {case}, small buckets"] = of_way(ROUTERS, case, ddp=ddp, **moe_rig.BIAS)
# Two layers of experts among dense ones.
for way, case, among, sites in (
    *(
        (ROUTERS, "gated shared experts, allgather", names, 4)
        for names in (("attn", "moe_router"), ("attn", "moe_router", "mlp"), ("mlp", "moe_router"))
    ),
    (ROUTERS, "gated shared experts, allgather", "moe_router", 2),
    *(
        (PERMUTATION, case, ("mlp", "moe_router", "moe_preprocess"), 4)
        for case in ("shared experts", "drop and pad")
    ),
    *(
        (PADDED, BIASED, names, sites)
        for names, sites in ((("attn", "moe"), 4), (("attn", "moe", "mlp"), 4), ("moe", 2))
    ),
    *(
        (GROUPED, "shared experts", names, 4)
        for names in ((), ("attn", "mlp", "moe"), ("mlp", "moe"), "attn", ("attn", "moe_router"))
    ),
    (GROUPED, "shared experts", "moe", 2),
):
    TABLE[f"{way}: {case}, among dense layers-{written(among)}"] = of_way(
        way, case, among, sites, kinds="E-E-"
    )
# A layer with experts and a dense one.
for kind, scopes, sites in (
    *(("plain, RoPE", (scope,), 1 if scope != "attn" else 2) for scope in ("attn", "moe_router", "mlp")),
    *(("plain, RoPE", ("attn", *names), 2) for names in (("moe_router",), ("mlp", "moe_router"))),
    ("low rank, YaRN", ("attn", "moe_router"), 2),
):
    given = {"kind": kind, **moe_rig.BIAS, **moe_rig.CASES["shared experts"]}
    TABLE[f"experts, {kind}-{written(scopes)}"] = Row(MlaExpertTrainer, given, scopes, sites)

EAGER: dict[str, tuple[Run, Any]] = {}  # what each set of scopes is compared with


def check(row: Row) -> None:
    """Of training steps, and of evaluations before two of them."""
    if not row.runs:
        pytest.skip("this release has no such model, or permutes into shapes that only the device knows")
    padded = {"make": row.packs, "align": 1 if row.packs is Micro else 4}
    steps, plugin = steps_of(STEPS, masks=row.masks, **padded), {"cuda_graph_modules": row.scopes}
    run = compare_runs(steps, row.make, plugin, shared=EAGER, evaluate_at=(1, STEPS - 1), **row.given)
    report, sites = run.report, row.sites
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 2 * 3 * sites}
    assert report["calls"] == (STEPS + 2) * 3 * sites and report["replays"] == STEPS * 3 * sites
    assert report["verification"]["verified"] == 2 and report["verification"]["unverified"] == 0
    # Forwards and backwards for training, forwards for evaluation.
    assert report["layers"] == sites and report["graphs"] == 3 * sites
    assert not row.records or all(left.metrics for left in run.steps)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.gpu] if "fused swiglu" in name else []) for name in TABLE]
)
def test_bits(name: str) -> None:
    check(TABLE[name])


@pytest.mark.both
@pytest.mark.parametrize("name", HYBRIDS)
def test_bits_of_hybrid_models(name: str) -> None:
    check(HYBRIDS[name])
