# SPDX-License-Identifier: Apache-2.0
"""Fields of `PackedSeqParams`: those that a release has, those that staging reads, those that stay."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megagraph.decide.dispatch import Capacity
from megagraph.packs.packing import PackForm, TailConvention, canonical_constants

__all__ = [
    "constant_fields",
    "copy_foreign_attributes",
    "fields_of",
    "new_params",
    "put_seq_idx",
    "sources_of",
]


@functools.cache
def fields_of(params_type: type[Any]) -> frozenset[str]:
    """Names of what the release's packs carry."""
    return frozenset(inspect.signature(params_type).parameters)


def copy_foreign_attributes(given: Any, made: Any) -> None:
    """Hands on what others have set on a pack beside the fields of its class.

    Args:
        given: the pack as it was given.
        made: the pack that stands for it.
    """
    known = fields_of(type(given))  # type: ignore[arg-type]  # a class is hashable
    if len(given.__dict__) > len(known):
        made.__dict__.update({name: value for name, value in given.__dict__.items() if name not in known})


def new_params(params_type: type[Any], fields: Mapping[str, Any]) -> Any:
    """`PackedSeqParams` of these fields, less those that the release does not have."""
    known = fields_of(params_type)  # type: ignore[arg-type]  # a class is hashable
    if not known.issuperset(fields):
        fields = {name: value for name, value in fields.items() if name in known}
    return params_type(**fields)


@functools.cache
def constant_fields(
    params_type: type[Any], form: PackForm, tail: TailConvention, capacity: Capacity
) -> Mapping[str, Any]:
    """What a canonical pack says beside its offsets."""
    known = fields_of(params_type)  # type: ignore[arg-type]  # a class is hashable
    fields = canonical_constants(form, tail, capacity)
    return {name: value for name, value in fields.items() if name in known}


def sources_of(params: Any, form: PackForm, cp_size: int) -> list[Tensor]:
    """What staging reads of a pack: offsets, padded ones, `seq_idx`, those of its rows, if it has them.

    Args:
        params: the pack.
        form: of the pack.
        cp_size: how many ranks share it; each has a share of the rows of every document.
    """
    sources = [params.cu_seqlens_q]
    if form.has_padded:
        sources.append(params.cu_seqlens_q_padded)
    shared = [] if cp_size == 1 else [sources[-1] // cp_size]
    return [*sources, *([params.seq_idx] if form.has_seq_idx else ()), *shared]


def put_seq_idx(params: Any, seq_idx: Tensor, tokens: int) -> None:
    """Gives `seq_idx` to a pack of `tokens` rows, whose constructor would wait for the device to make it."""
    params.seq_idx, params.total_tokens = seq_idx, tokens
