# SPDX-License-Identifier: Apache-2.0
"""Turns documents into packs: several documents end to end, with the offsets between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from megagraph.demo.documents import Document

__all__ = ["Pack", "next_token_labels", "position_ids", "stream_packs"]

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Pack:
    """Documents end to end. Not padded: ``T`` differs from pack to pack.

    Args:
        tokens: int64 ``[T]``.
        cu_seqlens: where each document starts, and last where the last one ends; int32 ``[N + 1]``.
        max_seqlen: length of the longest document, in tokens.
    """

    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int

    @property
    def num_seqs(self) -> int:
        """Number of documents, ``N``."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens, ``T``."""
        return self.tokens.numel()


def stream_packs(
    documents: Iterable[Document], tokens: int, max_num_seqs: int | None = None
) -> Iterator[Pack]:
    """Packs documents in their order: one that does not fit the pack at hand begins the next.

    Cuts no document and looks at none ahead, so packs are not full.

    Args:
        documents: what to pack.
        tokens: the most tokens of a pack.
        max_num_seqs: the most documents of a pack, or None.

    Returns:
        An iterator of `Pack`; the last one holds what was left.

    Raises:
        ValueError: on a bad limit, at once; on an empty document or one longer than `tokens`, when
            it is reached.
    """
    if not 1 <= tokens <= _MAX_INT32:
        raise ValueError(f"expected a pack of [1, {_MAX_INT32}] tokens, got {tokens}")
    if max_num_seqs is not None and max_num_seqs < 1:
        raise ValueError(f"expected max_num_seqs of at least 1, got {max_num_seqs}")

    def stream() -> Iterator[Pack]:
        pack: list[torch.Tensor] = []
        room = tokens
        for document in documents:
            length = _length_of(document, tokens)
            if length > room or len(pack) == max_num_seqs:
                yield _closed(pack)
                pack, room = [], tokens
            pack.append(document.tokens)
            room -= length
        if pack:
            yield _closed(pack)

    return stream()


def position_ids(pack: Pack) -> torch.Tensor:
    """Positions of a pack's tokens, each counted from the start of its own document; int64 ``[T]``."""
    cu_seqlens = pack.cu_seqlens.to(torch.int64)
    starts_T = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=pack.num_tokens)
    return torch.arange(pack.num_tokens, device=pack.tokens.device) - starts_T


def next_token_labels(pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token of a pack the next one of the same document, int64 ``[T]``; and a loss mask, float32.

    A document's last token has none: its label is 0, a valid index for any loss, and its mask 0.
    """
    last = pack.cu_seqlens[1:].to(torch.int64) - 1
    labels_T = pack.tokens.roll(-1).index_fill(0, last, 0)
    mask_T = torch.ones_like(pack.tokens, dtype=torch.float32).index_fill(0, last, 0.0)
    return labels_T, mask_T


def _length_of(document: Document, tokens: int) -> int:
    """The document's length, if a pack of `tokens` can hold it."""
    length = document.tokens.numel()
    if length == 0:
        raise ValueError(f"document {document.name!r}: expected at least 1 token, got none")
    if length > tokens:
        raise ValueError(
            f"document {document.name!r} of {length} tokens is over the limit of {tokens} tokens a pack"
        )
    return length


def _closed(documents: list[torch.Tensor]) -> Pack:
    lengths = [tokens.numel() for tokens in documents]
    return Pack(
        tokens=torch.cat(documents),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
    )
