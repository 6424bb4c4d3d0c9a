# SPDX-License-Identifier: Apache-2.0
"""Configs of models with experts, for each way in which their layers are graphed."""

from typing import Any

import moe_rig
import torch

from megagraph.megatron.seams import permutation_sorts

Config = dict[str, Any]
BIAS = moe_rig.CASES["sigmoid, bias, groups"]
GATED = moe_rig.CASES["gated shared experts, allgather"] | {"moe_token_dispatcher_type": "alltoall"}

# Routers in graphs: all but what recomputes the router with its experts.
ROUTED: dict[str, Config] = {
    **{name: case for name, case in moe_rig.CASES.items() if name != "recomputed"},
    "shared experts, overlapped": {
        **moe_rig.CASES["shared experts"],
        "moe_shared_expert_overlap": True,
    },
    "several losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.02, 0.01, 0.03],
        "moe_router_dtype": "fp32",
    },
    "one expert, before the choice, in doubles": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
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
    "jitter, drop, gated shared experts": {**moe_rig.CASES["jitter"], **moe_rig.DROPS, **GATED},
}

# Rows permuted in the router's graph: all but what drops tokens before it permutes (R12).
_DROP = ("drop", "jitter, drop, gated shared experts")
PERMUTED: dict[str, Config] = {
    **{name: case for name, case in ROUTED.items() if name not in _DROP},
    "drop and pad, shared experts": {**ROUTED["drop and pad"], **ROUTED["shared experts"]},
}

# Whole layers whose experts are padded to a capacity.
_PADDED = moe_rig.CASES["drop and pad"]
PADDED: dict[str, Config] = {
    "padded": _PADDED,
    "by position": {**_PADDED, "moe_token_drop_policy": "position"},
    "room for all": {**_PADDED, "moe_expert_capacity_factor": 2.0},
    "sigmoid, bias, groups": {**BIAS, **_PADDED},
    "several losses": {**ROUTED["several losses"], **_PADDED},
    "jitter": {**moe_rig.CASES["jitter"], **_PADDED},
    "gated shared experts": {**_PADDED, **GATED},
    "recomputed": {
        **BIAS,
        **_PADDED,
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn"],
    },
}

# Whole layers of grouped experts.
_TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
_SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
GROUPED: dict[str, Config] = {
    "top 1": _TOP_1,
    "top 2": {},
    "top 4 of 4": {"moe_router_topk": 4},
    "swiglu": _SWIGLU,
    "on the input": {**_TOP_1, "moe_apply_probs_on_input": True},
    **{name: moe_rig.CASES[name] for name in ("shared experts", "gated shared experts, allgather")},
    **{name: moe_rig.CASES[name] for name in ("global loss, per token", "jitter")},
    "sigmoid, bias, groups": BIAS,
    "recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "gradients of their own": {"gradient_accumulation_fusion": False, "moe_router_dtype": "fp32"},
}
# Compiled, for which the CPU takes minutes.
GROUPED_ON_GPU: dict[str, Config] = {"fused swiglu": {**_SWIGLU, "bias_activation_fusion": True}}


def can_permute(case: Config) -> bool:
    """Whether this release can permute inside of a graph."""
    is_padded = case.get("moe_pad_expert_input_to_capacity", False)
    return permutation_sorts() or is_padded or case.get("moe_token_dispatcher_type") == "allgather"
