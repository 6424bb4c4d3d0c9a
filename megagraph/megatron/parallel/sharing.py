# SPDX-License-Identifier: Apache-2.0
"""What context-parallel ranks cannot share packs in, by name, and metrics of packs that they share.

Every rank that shares a pack records its part of a router's loss. At the end of a step Megatron adds the
parts up over one group, and takes the mean over all others. That is right for packs which the ranks of that
group share; a part of any other pack would count too little, or too often. So metrics of packs that other
ranks share than the model's own are counted as if those had shared them.
"""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from megagraph.decide.reasons import EagerReason
from megagraph.megatron.seams import (
    ENGINE_ATTENTION,
    PACKED_SEQ_PARAMS,
    is_engine_attention,
    is_replaced,
    metric_group,
    moe_metrics,
    set_metric_group,
)
from megagraph.modules import VarlenAttention

__all__ = [
    "counted_as_shared_by",
    "has_experts",
    "need_equal_rows",
    "require_rows",
    "unsupported_dynamic_sharing",
    "unsupported_sharing",
]


# Over several ranks: what takes as many rows from each of them.
_NEED_EQUAL_ROWS = (
    ("moe_token_dispatcher_type", "allgather"),
    ("moe_pad_expert_input_to_capacity", True),
)


def has_experts(config: Any) -> bool:
    """Whether a model's config asks for experts in some layer."""
    return getattr(config, "num_moe_experts", None) is not None


def need_equal_rows(config: Any) -> bool:
    """Whether a model's experts are spread over ranks from each of which they take as many rows."""
    is_spread = has_experts(config) and config.expert_model_parallel_size > 1
    return is_spread and any(getattr(config, name) == value for name, value in _NEED_EQUAL_ROWS)


def require_rows(rows: int, tokens: int, reason: EagerReason) -> None:
    """Raises `RuntimeError` where a pack that is not padded has not the rows that other ranks run."""
    if tokens != rows:
        raise RuntimeError(
            f"experts are spread over ranks and take {rows} rows from each: expected a pack that is padded "
            f"to them or has as many, got one of {tokens} that runs as it was given ({reason.name}); set "
            "max_seqlen_per_dp_cp_rank to the rows of the largest pack"
        )


_HIERARCHICAL = "a2a+p2p"  # its ranks are in two groups, which Megatron makes for one number of them


def unsupported_sharing(model: Any) -> str | None:
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


def unsupported_dynamic_sharing(model: Any) -> str | None:
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
    return unsupported_sharing(model) or next((name for name, is_there in found.items() if is_there), None)


def _losses_of_routers(config: Any) -> Collection[str]:
    kinds = config.moe_router_load_balancing_type if has_experts(config) else ()
    return (kinds,) if isinstance(kinds, str) else kinds


def _is_known(core: nn.Module) -> bool:
    is_engines = is_engine_attention(core) and not is_replaced(core, ENGINE_ATTENTION)
    return isinstance(core, VarlenAttention) or is_engines


@contextlib.contextmanager
def counted_as_shared_by(own: Any, shown: Any, times: float) -> Iterator[None]:
    """Around what runs a pack.

    Args:
        own: the group over which metrics are added up.
        shown: the one that routers see meanwhile.
        times: how many ranks share the pack, for each rank of `own`.
    """
    before = {} if times == 1 else {name: values.clone() for name, values in moe_metrics().items()}
    try:
        yield
    finally:
        for name, values in moe_metrics().items():
            group = metric_group(name)
            if group is not own and group is not shown:
                continue  # a mean of its own, or over all ranks
            set_metric_group(name, own)
            if times != 1:
                earlier = before.get(name, 0)
                values.sub_(earlier).mul_(times).add_(earlier)
