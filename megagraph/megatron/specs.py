# SPDX-License-Identifier: Apache-2.0
"""Megatron's local specs with a core attention that takes packs, and a norm that takes sequence parallel.

Beside them, experts that never wait for the device, for these specs and for those of Transformer Engine.

None of them needs Transformer Engine or the plugin: models are built before or after `install()`.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Collection
from typing import Any

from megagraph.megatron.grouped_experts import grouped_experts, grouped_layer
from megagraph.megatron.seams import hybrid_seams
from megagraph.modules import Norm, VarlenAttention

__all__ = [
    *("get_gpt_block_varlen_spec", "get_gpt_layer_varlen_spec", "get_hybrid_stack_varlen_spec"),
    "with_grouped_experts",
]

_ATTENTION_PARTS = ("input_layernorm", "self_attention", "self_attn_bda")
_MLP_PARTS = ("pre_mlp_layernorm", "mlp", "mlp_bda")
_OF_CONFIG = ("moe_grouped_gemm", "qk_layernorm", "multi_latent_attention")  # under the names of arguments


def get_gpt_layer_varlen_spec(*args: Any, **kwargs: Any) -> Any:
    """`get_gpt_layer_local_spec(...)` for packs: `VarlenAttention`, and `Norm` for core's plain norm.

    Takes what Megatron's function takes. If Apex is installed its norm stays, and L2 norms of queries
    and keys stay as well. The final norm of the block is Megatron's choice, which refuses sequence
    parallelism without Transformer Engine and Apex: see `get_gpt_block_varlen_spec()`.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    spec = get_gpt_layer_local_spec(*args, **kwargs)
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = VarlenAttention
    for submodules in (spec.submodules, attention):
        for name, module in [*vars(submodules).items()]:
            if module is WrappedTorchNorm:
                setattr(submodules, name, Norm)
    return spec


def get_gpt_block_varlen_spec(
    config: Any, *, vp_stage: int | None = None, pp_rank: int | None = None, **kwargs: Any
) -> Any:
    """The spec of a whole block for `GPTModel(transformer_layer_spec=...)`, its final norm included.

    The final norm is that of the layers, so that the block takes sequence parallelism, also where
    Transformer Engine is installed and Megatron would choose its norm.

    Args:
        config: Megatron's `TransformerConfig`; how many layers, and which of them have experts.
        vp_stage: virtual pipeline stage.
        pp_rank: pipeline rank; by default this process's.
        kwargs: for `get_gpt_layer_varlen_spec()`, in place of what `config` says.

    Raises:
        TypeError: if `config` is none. ValueError: if its `moe_layer_freq` lists other layers.
    """
    from megatron.core.transformer import transformer_block, transformer_layer

    if not hasattr(config, "num_layers"):
        raise TypeError(f"get_gpt_block_varlen_spec: expected Megatron's TransformerConfig, got {config!r}")
    own = {it: getattr(config, it, None) for it in _OF_CONFIG} | kwargs
    layers = [get_gpt_layer_varlen_spec(**{"num_experts": it} | own) for it in (None, config.num_moe_experts)]
    every = config.moe_layer_freq
    pattern = every if isinstance(every, list) else [at % every == 0 for at in range(config.num_layers)]
    if len(pattern) != config.num_layers:
        raise ValueError(f"moe_layer_freq: expected {config.num_layers} entries, one a layer, got {every}")
    first = transformer_layer.get_transformer_layer_offset(config, vp_stage, pp_rank)
    end = first + transformer_block.get_num_layers_to_build(config, vp_stage, pp_rank)
    return transformer_block.TransformerBlockSubmodules(
        layer_specs=[layers[it] for it in pattern[first:end]], layer_norm=layers[0].submodules.input_layernorm
    )


def with_grouped_experts(spec: Any) -> Any:
    """A copy of a spec in which every `MoELayer` runs its experts in two grouped products, without a wait.

    Such a layer is dropless, and its experts lie on one rank. The plugin graphs it whole: with scope `moe`,
    or with the rest of its layer where no scope is named.

    Args:
        spec: of a layer, a block or a stack, of core's layers or Transformer Engine's, however it names its
            experts. megatron-core 0.16 builds the layer with the process groups that it keeps itself.

    Raises:
        ValueError: if there is no `MoELayer` in it.
    """
    found = _grouped(spec)
    if found is spec:
        raise ValueError("with_grouped_experts: expected a spec with a MoELayer, got one without")
    return found


