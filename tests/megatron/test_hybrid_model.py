# SPDX-License-Identifier: Apache-2.0
"""HybridModel (MambaModel before 0.18) with attention and MLP layers: graphed, or refused by name."""

import importlib
from typing import Any

import megatron_rig as rig
import pytest
import torch
from mamba_rig import Documented, mamba_experts, mamba_spec
from moe_rig import EXPERTS
from same_bits import assert_same_bits
from torch import Tensor, nn

import megagraph
from megagraph.demo.trainer import Trainer
from megagraph.megatron import seams
from megagraph.megatron.graphs.layer_arguments import layer_constants
from megagraph.megatron.graphs.refusals import refusal_of
from megagraph.modules import Norm

HYBRID = seams.hybrid_seams() or ()
LAYERS = len(rig.HYBRID_PATTERN)

pytestmark = pytest.mark.both


def test_a_pack_over_the_capacity_runs_eager_as_it_was_given() -> None:
    over = rig.Micro(lengths=(4,) * 6)
    report = rig.compare_runs(
        [[rig.ONE, over], [rig.TWO, over], [over, rig.OTHER], [rig.TWO]], rig.HybridTrainer
    ).report
    assert report["model"] == HYBRID[0].owner().__name__
    assert report["eager"] == {"WARMING_UP": LAYERS, "TOO_MANY_SEQUENCES": 3 * LAYERS}
    assert report["replays"] == 3 * LAYERS


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_layer_that_stays_eager_gets_the_rotary_tables(layer: int) -> None:
    """A hook keeps one layer out of the graphs; the stack's own loop would hand it no tables."""
    pair = rig.Pair(rig.HybridTrainer)
    for trainer in pair.both:
        trainer.chunk.decoder.layers[layer].register_forward_hook(lambda *unused: None)
    pair.step(rig.ONE, rig.TWO, times=4)
    report = pair.report()
    assert report["eager"] == {"WARMING_UP": 2 * LAYERS, "FOREIGN_HOOK": 3 * 2}
    assert report["replays"] == 3 * 2 * (LAYERS - 1)


def test_a_model_that_is_built_before_install(install: rig.Install) -> None:
    trainer = rig.HybridTrainer()
    install()
    rig.step(trainer, [rig.ONE, rig.TWO], times=3)
    assert rig.report_of(trainer)["replays"] == 2 * 2 * LAYERS


def test_the_stack_of_our_spec_ends_in_our_norm_and_patches_nothing() -> None:
    owner = HYBRID[1].owner()
    block = importlib.import_module(owner.__module__)
    before = dict(vars(block)), dict(vars(owner))
    stack = rig.HybridTrainer().chunk.decoder
    assert isinstance(stack, owner) and type(stack.final_norm) is Norm
    assert [type(layer).__name__ for layer in stack.layers] == ["TransformerLayer", "MLPLayer"] * 2
    assert (dict(vars(block)), dict(vars(owner))) == before
    spec = megagraph.get_hybrid_stack_varlen_spec()
    assert spec.module is type(stack)
    headless = rig.HybridTrainer(pattern="-", arguments=lambda _: {"post_process": False}).chunk.decoder
    assert not hasattr(headless, "final_norm")
    by_position = megagraph.get_hybrid_stack_varlen_spec(None, False, True, False)  # as Megatron's function
    assert by_position.module is type(stack)


def test_a_hybrid_model_is_the_gpt_model_of_its_halves() -> None:
    """The same function of the same weights: attention and MLP in layers of their own or in one."""
    pair, gpt = rig.HybridTrainer(), Trainer(rig.OPTIONS)
    state = {}
    for name, tensor in gpt.chunk.state_dict().items():
        if name.startswith("decoder.layers."):
            _, _, number, *rest = name.split(".")
            half = int(rest[0] in ("pre_mlp_layernorm", "mlp"))
            name = ".".join(("decoder.layers", str(2 * int(number) + half), *rest))
        state[name.replace("final_layernorm", "final_norm")] = tensor
    assert state.keys() == pair.chunk.state_dict().keys()
    pair.chunk.load_state_dict(state)
    one, other = (rig.step(trainer, [rig.ONE, rig.TWO], update=False) for trainer in (pair, gpt))
    assert all(map(torch.equal, one.losses, other.losses))


