# SPDX-License-Identifier: Apache-2.0
"""Models with multi-latent attention for the tests: dense GPTModels and HybridModels of several kinds."""

import dataclasses
from typing import Any

import megatron_rig as rig
from streams import seed_streams

import megagraph
from megagraph.demo.trainer import transformer_config

OPTIONS = dataclasses.replace(rig.OPTIONS, heads=4)
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


def mla_spec(config: dict[str, Any]) -> Any:
    """Of a whole block, as such a config asks for it."""
    return rig.varlen_spec(transformer_config(OPTIONS, **config))


class MlaTrainer(rig.ModelTrainer):
    """A GPTModel, or a HybridModel of such a pattern."""

    def __init__(
        self,
        *,
        kind: str,  # of its attention
        pattern: str = "",
        config: dict[str, Any] | None = None,  # further fields of Megatron's config
        transformer_engine: bool = False,  # layers of its modules
        spec: Any = None,
        **further: Any,
    ) -> None:
        if transformer_engine or spec is not None:
            seed_streams()
        config = mla_config(kind, **(config or {}))
        given = {"qk_layernorm": config.get("qk_layernorm", False)}
        if transformer_engine:
            spec = rig.te_layer_spec(multi_latent_attention=True, **given)
        elif pattern and spec is None:
            spec = megagraph.get_hybrid_stack_varlen_spec(normalization="RMSNorm", **given)
        options = rig.OPTIONS if pattern else OPTIONS
        super().__init__(options=options, pattern=pattern, config=config, spec=spec, **further)
