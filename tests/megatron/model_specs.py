# SPDX-License-Identifier: Apache-2.0
"""Specs of the layers that tests train, and Megatron's config of multi-latent attention, by a few words."""

import importlib
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import megagraph
from megagraph.megatron.specs import get_gpt_layer_varlen_spec

EXPERTS = 4
MLA: dict[str, Any] = {
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "add_bias_linear": False,
    "init_method_std": 0.2,  # so that positions matter
}
# With and without a low rank of the queries, with both kinds of tables. The first one has heads of DeepSeek's
# shape, 192 and 128, and its YaRN scales its tables.
KINDS: dict[str, dict[str, Any]] = {
    "low rank, YaRN": {
        "q_lora_rank": 24,
        "rope_type": "yarn",
        "original_max_position_embeddings": 16,
        "rotary_scaling_factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "qk_layernorm": True,
        "kv_lora_rank": 64,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
    },
    "low rank, RoPE": {"q_lora_rank": 24, "rope_type": "rope"},
    "plain, YaRN": {"q_lora_rank": None, "rope_type": "yarn", "rotary_scaling_factor": 2.0},
    "plain, RoPE": {"q_lora_rank": None, "rope_type": "rope"},
}


def mla_config(kind: str, **changes: Any) -> dict[str, Any]:
    return {**MLA, **KINDS[kind], **changes}


def asks_for_no_engine() -> AbstractContextManager[object]:
    """Without Transformer Engine, multi-latent attention of 0.16.1 takes it for there, and asks for it."""
    mla = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    return mock.patch.object(mla, "HAVE_TE", isinstance(mla.TELinear, type))


def spec_of(config: Any, kinds: str = "", pattern: str = "", *, engine: bool = False, **given: Any) -> Any:
    """Of layers of these kinds, or of such a hybrid pattern, as Megatron's config asks for them."""
    given["qk_layernorm"] = config.qk_layernorm
    if config.multi_latent_attention and not engine:
        given["normalization"] = "RMSNorm"
    if pattern:
        return megagraph.get_hybrid_stack_varlen_spec(**given)
    if config.multi_latent_attention:
        given["multi_latent_attention"] = True
    if kinds:
        of_experts = {"num_experts": config.num_moe_experts, "is_grouped": config.moe_grouped_gemm}
        return block_spec(kinds, engine=engine, **of_experts, **given)
    return te_layer_spec(**given) if engine else megagraph.get_gpt_block_varlen_spec(config, **given)


def te_layer_spec(**given: Any) -> Any:
    """Megatron's layer of Transformer Engine's modules; takes what Megatron's function takes."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec(**given)


def block_spec(
    kinds: str,  # `E` for a layer of experts, `-` for a dense one
    *,
    engine: bool = False,  # of Transformer Engine's modules
    is_grouped: bool | None = None,
    num_experts: int | None = EXPERTS,  # of each layer that has any
    **attention: Any,  # further arguments of each layer's spec
) -> Any:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    make = te_layer_spec if engine else get_gpt_layer_varlen_spec
    experts = {"num_experts": num_experts, "moe_grouped_gemm": engine if is_grouped is None else is_grouped}
    layers = {"E": make(**experts, **attention), "-": make(**attention)}
    if engine:
        from megatron.core.extensions.transformer_engine import TENorm as Norm
    else:
        Norm = layers["-"].submodules.input_layernorm
    return TransformerBlockSubmodules(layer_specs=[layers[kind] for kind in kinds], layer_norm=Norm)
