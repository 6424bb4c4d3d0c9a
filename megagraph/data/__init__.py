# SPDX-License-Identifier: Apache-2.0
"""Documents in, packs out: reading documents, drawing their lengths, packing them."""

from megagraph.data.documents import Document, DocumentError, load_documents, read_documents
from megagraph.data.lengths import lognormal_lengths
from megagraph.data.packers import (
    PACKERS,
    Pack,
    Packer,
    first_fit_packs,
    next_token_labels,
    position_ids,
    stream_packs,
)
from megagraph.data.paragraphs import split_at_blank_lines

__all__ = [
    "PACKERS",
    "Document",
    "DocumentError",
    "Pack",
    "Packer",
    "first_fit_packs",
    "load_documents",
    "lognormal_lengths",
    "next_token_labels",
    "position_ids",
    "read_documents",
    "split_at_blank_lines",
    "stream_packs",
]
