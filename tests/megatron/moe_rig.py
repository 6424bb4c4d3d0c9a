# SPDX-License-Identifier: Apache-2.0
"""Models with experts for the tests of the Megatron floor, and whole runs with all that they count."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron_rig import CAPACITY, Micro, ModelTrainer
from model_specs import EXPERTS
from torch import Tensor

from megagraph.megatron.seams import permutation_sorts

Config = dict[str, Any]
# Of every model here; core's experts take no bias.
BASE = {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
}
DROPS = {"moe_expert_capacity_factor": 1.0}
PADS = {**DROPS, "moe_pad_expert_input_to_capacity": True}
GATHERS = {"moe_token_dispatcher_type": "allgather"}
SHARED = {"moe_shared_expert_intermediate_size": 24}
OVERLAPPED = {**SHARED, "moe_shared_expert_overlap": True}
GATED = {**SHARED, "moe_shared_expert_gate": True}
BIASED = "sigmoid, bias, groups"
BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-2,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
_TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
_SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
_FUSED = {**_SWIGLU, "bias_activation_fusion": True}  # compiled: minutes on the CPU


def recompute(*modules: str, **changes: Any) -> Config:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules), **changes}


FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: dict[str, Config] = {
    "alltoall": {},
    "allgather": GATHERS,
    "drop and pad": PADS,
    "drop": DROPS,
    "drop by position, allgather": {**DROPS, **GATHERS, "moe_token_drop_policy": "position"},
    "shared experts": SHARED,
    "shared experts, overlapped": OVERLAPPED,
    "gated shared experts, allgather": {**GATED, **GATHERS},
    "drop and pad, shared experts": {**PADS, **SHARED},
    BIASED: BIAS,
    "global loss, per token": {
        "moe_router_load_balancing_type": "global_aux_loss",
        "calculate_per_token_loss": True,
    },
    "jitter": {"moe_input_jitter_eps": 1e-2},
    "recomputed": recompute("moe", **DROPS),
    "several losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.02, 0.01, 0.03],
        "moe_router_dtype": "fp32",
    },
    "one expert, before the choice, in doubles": {
        **_TOP_1,
        "moe_router_dtype": "fp64",
        "moe_router_topk_scaling_factor": 2.5,
    },
    "groups, no losses": {
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
    },
}
# Whole layers whose experts are padded to a capacity.
PADDED: dict[str, Config] = {
    "by position": {**PADS, "moe_token_drop_policy": "position"},
    "room for all": {**PADS, "moe_expert_capacity_factor": 2.0},
    BIASED: {**BIAS, **PADS},
    "gated shared experts": {**PADS, **GATED},
    "recomputed": recompute("core_attn", **BIAS, **PADS),
}
# Whole layers of grouped experts.
GROUPED: dict[str, Config] = {
    "top 1": _TOP_1,
    "top 2": {},
    "top 4 of 4": {"moe_router_topk": 4},
    "swiglu": _SWIGLU,
    "on the input": {**_TOP_1, "moe_apply_probs_on_input": True},
    "shared experts": SHARED,
    **{name: CASES[name] for name in ("gated shared experts, allgather", "global loss, per token", "jitter")},
    BIASED: BIAS,
    "recomputed": recompute("moe"),
    "inputs recomputed": recompute("moe_act", moe_grouped_gemm=True, **_SWIGLU),
    "inputs recomputed, fused swiglu": recompute("moe_act", moe_grouped_gemm=True, **_FUSED),
    "gradients of their own": {"gradient_accumulation_fusion": False, "moe_router_dtype": "fp32"},
    "fused swiglu": _FUSED,
}


class Way(NamedTuple):
    """A way to graph layers of experts: what is named, and the models."""

    scopes: str | tuple[str, ...]
    cases: dict[str, Config] = CASES


ATTENTION, ROUTERS, PERMUTATION = "attention", "attention, routers", "attention, routers, permutation"
PADDED_EXPERTS, GROUPED_EXPERTS = "padded experts", "grouped experts"
WAYS = {
    ATTENTION: Way("attn"),
    ROUTERS: Way(("attn", "moe_router")),
    PERMUTATION: Way(("attn", "moe_router", "moe_preprocess")),
    PADDED_EXPERTS: Way(("attn", "moe"), PADDED),
    GROUPED_EXPERTS: Way((), GROUPED),
}

# One pack, and tails that it is given.
PACK = Micro(lengths=(9, 14, 5))
TAILS = (0, 1, 13, CAPACITY.tokens // 2)
_ALLTOALL = "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher"
# Where a layer of experts can fail.
PLACES = {
    "dispatch": f"{_ALLTOALL}.token_dispatch",
    "experts": "megatron.core.transformer.moe.experts.SequentialMLP.forward",
    "combine": f"{_ALLTOALL}.token_combine",
}


def lose(*args: Any, **kwargs: Any) -> None:
    raise OSError("lost")


def _on_host(tensor: Any, as_numpy: bool = False, **_streams: Any) -> Any:
    """What core copies to the host; there it lies already, and is handed on as the copy would be."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


@contextlib.contextmanager
def experts_on_cpu() -> Iterator[None]:
    """Lets core's experts run where there is neither a GPU nor Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    with contextlib.ExitStack() as stack:
        if not hasattr(moe_utils, "te_general_gemm"):  # which 0.16 reads where it could not import it
            stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _on_host))
        yield


class ExpertTrainer(ModelTrainer):
    def __init__(self, kinds: str = "EE", **changes: Any) -> None:
        super().__init__(kinds=kinds, **{**BASE, **changes})


def tensors_of_calls(trainer: ModelTrainer) -> list[tuple[Any, str]]:
    """What dispatchers and shared experts keep of their last call."""
    owners = [layer.mlp.token_dispatcher for layer in trainer.chunk.decoder.layers]
    owners += [layer.mlp.shared_experts for layer in trainer.chunk.decoder.layers]
    return [
        (owner, name)
        for owner in owners
        if owner is not None
        for name, value in vars(owner).items()
        if isinstance(value, Tensor) and not name.endswith("_by_local_experts")
    ]


def can_permute(case: Config) -> bool:
    is_padded = case.get("moe_pad_expert_input_to_capacity", False)
    return permutation_sorts() or is_padded or case.get("moe_token_dispatcher_type") == "allgather"
