# SPDX-License-Identifier: Apache-2.0
"""Megatron's local layer spec with a core attention that takes packs."""

from typing import Any

from megagraph.modules import VarlenAttention

__all__ = ["get_gpt_layer_varlen_spec"]


def get_gpt_layer_varlen_spec(*args: Any, **kwargs: Any) -> Any:
    """`get_gpt_layer_local_spec(...)` with `megagraph.modules.VarlenAttention` as core attention.

    Takes what Megatron's function takes. Needs no Transformer Engine.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(*args, **kwargs)
    spec.submodules.self_attention.submodules.core_attention = VarlenAttention
    return spec
