# SPDX-License-Identifier: Apache-2.0
"""Legal cells of docs/scopes.md on a GPU, of Transformer Engine or real mixers. Rest: test_model_bits.py."""

import dataclasses
import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import moe_rig
import pytest
from mamba_rig import Documented, mamba_experts
from megatron_rig import OPTIONS, Micro, compare_runs, needs_engine, ran, steps_of
from moe_rig import Config, ExpertTrainer
from streams import seeded

import megagraph
from megagraph.megatron import seams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("experts", "deterministic_engine"),
    pytest.mark.filterwarnings("ignore"),  # of Transformer Engine and of mamba-ssm, of every kind
]

Scopes = tuple[str, ...]
needs_mixers = pytest.mark.skipif(importlib.util.find_spec("mamba_ssm") is None, reason="needs mamba-ssm")
HYBRID = "hybrid with Mamba and experts"
DENSE: Config = {
    **{"num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_z_loss_coeff": None},
    **{"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none"},
}
EIGHT: Config = {
    **moe_rig.BIAS,
    **{"num_moe_experts": 8, "moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 32},
}
PADDED = {**EIGHT, **moe_rig.PADS}
MIXER = {"mamba_state_dim": 32, "mamba_head_dim": 32, "mamba_num_groups": 2}
ROUTERS: Sequence[Scopes] = ((), ("moe_router",), ("moe_router", "moe_preprocess"))


def mixed(own: Sequence[str], *of_experts: Scopes) -> list[Scopes]:
    """Each subset of some scopes with each of those of experts; not the empty one."""
    some = itertools.chain.from_iterable(itertools.combinations(own, count) for count in range(len(own) + 1))
    return [(*one, *other) for one in some for other in of_experts if one or other]


@dataclass(frozen=True, kw_only=True)
class Model:
    kinds: str  # of its layers
    scopes: Sequence[Scopes]  # that are legal
    config: Config  # further fields of Megatron's
    mla: str = ""  # which multi-latent attention

    @property
    def is_hybrid(self) -> bool:
        return "M" in self.kinds


GATHERED = [("attn",), ("attn", "moe_router"), ("attn", "mlp", "moe_router")]
MODELS = {
    "dense": Model(kinds="--", scopes=[(), *mixed(("attn", "mlp"), ())], config=DENSE),
    "experts": Model(kinds="EE", scopes=mixed(("attn",), *ROUTERS), config=EIGHT),
    "experts among dense layers": Model(kinds="E-", scopes=mixed(("attn", "mlp"), *ROUTERS), config=EIGHT),
    "padded experts": Model(kinds="E-", scopes=mixed(("attn", "mlp"), *ROUTERS[1:], ("moe",)), config=PADDED),
    # Dropless experts and padded ones, with the other dispatcher that may have both.
    "dispatcher allgather": Model(kinds="E-", scopes=GATHERED, config={**EIGHT, **moe_rig.GATHERS}),
    "padded, dispatcher allgather": Model(kinds="E-", scopes=GATHERED, config={**PADDED, **moe_rig.GATHERS}),
    "MLA and experts": Model(
        kinds="E-", scopes=mixed(("attn", "mlp"), *ROUTERS), config=EIGHT, mla="low rank, YaRN"
    ),
    HYBRID: Model(kinds="ME*E-", scopes=mixed(("mamba", "attn", "mlp"), *ROUTERS), config=EIGHT),
}


def stack_spec(is_engine: bool) -> Any:
    """Of a hybrid stack."""
    if is_engine:
        return pytest.importorskip("megatron.core.models.hybrid.hybrid_layer_specs").hybrid_stack_spec
    given = {"num_experts": 8, "moe_grouped_gemm": False, "normalization": "RMSNorm"}
    return megagraph.get_hybrid_stack_varlen_spec(**given)


def compare(
    name: str,
    scopes: Scopes,
    count: int,
    *,
    is_engine: bool = True,
    packs: Any = Documented,
    never_waits: bool = False,
    **further: Any,
) -> Config:
    """Trains eager and graphed, with the same bits. Returns the report of the graphs."""
    model = MODELS[name]
    changes = {"normalization": "RMSNorm", "is_grouped": never_waits, **model.config}
    changes["moe_grouped_gemm"] = is_engine and model.config["num_moe_experts"] is not None
    if model.is_hybrid:
        make: Any = partial(mamba_experts, model.kinds, spec=stack_spec(is_engine))
        changes |= {"options": dataclasses.replace(OPTIONS, hidden=128, heads=2), **MIXER}
    else:
        make = partial(ExpertTrainer, model.kinds, mla=model.mla, engine=is_engine)
    steps, plugin = steps_of(count, make=packs), {"cuda_graph_modules": scopes}
    run = compare_runs(steps, seeded(make), plugin, **{**changes, **further})
    assert all(bool(left.metrics) == ("E" in model.kinds) for left in run.steps)
    return run.report


def check_report(report: Config, count: int) -> None:
    sites = report["layers"]
    ran(report, 3 * sites * (count - 1), WARMING_UP=3 * sites)
    assert sites > 0
    assert report["verification"]["verified"] == 1 and report["verification"]["unverified"] == 0


CELLS = [(name, scopes, 8) for name, model in MODELS.items() for scopes in model.scopes]
CELLS += [
    ("experts", ("attn", "moe_router", "moe_preprocess"), 100),
    ("MLA and experts", ("attn", "mlp", "moe_router"), 100),
    (HYBRID, ("mamba", "attn", "moe_router"), 100),
]
OF_CELL = ("name", "scopes", "count")


@needs_engine
@pytest.mark.parametrize(
    OF_CELL, [pytest.param(*it, marks=[needs_mixers] * (it[0] == HYBRID)) for it in CELLS], ids=str
)
def test_layers_of_transformer_engine_have_the_bits_of_eager(name: str, scopes: Scopes, count: int) -> None:
    check_report(compare(name, scopes, count), count)


@needs_mixers
@pytest.mark.parametrize(OF_CELL, [it for it in CELLS if it[0] == HYBRID], ids=str)
def test_real_mixers_have_the_bits_of_eager(name: str, scopes: Scopes, count: int) -> None:
    check_report(compare(name, scopes, count, is_engine=False), count)


@needs_mixers
@pytest.mark.skipif(not seams.packs_have("seq_idx"), reason="mixers know the documents by the offsets")
def test_packs_that_say_no_documents_are_what_eager_makes_of_them() -> None:
    check_report(compare(HYBRID, ("mamba", "attn", "mlp"), 8, is_engine=False, packs=Micro), 8)


GATED = {"moe_shared_expert_gate": True}
# Of layers of Transformer Engine: further options, and what is graphed.
OF_ENGINE: dict[str, tuple[Config, Scopes]] = {
    "one by one": ({"moe_grouped_gemm": False}, ("attn", "moe_router")),
    "fused permutation": ({"moe_permute_fusion": True}, ("attn", "moe_router")),
    "gated shared experts": (GATED, ("attn", "mlp", "moe_router")),
    "never waiting": ({"never_waits": True, **GATED}, ()),
    "never waiting, one by one": ({"never_waits": True, "moe_grouped_gemm": False, **GATED}, ()),
}


@needs_engine
@pytest.mark.parametrize("case", OF_ENGINE)
def test_experts_of_transformer_engine(case: str) -> None:
    further, scopes = OF_ENGINE[case]
    report = compare("experts among dense layers", scopes, 8, **further)
    check_report(report, 8)
    assert report["graphs"] == 2 * report["layers"]
