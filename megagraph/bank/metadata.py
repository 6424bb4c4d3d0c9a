# SPDX-License-Identifier: Apache-2.0
"""Buffers of metadata that graphs read: how staging fills them, and the same for a call that runs eager.

Launches no staging; csrc/bank/staging/staging.h does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megagraph import _C

__all__ = ["MetadataSpec", "mask_content"]

_Kind = _C.SegmentKind


def mask_content(rows: int, given: Tensor | None, end: Tensor) -> Tensor:
    """What staging writes into a mask, bool [rows]. Never waits for the device.

    Args:
        rows: of the buffer.
        given: bool, as many entries or fewer; rows past them are masked. None masks by the end alone.
        end: the pack's physical end, of one entry: rows at or past it are masked.
    """
    out = torch.arange(rows, device=end.device) >= end
    if given is not None:
        out[: given.numel()] |= given
        out[given.numel() :] = True
    return out


class MetadataSpec(_C.MetadataSpec):
    """A small buffer that graphs read and that staging refills for each micro-batch.

    Args:
        kind: how staging fills it (csrc/bank/staging/staging.h).
        example: its content during warm-up and capture, [entries].
        source: index into what a micro-batch hands over; -1 for none: a mask then has the pack's end alone,
            and any other buffer is constant.
        fill: int32 that fills the entries past the source's; -1 repeats the source's last one.
        extend_last: whether the last given offset, too, becomes `fill`.
        shared: one buffer for all slots, the example itself (a counter).
    """

    def __init__(
        self,
        *,
        kind: _C.SegmentKind,
        example: Tensor,
        source: int = -1,
        fill: int = -1,
        extend_last: bool = False,
        shared: bool = False,
    ) -> None:
        super().__init__(
            kind=kind, example=example, source=source, fill=fill, extend_last=extend_last, shared=shared
        )
        self._kind, self._source = kind, source
        self._fill, self._extend_last = fill, extend_last

    @property
    def is_staged(self) -> bool:
        """Whether its content differs from micro-batch to micro-batch."""
        return self._source >= 0 or self._kind == _Kind.MASK

    def content(self, buffer: Tensor, sources: Sequence[Tensor], end: Tensor | None) -> Tensor:
        """What staging would write for a micro-batch, in memory of its own.

        A call that runs eager may need it in its backward pass, when `buffer` holds another micro-batch's.
        Counters and constants are `buffer` itself. Never waits for the device.

        Args:
            buffer: the slot's.
            sources: what the micro-batch handed over.
            end: the pack's physical end, of one entry; a mask needs it.
        """
        if not self.is_staged or self._kind == _Kind.COUNT:
            return buffer
        source = None if self._source < 0 else sources[self._source].flatten()
        if self._kind == _Kind.MASK:
            assert end is not None
            return mask_content(buffer.numel(), source, end).view(buffer.shape)
        assert source is not None
        if self._kind == _Kind.OFFSETS:
            return self._offsets(buffer, source)
        out = torch.zeros_like(buffer, memory_format=torch.contiguous_format)
        out.view(-1)[: source.numel()] = source
        return out

    def _offsets(self, buffer: Tensor, source: Tensor) -> Tensor:
        given = source[:-1] if self._extend_last and source.numel() > 1 else source
        out = source[-1:].expand(buffer.numel()).clone()
        if self._fill >= 0:
            out.fill_(self._fill)
        out[: given.numel()] = given
        return out.view(buffer.shape)
