# SPDX-License-Identifier: Apache-2.0
"""Megatron's modules of Transformer Engine, where it is installed."""

import functools
import importlib
import importlib.util
from collections.abc import Sequence

from torch import nn

from megagraph.megatron.seams.seam import Seam

__all__ = ["ENGINE_ATTENTION", "engine_seams", "is_engine_attention"]

ENGINE_ATTENTION = Seam(
    module="megatron.core.extensions.transformer_engine",
    path="TEDotProductAttention.forward",
    parameters=("query", "key", "value", "attention_mask", "packed_seq_params"),
)


@functools.cache
def engine_seams() -> Sequence[Seam]:
    """What is wrapped of it; nothing where it cannot be imported, and Megatron has stand-ins instead."""
    try:
        is_there = importlib.util.find_spec("transformer_engine") is not None
    except ValueError:  # a host's stand-in, without a spec
        is_there = False
    if not is_there:
        return ()
    return (ENGINE_ATTENTION,) if importlib.import_module(ENGINE_ATTENTION.module).HAVE_TE else ()


def is_engine_attention(module: nn.Module) -> bool:
    """Whether a module is Transformer Engine's attention as Megatron wraps it, or derived from that."""
    return any(isinstance(module, seam.owner()) for seam in engine_seams())
