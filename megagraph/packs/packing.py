# SPDX-License-Identifier: Apache-2.0
"""Reads packs and pads them to a capacity, without waiting for the device.

Works on anything with the fields of Megatron's `PackedSeqParams`; imports no Megatron. Does not
decide which capacity to use.

Words: *actual* offsets bound the valid tokens of each document, *padded* offsets bound its physical
rows; if a pack carries no padded offsets the actual ones are physical.
"""

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megagraph.decide.dispatch import Capacity, PackShape
from megagraph.packs import ops

__all__ = [
    "OffsetsRule",
    "PackForm",
    "PackedSequences",
    "TailConvention",
    "canonical_fields",
    "declares_every_row",
    "has_own_cp_group",
    "offsets_rules",
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
        undefined; here every op writes zeros. The default, and also what fits a pack whose last
        document has been extended already.
    DUMMY: one more document, valid in both kinds of offsets. Takes a place of `num_seqs`.
    EMPTY_DUMMY: one more document with padded rows and no valid token.
    EXTEND_LAST: the last document's padded rows reach to the end; its valid tokens do not.
    """

    HIDDEN = "hidden"
    DUMMY = "dummy"
    EMPTY_DUMMY = "empty-dummy"
    EXTEND_LAST = "extend-last"

    def __init__(self, name: str) -> None:
        self.extra_seqs = int(name in ("dummy", "empty-dummy"))  # documents that the convention adds


class PackForm(NamedTuple):
    """What of a pack changes the graph beside its shape: which fields it carries.

    Args:
        has_padded: carries padded offsets beside the actual ones.
        is_aliased: its padded offsets are the actual ones, the same object, by which Transformer Engine
            knows that there is no padding between documents.
        pad_between_seqs: Megatron's field of that name; None if it is absent or unset.
    """

    has_padded: bool
    is_aliased: bool
    pad_between_seqs: bool | None

    @staticmethod
    def of(params: PackedSequences) -> "PackForm | None":
        """The form of a pack; None if queries and keys have offsets, or a longest document, of their own."""
        q, kv = params.cu_seqlens_q, params.cu_seqlens_kv
        q_padded, kv_padded = params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded
        if not (q is kv or _same_memory(q, kv)):
            return None
        if not (q_padded is kv_padded or _same_memory(q_padded, kv_padded)):
            return None
        longest, longest_kv = params.max_seqlen_q, params.max_seqlen_kv
        if type(longest) is int and type(longest_kv) is int and longest != longest_kv:
            return None
        is_aliased = q_padded is q and kv_padded is kv
        has_padded = q_padded is not None and not is_aliased
        return _form(has_padded, is_aliased, getattr(params, "pad_between_seqs", None))


_form = functools.cache(PackForm)  # which are few, and looked up faster than made


def _same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors that are not the same object are views of the same entries."""
    if a is None or b is None:
        return False
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype


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
    if params is None or params.qkv_format != "thd" or params.cu_seqlens_q is None:
        return None
    longest = params.max_seqlen_q
    if type(longest) is not int:
        on_device = isinstance(longest, Tensor) and longest.is_cuda
        longest = tokens * cp_size if longest is None or on_device else int(longest)
    num_seqs = params.cu_seqlens_q.numel() - 1 + tail.extra_seqs
    return PackShape(tokens, num_seqs, longest if longest > 1 else 1, cp_size)


def declares_every_row(params: PackedSequences, tokens: int) -> bool:
    """Whether a pack of several documents declares one as long as the pack: a `max_seqlen` of all its rows.

    Of one document alone that is no more than its length. Waits for the device if `max_seqlen` lives there.

    Args:
        params: the pack.
        tokens: its physical tokens.
    """
    declared = (params.max_seqlen_q, params.max_seqlen_kv)
    if params.cu_seqlens_q.numel() <= 2 or any(longest is None for longest in declared):
        return False
    return max(map(int, declared)) == tokens


def has_own_cp_group(params: PackedSequences) -> bool:
    """Whether a pack names the context-parallel ranks that share it, instead of leaving it to the model."""
    cp_size = getattr(params, "local_cp_size", None)
    return getattr(params, "cp_group", None) is not None or (cp_size is not None and cp_size > 1)


@dataclass(frozen=True, kw_only=True)
class OffsetsRule:
    """How one kind of offsets is padded to a capacity; `fill` -1 repeats the last given offset."""

    fill: int
    extend_last: bool = False

    def apply(self, offsets: Tensor, num_seqs: int) -> Tensor:
        """Offsets of `num_seqs` documents, int32 [num_seqs + 1], on the device of `offsets`."""
        if self.extend_last and offsets.numel() > 1:
            end = offsets.new_full((1,), self.fill)
            offsets = torch.cat([offsets[:-1], end])
        return ops.pad_cu_seqlens(offsets, num_seqs, None if self.fill < 0 else self.fill)


def offsets_rules(tail: TailConvention, tokens: int, *, has_padded: bool) -> Mapping[str, OffsetsRule]:
    """The rule of the actual and, if the canonical pack has them, of the padded offsets.

    Args:
        tail: the convention.
        tokens: physical tokens of the whole pack, all context-parallel ranks together.
        has_padded: the pack carries padded offsets.
    """
    repeat, to_end = OffsetsRule(fill=-1), OffsetsRule(fill=tokens)
    if tail is TailConvention.HIDDEN:
        return {"actual": repeat, "padded": repeat} if has_padded else {"actual": repeat}
    if tail is TailConvention.DUMMY:
        return {"actual": to_end, "padded": to_end} if has_padded else {"actual": to_end}
    if tail is TailConvention.EMPTY_DUMMY:
        return {"actual": repeat, "padded": to_end}
    return {"actual": repeat, "padded": OffsetsRule(fill=tokens, extend_last=True)}


def canonical_fields(
    offsets: Mapping[str, Tensor], form: PackForm, tail: TailConvention, capacity: Capacity
) -> dict[str, Any]:
    """The `PackedSeqParams` fields of a canonical pack.

    Args:
        offsets: `actual` and perhaps `padded`, int32 [num_seqs + 1].
        form: of the pack as it was given; keeps what it said of padding.
        tail: the convention by which the offsets were padded.
        capacity: its `max_seqlen` is the pack's, so that kernels choose alike for every pack.
    """
    actual, padded = offsets["actual"], offsets.get("padded")
    if padded is None and form.is_aliased:
        padded = actual
    fields: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": actual,
        "cu_seqlens_kv": actual,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": capacity.max_seqlen,
        "max_seqlen_kv": capacity.max_seqlen,
    }
    between = form.pad_between_seqs
    if tail in (TailConvention.EMPTY_DUMMY, TailConvention.EXTEND_LAST):
        between = True
    if between is not None:
        fields["pad_between_seqs"] = between
    return fields
