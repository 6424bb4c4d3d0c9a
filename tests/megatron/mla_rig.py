# SPDX-License-Identifier: Apache-2.0
"""Models with multi-latent attention for the tests: dense GPTModels and HybridModels of several kinds."""

import contextlib
import dataclasses
import functools
import importlib
from typing import Any
from unittest import mock

import megatron_rig as rig
import torch
from streams import seed_streams
from torch import Tensor, nn

import megagraph
from megagraph.demo.trainer import Trainer, transformer_config

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
    """Further fields of Megatron's config of one of `KINDS`."""
    return {**MLA, **KINDS[kind], **changes}


def _spec(config: dict[str, Any], *, transformer_engine: bool) -> Any:
    """Of a layer or a whole block, as such a config asks for it."""
    given = {"multi_latent_attention": True, "qk_layernorm": config.get("qk_layernorm", False)}
    if transformer_engine:
        return rig.te_layer_spec(**given)
    transformer = transformer_config(OPTIONS, **config)
    return megagraph.get_gpt_block_varlen_spec(transformer, normalization="RMSNorm", **given)


def asks_for_no_engine() -> contextlib.AbstractContextManager[object]:
    """Without Transformer Engine, release 0.16.1 takes it for there, and asks for its classes."""
    mla = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    return mock.patch.object(mla, "HAVE_TE", isinstance(mla.TELinear, type))


class MlaTrainer(Trainer):
    """The reference loop around a GPTModel."""

    def __init__(
        self,
        *,
        kind: str,  # of its attention
        config: dict[str, Any] | None = None,  # further fields of Megatron's config
        transformer_engine: bool = False,  # layers of its modules
        **further: Any,  # for `Trainer`
    ) -> None:
        if transformer_engine:
            seed_streams()
        config = mla_config(kind, **(config or {}))
        spec = _spec(config, transformer_engine=transformer_engine)
        super().__init__(OPTIONS, config=config, spec=spec, **further)

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        with asks_for_no_engine():
            return super().make_chunk(config, spec)


class MlaHybridTrainer(rig.HybridTrainer):
    """The reference loop around a HybridModel."""

    def __init__(self, *, kind: str, spec: Any = None) -> None:
        config = mla_config(kind)
        if spec is None:
            qk_layernorm = config.get("qk_layernorm", False)
            spec = megagraph.get_hybrid_stack_varlen_spec(qk_layernorm=qk_layernorm, normalization="RMSNorm")
        else:
            seed_streams()
        super().__init__(pattern="+-+-", spec=spec, config=config)


class ScatteredMla(MlaTrainer):
    """A model whose attention finds unrelated angles in its tables, so that a wrong row is no matter of
    roundings: rotation is relative."""

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        model: Any = super().make_chunk(config, spec)
        generator = torch.Generator().manual_seed(3)
        angles = torch.randn(64, 1, 1, config.qk_pos_emb_head_dim, generator=generator) * 10

        @functools.cache
        def table(rows: int, **_given: Any) -> Tensor:
            return angles[:rows].to(self.device)

        for layer in model.decoder.layers:
            layer.self_attention.rotary_pos_emb.forward = table
        return model  # type: ignore[no-any-return]
