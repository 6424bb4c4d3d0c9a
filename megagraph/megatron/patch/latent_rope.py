# SPDX-License-Identifier: Apache-2.0
"""What runs in place of Megatron's fused RoPE of multi-latent attention: canonical packs through our op.

Megatron's kernels are compiled at their first call, look for a row's document from the first one on, and read
the row before the table's first for rows past the last offset. Ours has their bits on all other rows. Packs
that are not canonical keep Megatron's own.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from megagraph.megatron.graphs.positions import rows_are_positions
from megagraph.megatron.seams import LATENT_KEY_ROPE, LATENT_QUERY_ROPE, Seam
from megagraph.packs.latent_rope import Rotation, rope_mla

__all__ = ["wrap_key_rope", "wrap_query_rope"]

_Arguments = Mapping[str, Any]


def _rotation(arguments: _Arguments, seam: Seam) -> Rotation | None:
    """Of a canonical pack, of which nothing further is asked; None for whatever Megatron has to rotate.

    Fused positions begin anew in each document, whatever the pack declares.
    """
    cu_seqlens = arguments[next(name for name in seam.parameters if name.startswith("cu_seqlens"))]
    asks_more = any(value for name, value in arguments.items() if name not in seam.parameters)
    if cu_seqlens is None or rows_are_positions(cu_seqlens) is None or asks_more:
        return None
    return Rotation(
        cos=arguments["cos"].flatten(1),
        sin=arguments["sin"].flatten(1),
        cu_seqlens_padded=cu_seqlens,
        fused=True,
        cp_size=arguments["cp_size"],
        cp_rank=arguments["cp_rank"],
    )


def _wrap(
    original: Callable[..., Any], seam: Seam, ours: Callable[[_Arguments, Rotation], Any]
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def rotate(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named)
        given.apply_defaults()
        how = _rotation(given.arguments, seam)
        return original(*args, **named) if how is None else ours(given.arguments, how)

    return rotate


def _query(arguments: _Arguments, how: Rotation) -> Tensor:
    (query,) = rope_mla(arguments["t"], None, None, how)
    return query


def _key_and_value(arguments: _Arguments, how: Rotation) -> tuple[Tensor, ...]:
    return rope_mla(None, arguments["kv"], arguments["k_pos_emb"], how, v_dim=arguments["v_dim"])


def wrap_query_rope(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fused_apply_mla_rope_for_q` as multi-latent attention sees it."""
    return _wrap(original, LATENT_QUERY_ROPE, _query)


def wrap_key_rope(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fused_apply_mla_rope_for_kv` as multi-latent attention sees it."""
    return _wrap(original, LATENT_KEY_ROPE, _key_and_value)
