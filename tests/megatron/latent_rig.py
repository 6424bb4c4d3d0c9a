# SPDX-License-Identifier: Apache-2.0
"""Models with multi-latent attention for the tests: dense GPTModels and HybridModels of every kind."""

import dataclasses
import importlib
from typing import Any
from unittest import mock

import megatron_rig as rig
from torch import nn

import megagraph
from megagraph.demo.trainer import ModelOptions, Trainer, transformer_config

OPTIONS = dataclasses.replace(rig.OPTIONS, heads=4)
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "add_bias_linear": False,
}
# With and without a low rank of the queries, with both kinds of tables; one YaRN that scales them.
KINDS: dict[str, dict[str, Any]] = {
    "low rank, YaRN": {
        "q_lora_rank": 24,
        "rope_type": "yarn",
        "original_max_position_embeddings": 16,
        "rotary_scaling_factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "qk_layernorm": True,
    },
    "low rank, RoPE": {"q_lora_rank": 24, "rope_type": "rope"},
    "plain, YaRN": {"q_lora_rank": None, "rope_type": "yarn", "rotary_scaling_factor": 2.0},
    "plain, RoPE": {"q_lora_rank": None, "rope_type": "rope"},
}


def latent_config(kind: str, **changes: Any) -> dict[str, Any]:
    """Further fields of Megatron's config of one of `KINDS`."""
    return {**LATENT, **KINDS[kind], **changes}


def latent_spec(config: dict[str, Any], options: ModelOptions = OPTIONS) -> Any:
    """Of a whole block, as such a config asks for it."""
    return megagraph.get_gpt_block_varlen_spec(
        transformer_config(options, **config),
        multi_latent_attention=True,
        qk_layernorm=config.get("qk_layernorm", False),
        normalization="RMSNorm",
    )


class LatentTrainer(Trainer):
    """The reference loop around a model of one of `KINDS`.

    Args:
        kind: of its attention.
        config: further fields of Megatron's config.
        spec: of its layers; ours by default.
        further: for `Trainer`.
    """

    def __init__(
        self, *, kind: str, config: dict[str, Any] | None = None, spec: Any = None, **further: Any
    ) -> None:
        config = latent_config(kind, **(config or {}))
        spec = latent_spec(config) if spec is None else spec
        super().__init__(OPTIONS, config=config, spec=spec, **further)

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        with built_without_extension():
            return super().make_chunk(config, spec)


def built_without_extension() -> Any:
    """While a model is made. Release 0.16.1 takes Transformer Engine for there, and asks for its classes."""
    latent = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    return mock.patch.object(latent, "HAVE_TE", isinstance(latent.TELinear, type))


def latent_pair(**given: Any) -> rig.Pair:
    """Two of one kind and of the same weights."""
    pair = rig.Pair.__new__(rig.Pair)
    pair.eager, pair.graphed = LatentTrainer(**given), LatentTrainer(**given)
    return pair
