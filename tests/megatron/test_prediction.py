# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: its layers run eager on packs as they were given, behind graphed layers."""

import dataclasses
import importlib
from typing import Any
from unittest import mock

import megatron_rig as rig
import mla_rig
import moe_rig
import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from moe_rig import ExpertTrainer
from same_bits import assert_same_bits
from torch import Tensor, nn

import megagraph
from megagraph.decide.reasons import EagerReason
from megagraph.demo.trainer import ModelOptions, transformer_config
from megagraph.megatron import seams
from megagraph.megatron.graphs.refusals import refusal_of
from megagraph.modules import Norm

pytestmark = [pytest.mark.both, pytest.mark.usefixtures("experts")]

PREDICTION: dict[str, Any] = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}
# Undoes what moe_rig's base says of experts, of which there are none.
DENSE: dict[str, Any] = {
    "num_moe_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
}


def prediction_spec(config: Any, layers: Any) -> Any:
    """Of a block of multi-token prediction, whose layers are like the last one of the decoder."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)
    for spec in block.layer_specs:
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(spec.submodules, name, layers.layer_norm)
    return block


class PredictionTrainer(ExpertTrainer):
    """The reference loop around a GPTModel that predicts further tokens."""

    def __init__(
        self,
        kinds: str = "--",
        *,
        position: str = "rope",
        options: ModelOptions = rig.OPTIONS,
        **changes: Any,
    ) -> None:
        self._position = position
        dense = {} if "E" in kinds else DENSE
        super().__init__(kinds, options=options, **{**PREDICTION, **dense, **changes})
        _logged()

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        from megatron.core.models.gpt import GPTModel

        model: nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=self.options.vocab,
            max_sequence_length=self.options.max_tokens,
            position_embedding_type=self._position,
            mtp_block_spec=prediction_spec(config, spec),
        )
        return model

    def counted(self) -> dict[str, Any]:
        """With what is logged of predicted tokens."""
        logged = _logged()
        assert logged
        return {**super().counted(), "logged": logged}


def _logged() -> dict[str, Tensor]:
    """What Megatron's tracker of predicted tokens holds, by name; empties it."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    found = {name: value.clone() for name, value in tracker.items() if isinstance(value, Tensor)}
    tracker.clear()
    return found


