# SPDX-License-Identifier: Apache-2.0
"""Stands in for Transformer Engine on a machine without a GPU: layers of one rank, in torch's own ops. As far
as hosts build dense models of Megatron's specs for it. Says nothing of its kernels."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest import mock

import torch
from torch import nn

__version__ = "2.4.0"


def _module(name, **attributes):
    module = ModuleType(f"{__name__}.{name}")
    module.__spec__, module.__path__ = ModuleSpec(module.__name__, None, is_package=True), []
    vars(module).update(attributes)
    # Names that Megatron and the hosts import, and never call here.
    module.__getattr__ = lambda wanted: _type(wanted)
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)


def _type(name):
    if name.startswith("__") or name == "_SplitAlongDim":  # without which Megatron splits by torch
        raise AttributeError(name)
    return type(name, (nn.Module,), {})


def _normed(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class Linear(nn.Module):
    def __init__(self, in_features, out_features, *, init_method=None, bias=True, return_bias=False, **more):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.parallel_mode, self.tp_size = more.get("parallel_mode"), 1
        dtype = more.get("params_dtype", torch.float32)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        (init_method or nn.init.xavier_normal_)(self.weight)
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype)) if bias else None

    def forward(self, x, is_first_microbatch=None, **options):
        if self.return_bias:
            return nn.functional.linear(x, self.weight), self.bias
        return nn.functional.linear(x, self.weight, self.bias)

    def get_extra_state(self):
        return torch.empty(0)

    def set_extra_state(self, state):
        pass


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, eps=1e-5, **options):
        super().__init__(in_features, out_features, **options)
        self.eps, self.return_layernorm_output = eps, False
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=self.weight.dtype))

    def forward(self, x, is_first_microbatch=None, **options):
        return super().forward(_normed(x, self.layer_norm_weight, self.eps))


class RMSNorm(nn.Module):
    def __init__(self, hidden_size=None, eps=1e-5, normalized_shape=None, **options):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size or normalized_shape)), eps

    def forward(self, x):
        return _normed(x, self.weight, self.eps)


class DotProductAttention(nn.Module):
    def __init__(self, num_attention_heads, kv_channels, *, softmax_scale=None, **options):
        super().__init__()
        self.softmax_scale, self.cp_group = softmax_scale, None
        self.hidden_size_per_attention_head_k = kv_channels

    def forward(self, q, k, v, mask=None, *, cu_seqlens_q, max_seqlen_q, cu_seqlens_q_padded=None, **options):
        from megagraph.packs import ops

        offsets = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        scale, longest = self.softmax_scale, int(max_seqlen_q)
        return ops.varlen_attention(q, k, v, offsets, longest, softmax_scale=scale, causal=True).flatten(1)


class _Streams:
    def __init__(self):
        self.states_ = {}

    def reset(self):
        self.states_ = {}


_LAYERS = (Linear, LayerNormLinear, RMSNorm, DotProductAttention)
_module("pytorch", **{layer.__name__: layer for layer in _LAYERS}, LayerNorm=nn.LayerNorm)
_module("common")
_module("common.recipe")
for _name in (
    *("attention", "attention.rope", "cpp_extensions", "constants", "float8_tensor", "fp8", "module"),
    *("module.base", "ops", "quantized_tensor", "tensor", "tensor.float8_tensor", "tensor.mxfp8_tensor"),
    *("tensor.utils", "utils"),
):
    _module(f"pytorch.{_name}")
_module("pytorch.distributed", CudaRNGStatesTracker=_Streams)
_state = mock.Mock()
_state.is_fp8_enabled.return_value = _state.is_fp8_calibration.return_value = False
sys.modules[f"{__name__}.pytorch.fp8"].FP8GlobalStateManager = _state