def _grouped(spec: Any) -> Any:
    """The very object, where it holds no experts."""
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

    if spec is MoELayer:
        return grouped_layer()
    if isinstance(spec, MoESubmodules):
        return dataclasses.replace(spec, experts=grouped_experts())
    if isinstance(spec, functools.partial):
        func, options = _grouped(spec.func), {name: _grouped(value) for name, value in spec.keywords.items()}
        is_same = func is spec.func and all(value is spec.keywords[name] for name, value in options.items())
        return spec if is_same else functools.partial(func, *spec.args, **options)
    if isinstance(spec, list):
        items = [_grouped(item) for item in spec]
        return spec if all(map(lambda one, other: one is other, items, spec)) else items
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init}
    changed = {name: new for name, old in fields.items() if (new := _grouped(old)) is not old}
    return dataclasses.replace(spec, **changed) if changed else spec


def get_hybrid_stack_varlen_spec(*args: Any, **kwargs: Any) -> Any:
    """A hybrid stack's spec: layers of Mamba ('M'), attention ('*', '+'), MLP ('-'), experts ('E').

    It is the `hybrid_stack_spec` of `HybridModel`, and before 0.18 the `mamba_stack_spec` of `MambaModel`.
    Attention and MLPs are the halves of `get_gpt_layer_varlen_spec(...)`, which takes the arguments, but that
    the pattern says whether attention is MLA ('+', since 0.18), and which layers have experts, where the
    arguments ask for any. Mamba layers have Megatron's mixer, which needs mamba-ssm and causal-conv1d where
    it is built, between linear layers of core. Other layers have no spec here. Megatron's stack names
    Transformer Engine's norm as its final one, so the spec's stack is a subclass that builds `Norm` there.

    Raises:
        ImportError: if megatron-core has no such models.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    if (hybrid := hybrid_seams()) is None:
        raise ImportError("megatron-core has no hybrid models: neither HybridModel nor MambaModel")
    stack = hybrid[1].owner()
    bound = inspect.signature(get_gpt_layer_local_spec).bind(*args, **kwargs).arguments
    given = {**bound.pop("kwargs", {}), **bound}
    layer = get_gpt_layer_varlen_spec(**{**given, "num_experts": None}).submodules
    # How Megatron's distributed checkpoints call norms that Transformer Engine fuses into a linear layer.
    input_norm = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    mlp_norm = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    attention = _of_parts(layer, _ATTENTION_PARTS, sharded_state_dict_keys_map=input_norm)
    mlp = _of_parts(layer, _MLP_PARTS, sharded_state_dict_keys_map=mlp_norm)
    projections = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=layer.input_layernorm,
        mixer=ModuleSpec(module=MambaMixer, submodules=projections),
        mamba_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
    )
    layers: dict[str, Any] = {
        "mamba_layer": ModuleSpec(module=MambaLayer, submodules=mamba),
        "attention_layer": attention,
        "mlp_layer": dataclasses.replace(mlp, module=MLPLayer),
    }
    submodules: Any = importlib.import_module(stack.__module__).MambaStackSubmodules
    if "mla_layer" in inspect.signature(submodules).parameters:
        # Megatron has no multi-latent attention with such norms.
        of_mla = {**given, "num_experts": None, "multi_latent_attention": True, "qk_l2_norm": False}
        layers["mla_layer"] = _of_parts(get_gpt_layer_varlen_spec(**of_mla).submodules, _ATTENTION_PARTS)
    if given.get("num_experts"):
        layers["moe_layer"] = _of_parts(get_gpt_layer_varlen_spec(**given).submodules, _MLP_PARTS)
    return ModuleSpec(module=_with_norm(stack), submodules=submodules(**layers))


def _of_parts(submodules: Any, names: Collection[str], **further: Any) -> Any:
    """The spec of a layer that has some parts of another one, and nothing beside."""
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    parts = {name: getattr(submodules, name) for name in names}
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(**parts, **further))


@functools.cache
def _with_norm(stack: Any) -> type[Any]:
    """Megatron's stack with another final norm; a class of its own, so nothing is patched."""

    class VarlenHybridStack(stack):  # type: ignore[misc]  # of an untyped package
        """Builds `Norm` where Megatron's stack builds Transformer Engine's."""

        def __init__(
            self, config: Any, submodules: Any, *, post_layer_norm: bool = True, **kwargs: Any
        ) -> None:
            super().__init__(config, submodules, post_layer_norm=False, **kwargs)
            self.post_layer_norm = post_layer_norm
            if self.post_process and post_layer_norm:
                self.final_norm = Norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    return VarlenHybridStack