def hybrid_spec() -> Any:
    """Of a hybrid stack, with a block of prediction whose layers its pattern names."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as prediction
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts = prediction.MultiTokenPredictionLayerSubmodules(
        enorm=Norm, hnorm=Norm, layer_norm=Norm, eh_proj=ColumnParallelLinear
    )
    layer = ModuleSpec(module=prediction.MultiTokenPredictionLayer, submodules=parts)
    block = prediction.MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    stack = megagraph.get_hybrid_stack_varlen_spec()
    stack.submodules = dataclasses.replace(
        stack.submodules,
        mtp_block_spec=ModuleSpec(module=prediction.MultiTokenPredictionBlock, submodules=block),
    )
    return stack


class HybridPredictionTrainer(rig.HybridTrainer):
    """The same around a HybridModel, of which `/` begins the layers of one further token."""

    def __init__(self) -> None:
        super().__init__(pattern="*-*-/*-/*-", spec=hybrid_spec(), config={"mtp_num_layers": 2})

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        config.num_layers = 4  # of the pattern's first part
        return super().make_chunk(config, spec)


LAYERS = 2


def compare(steps: Any, scopes: Any = (), **changes: Any) -> rig.Run:
    """Trains eager and graphed, with the same bits. Returns the graphed run."""
    return rig.compare_runs(steps, PredictionTrainer, {"cuda_graph_modules": scopes}, **changes)


def assert_replayed(report: dict[str, Any], sites: int, warm_up: int = 3 * LAYERS) -> None:
    """All calls after the first step have replayed."""
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": warm_up}
    assert report["layers"] == sites
    assert report["replays"] >= 0.95 * (report["calls"] - warm_up)
    assert report["verification"]["unverified"] == 0


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": ((), {}),
    "dense, attention": ("attn", {}),
    "dense, one further token": ((), {"mtp_num_layers": 1, "calculate_per_token_loss": True}),
    "dense, no rotary tables": ((), {"position": "learned_absolute"}),
    "experts": (("attn", "moe_router"), {"kinds": "EE"}),
    "experts, attention": ("attn", {"kinds": "EE", **moe_rig.CASES["sigmoid, bias, groups"]}),
    "experts that drop and pad": (("attn", "moe"), {"kinds": "EE", **moe_rig.CASES["drop and pad"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_bits(case: str) -> None:
    scopes, changes = CASES[case]
    graphed = compare(rig.steps_of(13 if rig.ON_GPU else 3), scopes, **changes)
    assert_replayed(graphed.report, sites=LAYERS)
    for left in graphed.steps:
        of_layers = {name: grad for name, grad in left.grads.items() if "eh_proj.weight" in name}
        assert len(of_layers) == changes.get("mtp_num_layers", 2)
        assert all(grad.any() for grad in of_layers.values())


@pytest.mark.parametrize("kinds", ["--", "EE"])
def test_masks_of_the_users(kinds: str) -> None:
    """0.19 hands them to prediction, 0.16 does not; rows as they were given in either."""
    graphed = compare(rig.steps_of(3, masks=True), "attn", kinds=kinds)
    assert_replayed(graphed.report, sites=LAYERS)


FULL = rig.Micro(lengths=(20, 14, 30), seed=3)
GIVEN: dict[str, rig.Micro] = {
    "as many rows as the capacity": FULL,
    "fewer rows": rig.Micro(lengths=(9, 20), seed=5),
    "padded documents": rig.Micro(lengths=(20, 10, 22), padded=(24, 12, 28), seed=7),
}


@pytest.mark.parametrize("case", GIVEN)
def test_megatron_alone_leaves_the_same(case: str) -> None:
    """Where the canonical pack is the pack, to the bit; else layers multiply other numbers of rows.

    Bug: a table as long as the pack's rows, the capacity's, was taken for one of its rows.
    """
    micro = GIVEN[case]
    given = [[micro]] * 3
    alone = rig.train(None, given, PredictionTrainer)
    graphed = compare(given)
    assert graphed.report["replays"] == 2 * LAYERS
    for one, other in zip(alone.steps, graphed.steps, strict=True):
        if micro.physical == rig.CAPACITY.tokens:
            assert_same_bits(one, other)
        torch.testing.assert_close(one.losses, other.losses)
        torch.testing.assert_close(one.grads, other.grads, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(one.logged, other.logged)


def test_packs_that_fit_no_capacity_run_as_given() -> None:
    large = rig.Micro(lengths=(40, 40), seed=8)
    given = [[FULL, large]] * 3
    graphed = compare(given)
    assert graphed.report["replays"] == 2 * LAYERS
    assert graphed.report["eager"] == {"WARMING_UP": LAYERS, "TOO_MANY_TOKENS": 3 * LAYERS}


def test_where_no_layer_is_graphed_packs_run_as_given(install: rig.Install) -> None:
    """Rotary positions are ours there, too, where tails would raise."""
    install()
    trainer = PredictionTrainer("EE")
    micros = rig.steps_of(1, tails=False)[0]
    rig.step(trainer, micros, update=False)
    ours = rig.step(trainer, micros, update=False)
    report = rig.report_of(trainer)
    assert report["replays"] == 0
    assert report["eager"] == {"WARMING_UP": 3 * LAYERS, "SCOPE_UNSUPPORTED": 3 * LAYERS}
    megagraph.uninstall()
    assert_same_bits(ours, rig.step(trainer, micros, update=False))


def test_detached_and_repeated_layers_of_prediction() -> None:
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    options = {"mtp_detach_heads": True, "mtp_use_repeated_layer": True}
    if not names.issuperset(options):
        pytest.skip("this megatron-core has neither option")
    graphed = compare(rig.steps_of(3), **options)
    assert_replayed(graphed.report, sites=LAYERS)


@pytest.mark.parametrize("kind", ["low rank, YaRN", "plain, RoPE"])
def test_mla(kind: str) -> None:
    """Its layers in prediction make their own tables, for the pack as it was given."""
    mla = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    config = mla_rig.mla_config(kind)
    spec = megagraph.get_gpt_block_varlen_spec(
        transformer_config(mla_rig.OPTIONS, **config),
        normalization="RMSNorm",
        multi_latent_attention=True,
        qk_layernorm=config.get("qk_layernorm", False),
    )
    given = [[rig.Micro(lengths=(20, 14, 30), seed=1), rig.Micro(lengths=(9, 17), seed=2)]] * 3
    with mock.patch.object(mla, "HAVE_TE", isinstance(mla.TELinear, type)):
        graphed = compare(given, options=mla_rig.OPTIONS, spec=spec, **config)
    assert graphed.report["failures"] == [] and graphed.report["replays"] == 2 * 2 * LAYERS


def test_routers_that_record_do_so_in_prediction_as_well(install: rig.Install) -> None:
    """All of them see the rows that were given: the decoder's are shown these, the others have no more."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    install(cuda_graph_modules="attn")
    pair = rig.Pair(PredictionTrainer, kinds="EE", moe_enable_routing_replay=True)
    replays = [
        [module.router_replay for module in trainer.chunk.modules() if hasattr(module, "router_replay")]
        for trainer in pair.both
    ]
    assert [len(each) for each in replays] == [LAYERS + 2] * 2
    for replay in (*replays[0], *replays[1]):
        replay.set_router_replay_action(RouterReplayAction.RECORD)
    for micros in rig.steps_of(3):
        pair.step(*micros)
        one, other = ([replay.get_recorded_indices() for replay in each] for each in replays)
        assert {len(each) for each in one} == {micros[-1].physical}
        assert_same_bits(one, other)
    assert pair.report()["eager"] == {"WARMING_UP": 3 * LAYERS}