def test_a_core_whose_hybrid_models_cannot_be_imported_is_patched_without_them(
    install: rig.Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = seams.Seam("megatron.core.absent", "Model.forward")
    monkeypatch.setattr(seams, "HYBRID_FORWARD", absent)
    monkeypatch.setattr(seams, "MAMBA_FORWARD", absent)
    before = [seam.function() for seam in HYBRID]
    install()
    assert [seam.function() for seam in HYBRID] == before
    with pytest.raises(ImportError, match="neither HybridModel nor MambaModel"):
        megagraph.get_hybrid_stack_varlen_spec()


def test_what_the_model_hands_to_its_stack_leaves_the_model_as_it_was() -> None:
    chunk = rig.HybridTrainer().chunk
    before, decoder = set(vars(chunk)), chunk.decoder
    hidden = torch.empty((64, 1, rig.OPTIONS.hidden), device="meta")
    handed = layer_constants(chunk, rig.ONE.params(torch.device("cpu")), hidden)
    assert handed.keys() == {"rotary_pos_emb"} and handed["rotary_pos_emb"].size(0) == rig.ONE.longest
    assert set(vars(chunk)) == before and chunk.decoder is decoder


@pytest.mark.parametrize(
    ("symbol", "name"),
    [("G", "a gated delta net"), ("D", "sparse attention"), ("?", "an unknown kind of layer")],
)
def test_layers_that_are_not_built_are_refused_by_name(
    symbol: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the pattern alone: most of these cannot be built without further packages."""
    trainer = rig.HybridTrainer(pattern="*-")
    assert refusal_of(trainer.chunk, trainer.model) is None
    monkeypatch.setattr(trainer.chunk.decoder, "layer_type_list", ["*", symbol, "-"])
    assert (
        rig.refused(trainer.chunk, trainer.model)
        == f"{name} ({symbol!r} in the hybrid layer pattern) is not supported yet"
    )


def test_a_stack_with_a_foreign_layer_trains_eager_under_its_reason(
    install: rig.Install, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer of another kind in the place of Mamba's."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    class Foreign(nn.Module):
        def __init__(self, config: Any, layer_number: int, **unused: Any) -> None:
            super().__init__()
            self.layer_number = layer_number
            self.scale = nn.Parameter(torch.ones(config.hidden_size))

        def forward(self, hidden_states: Tensor, **unused: Any) -> Tensor:
            return hidden_states * self.scale

    spec = megagraph.get_hybrid_stack_varlen_spec()
    spec.submodules.mamba_layer = ModuleSpec(module=Foreign)
    plain = rig.HybridTrainer(pattern="*M-", spec=spec)
    wanted = [rig.step(plain, [rig.ONE, rig.TWO]) for _ in range(3)]
    install()
    trainer = rig.HybridTrainer(pattern="*M-", spec=spec)
    for one in wanted:
        assert_same_bits(one, rig.step(trainer, [rig.ONE, rig.TWO]))
    assert rig.report_of(trainer)["eager"] == {"SCOPE_UNSUPPORTED": 3 * 2 * 3}
    assert ": stays eager (SCOPE_UNSUPPORTED): Foreign as a layer of Mamba ('M' in" in caplog.text


def test_where_nothing_is_named_experts_alone_stay_eager(experts: None) -> None:
    steps = rig.steps_of(3, make=Documented)
    report = rig.compare_runs(steps, mamba_experts, pattern="ME*E-").report
    assert report["cuda_graph_modules"] == ["attn", "mlp", "mamba", "moe_router"]
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 3 * 5}
    assert report["replays"] == 2 * 3 * 5


def test_a_foreign_layer_in_the_place_of_experts_is_refused_by_name(
    experts: None, install: rig.Install, caplog: pytest.LogCaptureFixture
) -> None:
    install()
    spec = mamba_spec(EXPERTS, False)
    spec.submodules.moe_layer = spec.submodules.mlp_layer
    rig.step(mamba_experts("*E", spec=spec), [Documented(lengths=(9, 20))])
    assert "MLPLayer as a layer of experts ('E' in the hybrid layer pattern)" in caplog.text
