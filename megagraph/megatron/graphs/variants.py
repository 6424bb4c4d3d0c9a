# SPDX-License-Identifier: Apache-2.0
"""What a GPTModel's block is captured for: from the key of a variant to a `VariantSpec`.

Captures nothing.

`seq_idx`, the document of each row, a padding mask, and rotary frequencies with a row for each token are more
buffers of metadata, of which layers get views. Rows past the pack have the number after the capacity's last
document, are masked, and are not rotated.

If context-parallel ranks share a pack, its offsets are those of the whole pack on each of them. A capacity's
tokens are a rank's own, its longest document is one of all of them together, and canonical offsets end where
all their rows do. What asks for the end of this rank's rows reads offsets of its own, made of the others by a
division: one more source of a micro-batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megagraph import _C
from megagraph.bank.sites import VariantSpec
from megagraph.decide.dispatch import Capacity, VariantKey
from megagraph.megatron.parallel.model_parallel import has_experts

__all__ = ["variant_spec"]

_MASK, _SEQ_IDX, _FREQS = "padding_mask", "seq_idx", "rotary_pos_emb"  # as layers and packs call them
_ROWS = "rows"  # offsets of this rank's rows


def _example_offsets(capacity: Capacity, cp_size: int, device: torch.device) -> Tensor:
    """Offsets of a legal pack that fills the capacity on each of the ranks that share it."""
    multiple = 1 if cp_size == 1 else 2 * cp_size
    longest, tokens = capacity.max_seqlen // multiple * multiple, capacity.tokens * cp_size
    ends = [min(i * longest, tokens) for i in range(capacity.num_seqs + 1)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def _offsets_spec(example: Tensor, source: int, fill: int = -1) -> _C.MetadataSpec:
    return _C.MetadataSpec(kind=_C.SegmentKind.OFFSETS, example=example, source=source, fill=fill)


def variant_spec(
    key: VariantKey,
    model: Any,
    hidden: Tensor,
    freqs: Tensor | tuple[Tensor, ...] | None,
    packs: _C.CanonicalPacks,
    valid_tokens: Tensor,
    block_arguments: Callable[[Tensor, Tensor | None, Tensor | None], Mapping[str, Any]],
) -> VariantSpec:
    """Describes one variant of a model's block, for hidden states [T, 1, H] like those on the meta device.

    `block_arguments` makes a canonical pack of its offsets, padded offsets and documents of rows, and gives
    what the layers are called with. `valid_tokens`, int64 [1], counts those of replayed packs. `freqs` are
    like frequencies of each token, without rows.
    """
    capacity, form, cp_size = key.capacity, key.form, key.cp_size
    assert capacity is not None
    added = packs.added_offsets()
    physical = int(form.has_padded)
    example = _example_offsets(capacity, cp_size, valid_tokens.device)
    # Of what a micro-batch hands over, the offsets of this rank's rows, and behind them frequencies and mask.
    of_rows = physical if cp_size == 1 else physical + form.has_seq_idx + 1
    of_freqs = physical + form.has_seq_idx + (1 if cp_size == 1 else 2)
    rotary = [freqs] if isinstance(freqs, Tensor) else [*(freqs or ())]
    metadata = {
        name: _offsets_spec(example, physical if name == "padded" else 0, -1 if end is None else end)
        for name, end in added.items()
    }
    metadata["valid_tokens"] = _C.MetadataSpec(
        kind=_C.SegmentKind.COUNT,
        example=valid_tokens,
        source=0 if cp_size == 1 else of_rows,
        shared=True,
    )
    end_buffer = "padded" if form.has_padded else "actual"
    if cp_size > 1 or added[end_buffer] is not None:  # where no other buffer ends with this rank's rows
        end_buffer = _ROWS
        metadata[_ROWS] = _offsets_spec(example // cp_size, of_rows)
    rows = hidden.size(0)
    # Rows that ranks share come padded from the embedding: no rank's rows end where the pack does.
    is_whole = rows == capacity.tokens
    has_mask = key.has_mask or has_experts(model.config)  # also of the rows past the pack's end
    if has_mask:
        metadata[_MASK] = _C.MetadataSpec(
            kind=_C.SegmentKind.MASK if is_whole else _C.SegmentKind.COPY,
            example=torch.zeros(rows, dtype=torch.bool, device=example.device),
            source=of_freqs + len(rotary) if key.has_mask else -1,
        )
    for index, like in enumerate(rotary):  # of all ranks' rows, too
        metadata[f"{_FREQS}.{index}"] = _C.MetadataSpec(
            kind=_C.SegmentKind.COPY,
            example=like.new_zeros(capacity.tokens, *like.shape[1:]),
            source=of_freqs + index,
        )
    if form.has_seq_idx:  # of all ranks' rows, of which those past the pack are no document's
        documents = torch.zeros(capacity.tokens, dtype=torch.int32, device=example.device)
        metadata[_SEQ_IDX] = _offsets_spec(documents, physical + 1, capacity.num_seqs)

    def arguments(buffers: Mapping[str, Tensor]) -> Mapping[str, Any]:
        own = {name: buffer.detach() for name, buffer in buffers.items()}  # objects of its own
        index = own[_SEQ_IDX].view(1, capacity.tokens) if form.has_seq_idx else None
        given = block_arguments(own["actual"], own.get("padded"), index)
        if rotary:
            staged = tuple(own[f"{_FREQS}.{index}"] for index in range(len(rotary)))
            given = {**given, _FREQS: staged if isinstance(freqs, tuple) else staged[0]}
        return {**given, _MASK: own[_MASK].view(1, rows)} if has_mask else given

    mode = "training" if model.decoder.training else "evaluation"
    # What sets its graphs apart from those of plain training packs.
    apart = "" if key.grad else "forward only", "with a padding mask" if key.has_mask else ""
    return VariantSpec(
        key=key,
        name=", ".join(filter(None, (mode, *apart, str(capacity)))),
        training=key.grad,
        rows=rows,
        row_shape=tuple(hidden.shape[1:]),
        dtype=hidden.dtype,
        metadata=metadata,
        end_source=of_rows if is_whole else -1,
        end_buffer=end_buffer if is_whole else None,
        fewer_rows=is_whole,
        arguments=arguments,
    )