def test_a_hybrid_model_too(install: rig.Install) -> None:
    if seams.HYBRID_FORWARD.problem() is not None:
        pytest.skip("this megatron-core has no HybridModel")
    install()
    report = rig.Pair(HybridPredictionTrainer).train([FULL, *micros] for micros in rig.steps_of(4))
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 4 * 4}
    assert report["replays"] == 3 * 4 * 4


# -- what is refused -------------------------------------------------------------------------------


def test_sequence_parallelism_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PredictionTrainer().chunk
    assert refusal_of(model, None) is None
    monkeypatch.setattr(model.config, "sequence_parallel", True)
    refusal = refusal_of(model, None)
    assert refusal is not None and refusal.reason is EagerReason.SCOPE_UNSUPPORTED
    name = "multi-token prediction with sequence parallelism (sequence_parallel=True)"
    assert refusal.sentence == f"{name} is not supported yet"


def test_a_forward_of_a_hosts_own_is_refused_by_name(install: rig.Install) -> None:
    class OwnPrediction(MultiTokenPredictionBlock):  # type: ignore[misc]  # megatron-core has no types
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            """Could not be handed the pack as it was given, unless it calls Megatron's."""
            found: Tensor = super().forward(*args, **kwargs)
            return found

    install()
    trainer = PredictionTrainer()
    trainer.chunk.mtp.__class__ = OwnPrediction
    micros = rig.steps_of(1, tails=False)[0]
    ours = [rig.step(trainer, micros, update=False) for _ in range(3)]
    report = rig.report_of(trainer)
    assert report["eager"] == {"SCOPE_UNSUPPORTED": 3 * 3 * LAYERS}
    name = "multi-token prediction by a forward of OwnPrediction's own"
    assert report["failures"] == [
        f"GPTModel stays eager (SCOPE_UNSUPPORTED): {name} is not supported yet".replace(
            "OwnPrediction", OwnPrediction.__qualname__
        )
    ]
    megagraph.uninstall()
    for left in ours:
        assert_same_bits(left, rig.step(trainer, micros, update=False))
