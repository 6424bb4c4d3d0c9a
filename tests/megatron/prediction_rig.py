# SPDX-License-Identifier: Apache-2.0
"""Models with multi-token prediction for the tests, and what their layers and losses leave."""

import dataclasses
from typing import Any

from megatron_rig import OPTIONS, HybridTrainer
from moe_rig import ExpertTrainer
from torch import Tensor, nn

import megagraph
from megagraph.demo.trainer import ModelOptions
from megagraph.modules import Norm

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
        self, kinds: str = "--", *, position: str = "rope", options: ModelOptions = OPTIONS, **changes: Any
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


class HybridPredictionTrainer(HybridTrainer):
    """The same around a HybridModel, of which `/` begins the layers of one further token."""

    def __init__(self) -> None:
        super().__init__(pattern="*-*-/*-/*-", spec=hybrid_spec(), config={"mtp_num_layers": 2})

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        config.num_layers = 4  # of the pattern's first part
        return super().make_chunk(config, spec)
