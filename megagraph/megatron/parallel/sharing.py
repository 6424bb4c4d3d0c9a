# SPDX-License-Identifier: Apache-2.0
"""What context-parallel ranks cannot share packs in, by name. Reads a model's config and modules."""

from collections.abc import Collection
from typing import Any

from torch import nn

from megagraph.megatron.parallel.experts import has_experts, need_equal_rows
from megagraph.megatron.seams import ENGINE_ATTENTION, PACKED_SEQ_PARAMS, is_engine_attention, is_replaced
from megagraph.modules import VarlenAttention

__all__ = ["why_not_shared", "why_not_shared_by_any_number"]

_HIERARCHICAL = "a2a+p2p"  # its ranks are in two groups, which Megatron makes for one number of them


def why_not_shared(model: Any) -> str | None:
    """The first thing in a model that ranks cannot share packs in, in words; None where they can.

    Args:
        model: a GPTModel or HybridModel.
    """
    cores = [
        core for module in model.modules() if (core := getattr(module, "core_attention", None)) is not None
    ]
    others = sorted({type(core).__name__ for core in cores if not _is_known(core)})
    # It gets the rows past a pack's end as one document more, of padding alone.
    says_padding = "pad_between_seqs" in vars(PACKED_SEQ_PARAMS.function())
    found = {
        **{f"attention of class {name}": True for name in others},
        "Transformer Engine's attention, of packs that cannot say pad_between_seqs": (
            not says_padding and any(map(is_engine_attention, cores))
        ),
        "Mamba layers": any(hasattr(module, "mixer") for module in model.modules()),
        "multi-token prediction": getattr(model, "mtp", None) is not None,
        "experts over several ranks that need equal rows": need_equal_rows(model.config),
        f"cp_comm_type={_HIERARCHICAL!r}": any(
            getattr(core, "cp_comm_type", None) == _HIERARCHICAL for core in cores
        ),
    }
    return next((name for name, is_there in found.items() if is_there), None)


def why_not_shared_by_any_number(model: Any) -> str | None:
    """The same where each pack says by how many ranks it is shared.

    What runs in the backward does not see them. A router's losses are summed over one group of tensor- and
    context-parallel ranks, which Megatron has for one number of them, and its global loss in each micro-batch
    over ranks of other packs.
    """
    config: Any = model.config
    granularity = config.recompute_granularity
    found = {
        f"recompute_granularity={granularity!r}": granularity is not None,
        "routers with a global_aux_loss": "global_aux_loss" in _losses_of_routers(config),
        "experts with tensor parallelism": has_experts(config) and config.tensor_model_parallel_size > 1,
    }
    return why_not_shared(model) or next((name for name, is_there in found.items() if is_there), None)


def _losses_of_routers(config: Any) -> Collection[str]:
    kinds = config.moe_router_load_balancing_type if has_experts(config) else ()
    return (kinds,) if isinstance(kinds, str) else kinds


def _is_known(core: nn.Module) -> bool:
    is_engines = is_engine_attention(core) and not is_replaced(core, ENGINE_ATTENTION)
    return isinstance(core, VarlenAttention) or is_engines
