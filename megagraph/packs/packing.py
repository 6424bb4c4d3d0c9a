# SPDX-License-Identifier: Apache-2.0
"""Reads packs and pads them to a capacity, without waiting for the device.

Works on anything with the fields of Megatron's `PackedSeqParams`; imports no Megatron. Does not
decide which capacity to use.

Words: *actual* offsets bound the valid tokens of each document, *padded* offsets bound its physical
rows; if a pack carries no padded offsets the actual ones are physical.
"""

import enum
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from megagraph.decide.dispatch import Capacity, PackForm, PackShape

__all__ = [
    "PackedSequences",
    "TailConvention",
    "added_offsets",
    "canonical_constants",
    "canonical_fields",
    "canonical_offsets",
    "pack_shape",
]


class PackedSequences(Protocol):
    """The fields of Megatron's `PackedSeqParams` that every release has."""

    qkv_format: str | None
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    max_seqlen_q: int | Tensor
    max_seqlen_kv: int | Tensor


class TailConvention(enum.Enum):
    """What the offsets say of the rows between a pack's end and the end of the buffer.

    HIDDEN: nothing; every offset past the last document repeats it. Upstream leaves such rows
        undefined; here every op writes zeros.
    EMPTY_DUMMY: one more document with padded rows and no valid token. Takes a place of `num_seqs`.
    """

    HIDDEN = "hidden"
    EMPTY_DUMMY = "empty-dummy"

    def __init__(self, name: str) -> None:
        self.extra_seqs = int(name == "empty-dummy")  # documents that the convention adds


def pack_shape(
    params: PackedSequences, tokens: int, tail: TailConvention, *, cp_size: int = 1
) -> PackShape | None:
    """What a pack needs, from shapes and host integers alone.

    Args:
        params: the pack.
        tokens: physical tokens of this rank's share, from the shape of its input.
        tail: adds its own documents to the count.
        cp_size: context-parallel ranks that share the pack.

    Returns:
        The shape, or None if `params` describes no packed sequences. A `max_seqlen` that lives on
        the device is not read: the longest document it could mean, all tokens, is assumed.
    """
    return PackShape.of(params, tokens, tail.extra_seqs, cp_size)


def added_offsets(tail: TailConvention, tokens: int, *, has_padded: bool) -> Mapping[str, int | None]:
    """What is added to the actual and, if the canonical pack has them, to the padded offsets.

    Args:
        tail: the convention.
        tokens: physical tokens of the whole pack, all context-parallel ranks together.
        has_padded: the pack carries padded offsets.

    Returns:
        By the kind of offsets; None repeats the last one.
    """
    if tail is TailConvention.EMPTY_DUMMY:
        return {"actual": None, "padded": tokens}
    return {"actual": None, "padded": None} if has_padded else {"actual": None}


def canonical_constants(form: PackForm, tail: TailConvention, capacity: Capacity) -> dict[str, Any]:
    """The `PackedSeqParams` fields of a canonical pack that are the same for every pack of a variant.

    Args:
        form: of the pack as it was given; keeps what it said of padding.
        tail: the convention by which the offsets were padded.
        capacity: its `max_seqlen` is the pack's, so that kernels choose alike for every pack.
    """
    fields: dict[str, Any] = {
        "qkv_format": "thd",
        "max_seqlen_q": capacity.max_seqlen,
        "max_seqlen_kv": capacity.max_seqlen,
    }
    between = True if tail is TailConvention.EMPTY_DUMMY else form.pad_between_seqs
    if between is not None:
        fields["pad_between_seqs"] = between
    return fields


def canonical_offsets(actual: Tensor, padded: Tensor | None, form: PackForm) -> dict[str, Tensor | None]:
    """The others: offsets of queries and of keys, int32 [num_seqs + 1]."""
    if padded is None and form.is_aliased:
        padded = actual
    return {
        "cu_seqlens_q": actual,
        "cu_seqlens_kv": actual,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
    }


def canonical_fields(
    offsets: Mapping[str, Tensor], form: PackForm, tail: TailConvention, capacity: Capacity
) -> dict[str, Any]:
    """All fields of a canonical pack.

    Args:
        offsets: `actual` and perhaps `padded`, int32 [num_seqs + 1].
        form: of the pack as it was given.
        tail: the convention by which the offsets were padded.
        capacity: of the pack.
    """
    of_offsets = canonical_offsets(offsets["actual"], offsets.get("padded"), form)
    return {**canonical_constants(form, tail, capacity), **of_offsets}
