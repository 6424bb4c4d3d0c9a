# SPDX-License-Identifier: Apache-2.0
"""Cuts long text documents at their blank lines, so that documents have lengths as people write them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from megagraph.demo.documents import Document

__all__ = ["split_at_blank_lines"]

_NEWLINE = ord("\n")


def split_at_blank_lines(
    documents: Iterable[Document], *, min_length: int = 1, max_length: int | None = None
) -> Iterator[Document]:
    """Yields each paragraph of byte-token documents as a document of its own.

    Keeps a paragraph's blank line at its end, and drops nothing but what is under `min_length`.

    Args:
        documents: of byte tokens.
        min_length: shorter paragraphs are dropped, in tokens.
        max_length: longer ones are cut into pieces of this length.
    """
    for document in documents:
        tokens = document.tokens
        blank = (tokens[:-1] == _NEWLINE) & (tokens[1:] == _NEWLINE)
        ends = (torch.nonzero(blank).flatten() + 2).tolist()
        start = 0
        for end in [*ends, tokens.numel()]:
            step = max_length or max(end - start, 1)
            for first in range(start, end, step):
                last = min(first + step, end)
                if last - first >= min_length:
                    yield Document(name=f"{document.name}[{first}:{last}]", tokens=tokens[first:last])
            start = max(start, end)
