# SPDX-License-Identifier: Apache-2.0
"""How a model's experts are spread over ranks."""

from typing import Any

__all__ = ["has_experts", "need_equal_rows"]

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
