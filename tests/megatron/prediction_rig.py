# SPDX-License-Identifier: Apache-2.0
"""Models with multi-token prediction for the tests, and what their layers and losses leave."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import moe_rig
from megatron_rig import OPTIONS, HybridTrainer, Micro, graph_config, report_of
from moe_rig import ExpertStep, ExpertTrainer, expert_step
from same_bits import assert_same_bits
from torch import Tensor, nn

import megagraph
from megagraph.config import GraphConfig
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
    """Of a block of multi-token prediction, whose layers are like the last one of the decoder.

    Args:
        config: Megatron's.
        layers: the spec of the decoder's block.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)
    for spec in block.layer_specs:
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(spec.submodules, name, layers.layer_norm)
    return block


class PredictionTrainer(ExpertTrainer):
    """The reference loop around a GPTModel that predicts further tokens.

    Args:
        kinds: of the decoder's layers: `E` of experts, `-` dense.
        position: how the model embeds positions.
        changes: of Megatron's config.
    """

    def __init__(
        self,
        kinds: str = "--",
        *,
        position: str = "rope",
        options: ModelOptions = OPTIONS,
        **changes: Any,
    ) -> None:
        self._position = position
        dense = {} if "E" in kinds else DENSE
        super().__init__(kinds, options=options, **{**PREDICTION, **dense, **changes})

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


@dataclass(kw_only=True)
class PredictionStep:
    """What one step left, and what Megatron logs of predicted tokens, by name."""

    left: ExpertStep
    logged: dict[str, Tensor]


@contextlib.contextmanager
def _logged() -> Iterator[dict[str, Tensor]]:
    """What Megatron has logged inside; its tracker is empty before and after."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    found: dict[str, Tensor] = {}
    tracker.clear()
    yield found
    found |= {name: value.clone() for name, value in tracker.items() if isinstance(value, Tensor)}
    tracker.clear()


def prediction_step(trainer: ExpertTrainer, micros: Sequence[Micro], **options: Any) -> PredictionStep:
    """One training step."""
    with _logged() as logged:
        left = expert_step(trainer, micros, **options)
    assert logged
    return PredictionStep(left=left, logged=logged)


@dataclass(kw_only=True)
class PredictionRun:
    """A whole run."""

    steps: list[PredictionStep]
    report: dict[str, Any] = field(compare=False)


def run(config: GraphConfig | None, steps: Sequence[Sequence[Micro]], **changes: Any) -> PredictionRun:
    """Trains a fresh model; the same arguments begin with the same weights.

    Args:
        config: installed for this run alone; None for Megatron alone.
        steps: the micro-batches of each.
        changes: for `PredictionTrainer`.
    """
    if config is not None:
        megagraph.install(config)
    try:
        moe_rig.forget_metrics()
        trainer = PredictionTrainer(**changes)
        found = [prediction_step(trainer, micros) for micros in steps]
        return PredictionRun(steps=found, report={} if config is None else report_of(trainer))
    finally:
        megagraph.uninstall()


def compare(
    given: Sequence[Sequence[Micro]], scopes: Any = (), **changes: Any
) -> tuple[PredictionRun, PredictionRun]:
    """Trains in mode `eager` and with graphs, with the same bits in each step. Returns both runs."""
    eager = run(graph_config(mode="eager"), given, **changes)
    graphed = run(graph_config(cuda_graph_modules=scopes), given, **changes)
    assert_same_bits(eager, graphed)
    return eager, graphed
