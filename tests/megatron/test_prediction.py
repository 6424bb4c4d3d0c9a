# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: its layers run eager on packs as they were given, behind graphed layers."""

import dataclasses
from typing import Any

import megatron_rig as rig
import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron.core.transformer.spec_utils import ModuleSpec
from model_specs import spec_of
from moe_rig import ExpertTrainer
from same_bits import assert_same_bits

import megagraph
from megagraph.modules import Norm

pytestmark = [pytest.mark.both, pytest.mark.usefixtures("experts")]

DENSE: dict[str, Any] = {  # undoes what moe_rig's base says of experts
    "num_moe_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
}
LAYERS = rig.LAYERS
HAS_DETACHED = hasattr(TransformerConfig, "mtp_detach_heads")
FULL = rig.Micro(lengths=(20, 14, 30), seed=3)
GIVEN: dict[str, rig.Micro] = {
    "as many rows as the capacity": FULL,
    "fewer rows": rig.Micro(lengths=(9, 20), seed=5),
    "padded documents": rig.Micro(lengths=(20, 10, 22), padded=(24, 12, 28), seed=7),
}


def prediction_spec(config: Any, layers: Any) -> Any:
    """Of a block of multi-token prediction, whose layers are like the last one of the decoder."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)
    for spec in block.layer_specs:
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(spec.submodules, name, layers.layer_norm)
    return block


def prediction(kinds: str = "--", *, position: str = "rope", **changes: Any) -> ExpertTrainer:
    """A GPTModel that predicts two further tokens."""

    def arguments(config: Any) -> dict[str, Any]:
        block = prediction_spec(config, spec_of(config, kinds))
        return {"position_embedding_type": position, "mtp_block_spec": block}

    further = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5, **({} if "E" in kinds else DENSE)}
    return ExpertTrainer(kinds, arguments=arguments, **{**further, **changes})


def hybrid_spec() -> Any:
    """Of a hybrid stack, with a block of prediction whose layers its pattern names."""
    from megatron.core.transformer import multi_token_prediction as prediction

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


def hybrid_prediction() -> rig.ModelTrainer:
    """The same of a HybridModel, of which `/` begins the layers of one further token."""
    return rig.ModelTrainer(pattern="*-*-/*-/*-", spec=hybrid_spec(), mtp_num_layers=2)


@pytest.mark.parametrize("case", GIVEN)
def test_megatron_alone_leaves_the_same(case: str) -> None:
    """Where the canonical pack is the pack, to the bit; else layers multiply other numbers of rows. Bug: a
    table as long as the pack's rows, the capacity's, was taken for one of its rows."""
    micro = GIVEN[case]
    given = [[micro]] * 3
    alone = rig.train(None, given, prediction)
    graphed = rig.compare_runs(given, prediction)
    assert graphed.report["replays"] == 2 * LAYERS
    for one, other in zip(alone.steps, graphed.steps, strict=True):
        if micro.physical == rig.CAPACITY.tokens:
            assert_same_bits(one, other)
        torch.testing.assert_close(one.losses, other.losses)
        torch.testing.assert_close(one.grads, other.grads, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(one.logged, other.logged)


def test_packs_that_fit_no_capacity_run_as_given() -> None:
    graphed = rig.compare_runs([[FULL, rig.Micro(lengths=(40, 40), seed=8)]] * 3, prediction)
    rig.ran(graphed.report, 2 * LAYERS, WARMING_UP=LAYERS, TOO_MANY_TOKENS=3 * LAYERS)


def test_where_no_layer_is_graphed_packs_run_as_given(install: rig.Install) -> None:
    """Rotary positions are ours there, too, where tails would raise."""
    install()
    trainer = prediction()
    for layer in trainer.chunk.decoder.layers:
        layer.register_forward_hook(lambda *_: None)
    micros = rig.steps_of(1, tails=False)[0]
    rig.step(trainer, micros, update=False)
    ours = rig.step(trainer, micros, update=False)
    rig.ran(rig.report_of(trainer), 0, failures=2, WARMING_UP=3 * LAYERS, FOREIGN_HOOK=3 * LAYERS)
    megagraph.uninstall()
    assert_same_bits(ours, rig.step(trainer, micros, update=False))


def test_routers_that_record_do_so_in_prediction_as_well() -> None:
    """All of them see the rows that were given: the decoder's are shown these, the others have no more."""
    pair = rig.Pair(
        prediction, kinds="EE", moe_enable_routing_replay=True, plugin={"cuda_graph_modules": "attn"}
    )
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
