# SPDX-License-Identifier: Apache-2.0
"""Models and blocks as hosts of Megatron write them: forwards of their own, on a class or on an instance."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron_rig import ONE, OPTIONS, OTHER, TWO, Micro, Pair
from torch import Tensor, nn

from megagraph.demo.trainer import Trainer, in_half_precision, transformer_config
from megagraph.megatron.specs import get_gpt_block_varlen_spec

# As many rows and documents as the capacity: the backward of attention sums by their number.
FULL = Micro(lengths=(40, 9, 7, 5, 3), seed=3)
TABLES = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset")


class OwnModel(GPTModel):  # type: ignore[misc]  # megatron-core has no types
    """Calls its decoder itself, as ms-swift's GPTModel does with fused RoPE."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: Any = None,
        loss_mask: Tensor | None = None,
    ) -> Any:
        """Megatron's arguments."""
        del inference_context, runtime_gather_output, inference_params, extra_block_kwargs
        return self.run(input_ids, position_ids, attention_mask, decoder_input, labels, packed_seq_params)

    def run(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None,
        labels: Tensor | None,
        packed_seq_params: Any,
    ) -> Any:
        """From the tokens to the losses, or logits."""
        hidden, tables = self.tables(input_ids, position_ids, decoder_input, packed_seq_params)
        out = self.decoder(
            hidden_states=hidden, attention_mask=attention_mask, packed_seq_params=packed_seq_params, **tables
        )
        return self._postprocess(
            hidden_states=out,
            input_ids=input_ids,
            position_ids=position_ids,
            labels=labels,
            rotary_pos_emb=tables["rotary_pos_emb"],
            rotary_pos_cos=None,
            rotary_pos_sin=None,
            mtp_in_postprocess=False,
            decoder_input=hidden,
            attention_mask=attention_mask,
            packed_seq_params=packed_seq_params,
        )

    def tables(self, input_ids: Any, position_ids: Any, given: Any, pack: Any) -> Any:
        """The hidden states, and the rotary tables by name."""
        hidden, *tables = self._preprocess(
            input_ids=input_ids, position_ids=position_ids, decoder_input=given, packed_seq_params=pack
        )
        return hidden, dict(zip(TABLES, tables, strict=False))


class PerTokenModel(OwnModel):
    """Hands a row of the rotary table to each token, as ms-swift does without fused RoPE."""

    def tables(self, input_ids: Any, position_ids: Any, given: Any, pack: Any) -> Any:
        hidden, tables = super().tables(input_ids, position_ids, given, pack)
        tables["rotary_pos_emb"] = tables["rotary_pos_emb"][position_ids[0]]
        return hidden, tables


class OwnBlock(TransformerBlock):  # type: ignore[misc]
    """Runs its layers itself; what `between` does there is a subclass's."""

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Tensor | None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        sequence_len_offset: Tensor | None = None,
        *,
        features: tuple[Tensor, Tensor] | None = None,
        **further: Any,
    ) -> Any:
        for index, layer in enumerate(self.layers):
            assert layer.layer_number == index + 1
            hidden_states, context = layer(
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                context=context,
                rotary_pos_emb=rotary_pos_emb,
                rotary_pos_cos=rotary_pos_cos,
                rotary_pos_sin=rotary_pos_sin,
                attention_bias=attention_bias,
                inference_context=inference_context,
                packed_seq_params=packed_seq_params,
                sequence_len_offset=sequence_len_offset,
                **self.further_arguments(index),
            )
            hidden_states = self.between(index, hidden_states, features)
        return self.final_layernorm(hidden_states)

    def further_arguments(self, index: int) -> dict[str, Any]:
        """Further arguments of one layer."""
        return {}

    def between(self, index: int, hidden_states: Tensor, features: tuple[Tensor, Tensor] | None) -> Tensor:
        """What becomes of a layer's output."""
        return hidden_states


def host_model(
    model_class: type, block_class: type | None, options: Any, config: Any, spec: Any
) -> nn.Module:
    """A model of these classes; of Megatron's block where no other is given."""
    spec = get_gpt_block_varlen_spec(config) if spec is None else spec
    model: nn.Module = model_class(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=options.vocab,
        max_sequence_length=options.max_tokens,
        position_embedding_type="rope",
    )
    if block_class is not None:
        model.decoder = block_class(config=config, spec=spec)
    return model


def bare_model(model_class: type, block_class: type | None = None) -> tuple[nn.Module, nn.Module]:
    """A model that no DDP has seen, in evaluation mode, and what is called in its place."""
    model = host_model(model_class, block_class, OPTIONS, transformer_config(OPTIONS), None)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return model, in_half_precision(model)


class HostTrainer(Trainer):
    """The reference loop around a host's model."""

    def __init__(
        self,
        model_class: type = GPTModel,  # the model's
        block_class: type | None = None,  # of its layers' block; Megatron's own by default
        prepare: Callable[[Any], None] | None = None,  # called with the model before anything wraps it
        options: Any = OPTIONS,  # of the model
        **further: Any,  # of `Trainer`
    ) -> None:
        self._classes, self._prepare = (model_class, block_class), prepare
        super().__init__(options, **further)

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        model = host_model(*self._classes, self.options, config, spec)
        if self._prepare is not None:
            self._prepare(model)
        return model


def host_pair(model_class: type, block_class: type | None = None) -> Pair:
    """Two models of these classes and of the same weights."""
    return Pair(HostTrainer, model_class=model_class, block_class=block_class)


def trained(pair: Pair, times: int = 5) -> dict[str, Any]:
    """Steps whose packs change; evaluations too. The report of the graphed one."""
    for index in range(times):
        pair.step(ONE if index % 2 else TWO, OTHER, FULL)
        pair.evaluate(TWO)
    return pair.report()


def only(report: dict[str, Any], *reasons: str) -> bool:
    """Whether it replayed, and ran eager for these reasons alone."""
    return report["replays"] > 0 and {*report["eager"]} <= {*reasons}
