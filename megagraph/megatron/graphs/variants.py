# SPDX-License-Identifier: Apache-2.0
"""What a GPTModel's block is captured for: from the key of a variant to a `VariantSpec`.

Captures nothing.

`seq_idx`, the document of each row, and a padding mask are two more buffers of metadata, of which layers get
views. Rows past the pack have the number after the capacity's last document, and are masked.

If context-parallel ranks share a pack, its offsets are those of the whole pack on each of them. A capacity's
tokens are a rank's own, its longest document is one of all of them together, and canonical offsets end where
all their rows do. What asks for the end of this rank's rows reads offsets of its own, made of the others by a
division: one more source of a micro-batch.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megagraph import _C
from megagraph.bank.sites import VariantSpec
from megagraph.decide.dispatch import Capacity, VariantKey
from megagraph.packs.packing import TailConvention

__all__ = ["BlockInput", "example_offsets", "variant_spec"]

_MASK, _SEQ_IDX = "padding_mask", "seq_idx"  # as layers and packs call them
_ROWS = "rows"  # offsets of this rank's rows


def example_offsets(capacity: Capacity, cp_size: int, device: torch.device) -> Tensor:
    """Offsets of a legal pack that fills the capacity, int32 [num_seqs + 1].

    Args:
        capacity: of each rank's share.
        cp_size: ranks that share the pack.
        device: of the offsets.
    """
    multiple = 1 if cp_size == 1 else 2 * cp_size
    longest, tokens = capacity.max_seqlen // multiple * multiple, capacity.tokens * cp_size
    ends = [min(i * longest, tokens) for i in range(capacity.num_seqs + 1)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _described(key: VariantKey) -> list[str]:
    """What sets its graphs apart from those of plain training packs."""
    return [*(() if key.grad else ("forward only",)), *(("with a padding mask",) if key.has_mask else ())]


def _offsets_spec(example: Tensor, source: int, added: int | None = None) -> _C.MetadataSpec:
    fill = -1 if added is None else added
    return _C.MetadataSpec(kind=_C.SegmentKind.OFFSETS, example=example, source=source, fill=fill)


@dataclass(frozen=True, kw_only=True)
class BlockInput:
    """What all variants of a block have in common.

    Args:
        row_shape: of the hidden states, without their first dimension.
        dtype: of the hidden states.
        params_type: `PackedSeqParams`.
        tail: convention of the canonical offsets.
        valid_tokens: int64 [1], counts the valid tokens of replayed packs.
        mode: that the block is in, in words.
        masks_tail: layers are given a padding mask in any case, of the rows past the pack's end.
        local_rows: from a pack's tokens to the rows of hidden states on this rank; fewer where ranks share
            them.
    """

    row_shape: tuple[int, ...]
    dtype: torch.dtype
    params_type: type[Any]
    tail: TailConvention
    valid_tokens: Tensor
    mode: str
    masks_tail: bool
    local_rows: Callable[[int], int]


def variant_spec(
    key: VariantKey,
    block: BlockInput,
    block_arguments: Callable[[Any, Tensor], Mapping[str, Any]],
    context: Callable[[], contextlib.AbstractContextManager[None]],
) -> VariantSpec:
    """Describes one variant.

    Args:
        key: its shapes; the packs it takes and how the model runs.
        block: what it shares with the block's other variants.
        block_arguments: from a pack and hidden states to the layers' arguments.
        context: entered around the warm-up and the capture.
    """
    capacity, form, cp_size = key.capacity, key.form, key.cp_size
    assert capacity is not None
    packs = _C.CanonicalPacks(key, block.tail.extra_seqs)
    added = packs.added_offsets()
    physical = int(form.has_padded)
    example = example_offsets(capacity, cp_size, block.valid_tokens.device)
    # Of what a micro-batch hands over, the offsets of this rank's rows, and a mask behind everything else.
    of_rows = physical if cp_size == 1 else physical + form.has_seq_idx + 1
    of_mask = physical + form.has_seq_idx + (1 if cp_size == 1 else 2)
    metadata = {
        name: _offsets_spec(example, physical if name == "padded" else 0, end) for name, end in added.items()
    }
    metadata["valid_tokens"] = _C.MetadataSpec(
        kind=_C.SegmentKind.COUNT,
        example=block.valid_tokens,
        source=0 if cp_size == 1 else of_rows,
        shared=True,
    )
    end_buffer = "padded" if form.has_padded else "actual"
    if cp_size > 1 or added[end_buffer] is not None:  # where no other buffer ends with this rank's rows
        end_buffer = _ROWS
        metadata[_ROWS] = _offsets_spec(example // cp_size, of_rows)
    rows = block.local_rows(capacity.tokens)
    # Rows that ranks share come padded from the embedding: no rank's rows end where the pack does.
    is_whole = rows == capacity.tokens
    has_mask = key.has_mask or block.masks_tail
    if has_mask:
        metadata[_MASK] = _C.MetadataSpec(
            kind=_C.SegmentKind.MASK if is_whole else _C.SegmentKind.COPY,
            example=torch.zeros(rows, dtype=torch.bool, device=example.device),
            source=of_mask if key.has_mask else -1,
        )
    if form.has_seq_idx:  # of all ranks' rows, of which those past the pack are no document's
        metadata[_SEQ_IDX] = _C.MetadataSpec(
            kind=_C.SegmentKind.OFFSETS,
            example=torch.zeros(capacity.tokens, dtype=torch.int32, device=example.device),
            source=physical + 1,
            fill=capacity.num_seqs,
        )

    def arguments(buffers: Mapping[str, Tensor]) -> Mapping[str, Any]:
        own = {name: buffer.detach() for name, buffer in buffers.items()}  # objects of its own
        index = own[_SEQ_IDX].view(1, capacity.tokens) if form.has_seq_idx else None
        params = packs.make(block.params_type, own["actual"], own.get("padded"), index)
        _C.mark_canonical(params)
        hidden = torch.empty((rows, *block.row_shape), dtype=block.dtype, device="meta")
        given = block_arguments(params, hidden)
        return {**given, _MASK: own[_MASK].view(1, rows)} if has_mask else given

    return VariantSpec(
        key=key,
        name=", ".join([block.mode, *_described(key), str(capacity)]),
        training=key.grad,
        rows=rows,
        row_shape=block.row_shape,
        dtype=block.dtype,
        metadata=metadata,
        end_source=of_rows if is_whole else -1,
        end_buffer=end_buffer if is_whole else None,
        fewer_rows=is_whole,
        arguments=arguments,
        context=context,
    )
