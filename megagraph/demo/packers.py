# SPDX-License-Identifier: Apache-2.0
"""Turns documents into packs: several documents end to end, with the offsets between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Protocol

import torch

from megagraph.demo.documents import Document

__all__ = [
    "PACKERS",
    "Pack",
    "Packer",
    "first_fit_packs",
    "next_token_labels",
    "position_ids",
    "stream_packs",
]

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


class Packer(Protocol):
    """What every entry of `PACKERS` takes and gives."""

    def __call__(
        self, documents: Iterable[Document], tokens: int, max_num_seqs: int | None = None
    ) -> Iterator[Pack]:
        """Packs `documents` into packs of at most `tokens` tokens and `max_num_seqs` documents."""
        ...


@dataclass(kw_only=True)
class _OpenPack:
    """A pack that still takes documents."""

    max_tokens: int
    max_num_seqs: int | None
    documents: list[torch.Tensor] = field(default_factory=list)
    num_tokens: int = 0

    def fits(self, length: int) -> bool:
        return self.num_tokens + length <= self.max_tokens and not self.is_out_of_seqs

    @property
    def is_out_of_seqs(self) -> bool:
        return self.max_num_seqs is not None and len(self.documents) >= self.max_num_seqs

    @property
    def is_full(self) -> bool:
        return self.num_tokens == self.max_tokens or self.is_out_of_seqs

    def add(self, tokens: torch.Tensor) -> None:
        self.documents.append(tokens)
        self.num_tokens += tokens.numel()

    def close(self) -> Pack:
        lengths = [tokens.numel() for tokens in self.documents]
        return Pack(
            tokens=torch.cat(self.documents),
            cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            max_seqlen=max(lengths),
        )


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
    _check_limits(tokens, max_num_seqs)
    return _stream(documents, tokens, max_num_seqs)


def first_fit_packs(
    documents: Iterable[Document], tokens: int, max_num_seqs: int | None = None, *, open_packs: int = 64
) -> Iterator[Pack]:
    """Puts each document into the first open pack that has room for it.

    Fuller packs than `stream_packs`, out of order: documents move between packs, and never within
    themselves. A pack leaves when it is full, or as the fullest (the oldest among equals) when a
    document fits none of `open_packs` packs; the rest leave at the end, oldest first.

    Args:
        documents: what to pack.
        tokens: the most tokens of a pack.
        max_num_seqs: the most documents of a pack, or None.
        open_packs: how many packs may be open at a time: bounds memory and reordering.

    Returns:
        An iterator of `Pack`.

    Raises:
        ValueError: on a bad limit, at once; on an empty document or one longer than `tokens`, when
            it is reached.
    """
    _check_limits(tokens, max_num_seqs)
    if open_packs < 1:
        raise ValueError(f"expected open_packs of at least 1, got {open_packs}")
    return _first_fit(documents, tokens, max_num_seqs, open_packs)


PACKERS: Mapping[str, Packer] = MappingProxyType({"streaming": stream_packs, "first-fit": first_fit_packs})


def position_ids(pack: Pack) -> torch.Tensor:
    """Positions of a pack's tokens, each counted from the start of its own document.

    Args:
        pack: `T` tokens.

    Returns:
        int64 ``[T]``, on the device of `pack`.
    """
    cu_seqlens = pack.cu_seqlens.to(torch.int64)
    starts_T = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=pack.num_tokens)
    return torch.arange(pack.num_tokens, device=pack.tokens.device) - starts_T


def next_token_labels(pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels of a pack: for each token the next one of the same document.

    A document's last token has none: its label is 0, a valid index for any loss, and its mask 0.

    Args:
        pack: `T` tokens.

    Returns:
        Labels, int64 ``[T]``, and loss mask, float32 ``[T]``, on the device of `pack`.
    """
    last = pack.cu_seqlens[1:].to(torch.int64) - 1
    labels_T = pack.tokens.roll(-1).index_fill(0, last, 0)
    mask_T = torch.ones_like(pack.tokens, dtype=torch.float32).index_fill(0, last, 0.0)
    return labels_T, mask_T


def _check_limits(tokens: int, max_num_seqs: int | None) -> None:
    if not 1 <= tokens <= _MAX_INT32:
        raise ValueError(f"expected a pack of [1, {_MAX_INT32}] tokens, got {tokens}")
    if max_num_seqs is not None and max_num_seqs < 1:
        raise ValueError(f"expected max_num_seqs of at least 1, got {max_num_seqs}")


def _check_document(document: Document, tokens: int) -> int:
    """The document's length, if it can be packed."""
    length = document.tokens.numel()
    if length == 0:
        raise ValueError(f"document {document.name!r}: expected at least 1 token, got none")
    if length > tokens:
        raise ValueError(
            f"document {document.name!r} of {length} tokens is over the limit of {tokens} tokens a pack"
        )
    return length


def _stream(documents: Iterable[Document], tokens: int, max_num_seqs: int | None) -> Iterator[Pack]:
    pack = _OpenPack(max_tokens=tokens, max_num_seqs=max_num_seqs)
    for document in documents:
        if not pack.fits(_check_document(document, tokens)):
            yield pack.close()
            pack = _OpenPack(max_tokens=tokens, max_num_seqs=max_num_seqs)
        pack.add(document.tokens)
    if pack.documents:
        yield pack.close()


def _first_fit(
    documents: Iterable[Document], tokens: int, max_num_seqs: int | None, open_packs: int
) -> Iterator[Pack]:
    buffer: list[_OpenPack] = []  # oldest first
    for document in documents:
        length = _check_document(document, tokens)
        pack = next((pack for pack in buffer if pack.fits(length)), None)
        if pack is None:
            if len(buffer) == open_packs:
                fullest = max(range(open_packs), key=lambda i: buffer[i].num_tokens)
                yield buffer.pop(fullest).close()
            pack = _OpenPack(max_tokens=tokens, max_num_seqs=max_num_seqs)
            buffer.append(pack)
        pack.add(document.tokens)
        if pack.is_full:
            buffer = [other for other in buffer if other is not pack]
            yield pack.close()
    for pack in buffer:
        yield pack.close()
