# SPDX-License-Identifier: Apache-2.0
"""Models whose packs ranks share, of each kind of layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron_rig as rig
import moe_rig
from host_rig import AdaptedLinear, adapt
from mla_rig import OPTIONS, MlaTrainer, mla_config
from moe_rig import ExpertTrainer
from streams import seed_streams
from torch import nn

from megagraph.demo.trainer import Trainer
from megagraph.megatron.specs import get_gpt_block_varlen_spec

# Of experts as larger models have them.
MANY_KINDS = {
    "moe_shared_expert_intermediate_size": 48,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
ROUTERS = {"cuda_graph_modules": ("attn", "moe_router")}
EMPTY_DUMMY = {"tail": "empty-dummy", "cuda_graph_max_packed_seqs": (rig.CAPACITY.num_seqs + 1,)}
# Of engines: arguments of `trainer()`, options of the plugin, fields of Megatron's config.
OF_ENGINE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}, {}),
    "fused RoPE": ({}, {}, {"apply_rope_fusion": True}),
    "MLA": ({"mla": "low rank, YaRN"}, {}, {}),
    "experts": ({"experts": True}, ROUTERS, {}),
    "MLA experts": ({"mla": "low rank, YaRN", "experts": True}, ROUTERS, MANY_KINDS),
}
_FOR_ENGINE = {"normalization": "RMSNorm", "moe_grouped_gemm": True, "moe_ffn_hidden_size": 64}


def trainer(
    *,
    mla: str | None = None,  # of `mla_rig.KINDS`, for multi-latent attention
    experts: bool = False,  # in the first layer
    grouped: bool = False,  # these never wait for the device
    engine: bool = False,  # of Transformer Engine's modules
    adapters: bool = False,  # in each MLP, and all else frozen
    config: dict[str, Any] | None = None,  # further fields of Megatron's config
) -> Trainer:
    """A model of two layers."""
    given = config or {}
    if adapters:
        return rig.ModelTrainer(prepare=adapt, config=given)
    if engine:
        seed_streams()
    if not experts:
        if mla is not None:
            return MlaTrainer(kind=mla, config=given, transformer_engine=engine)
        qk_layernorm = given.get("qk_layernorm", False)
        if engine:
            spec = rig.te_layer_spec(qk_layernorm=qk_layernorm)
            return Trainer(rig.OPTIONS, config={"normalization": "RMSNorm", **given}, spec=spec)
        spec = get_gpt_block_varlen_spec(
            rig.transformer_config(rig.OPTIONS, **given), qk_layernorm=qk_layernorm
        )
        return Trainer(rig.OPTIONS, config=given, spec=spec)
    given = {**(_FOR_ENGINE if engine else {}), **given}
    if mla is None:
        spec = moe_rig.block_spec("E-", engine=engine)
        return ExpertTrainer("E-", spec=spec, is_grouped=grouped, **given)
    return mla_experts(mla, engine=engine, **given)


@contextmanager
def without_adapters(chunk: nn.Module) -> Iterator[None]:
    """Around passes of a model with its adapters, if any, switched off, as hosts do it for a reference."""
    adapted = [module for module in chunk.modules() if isinstance(module, AdaptedLinear)]
    for module in adapted:
        module._adapter_enabled = False
    yield
    for module in adapted:
        module._adapter_enabled = True


def mla_experts(kind: str, *, engine: bool = False, **changes: Any) -> ExpertTrainer:
    """A layer with experts and a dense one, both with multi-latent attention."""
    config = {**mla_config(kind), **changes}
    attention = {"multi_latent_attention": True, "qk_layernorm": config.get("qk_layernorm", False)}
    attention |= {} if engine else {"normalization": "RMSNorm"}
    spec = moe_rig.block_spec("E-", engine=engine, **attention)
    return ExpertTrainer("E-", spec=spec, options=OPTIONS, **config)
