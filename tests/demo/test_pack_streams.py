# SPDX-License-Identifier: Apache-2.0
import itertools
from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagraph.demo.documents import Document
from megagraph.demo.packs import Pack, next_token_labels, position_ids, stream_packs

LIMIT = 50
lengths_strategy = st.lists(st.integers(1, LIMIT), max_size=60)
max_num_seqs_strategy = st.none() | st.integers(1, 6)


def make_documents(lengths: Iterable[int]) -> list[Document]:
    """Every token is unique, so that a lost, doubled or moved one shows."""
    documents, start = [], 0
    for index, length in enumerate(lengths):
        documents.append(Document(name=f"d{index}", tokens=torch.arange(start, start + length)))
        start += length
    return documents


def split_pack(pack: Pack) -> list[list[int]]:
    offsets = pack.cu_seqlens.tolist()
    return [pack.tokens[a:b].tolist() for a, b in pairwise(offsets)]


def check_packs(packs: list[Pack], max_num_seqs: int | None) -> None:
    for pack in packs:
        assert pack.tokens.dtype == torch.int64
        assert pack.cu_seqlens.dtype == torch.int32
        assert pack.cu_seqlens[0].item() == 0
        assert pack.cu_seqlens[-1].item() == pack.num_tokens == pack.tokens.numel()
        lengths = pack.cu_seqlens.diff()
        assert (lengths > 0).all()
        assert pack.max_seqlen == lengths.max().item()
        assert 1 <= pack.num_tokens <= LIMIT
        assert pack.num_seqs == lengths.numel()
        assert max_num_seqs is None or pack.num_seqs <= max_num_seqs


@given(lengths_strategy, max_num_seqs_strategy)
def test_streaming_keeps_every_token_once_and_in_order(lengths: list[int], max_num_seqs: int | None) -> None:
    documents = make_documents(lengths)
    packs = list(stream_packs(documents, LIMIT, max_num_seqs))
    check_packs(packs, max_num_seqs)
    assert [d for pack in packs for d in split_pack(pack)] == [d.tokens.tolist() for d in documents]
    for pack, following in pairwise(packs):  # which begins only if its first document did not fit
        is_out_of_seqs = pack.num_seqs == max_num_seqs
        assert is_out_of_seqs or pack.num_tokens + following.cu_seqlens[1].item() > LIMIT


def test_packs_come_before_the_documents_end_and_own_their_tokens() -> None:
    document = Document(name="d", tokens=torch.arange(LIMIT))
    packs = stream_packs(itertools.repeat(document), LIMIT)
    pack = next(packs)
    document.tokens.fill_(-1)
    assert pack.tokens.tolist() == list(range(LIMIT)) and next(packs).num_tokens == LIMIT


def test_documents_and_sizes_that_no_pack_takes_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"^document 'd1' of 51 tokens is over the limit of 50 tokens a pack$"
    ):
        list(stream_packs(make_documents([3, LIMIT + 1]), LIMIT))
    with pytest.raises(ValueError, match=r"^document 'd1': expected at least 1 token, got none$"):
        list(stream_packs(make_documents([3, 0]), LIMIT))
    for tokens in (0, 2**31):
        with pytest.raises(ValueError, match=rf"^expected a pack of \[1, 2147483647\] tokens, got {tokens}$"):
            stream_packs([], tokens)
    with pytest.raises(ValueError, match=r"^expected max_num_seqs of at least 1, got 0$"):
        stream_packs([], LIMIT, 0)


@given(st.lists(st.integers(1, LIMIT), min_size=1, max_size=20))
def test_positions_restart_and_labels_stop_at_every_document(lengths: list[int]) -> None:
    for pack in stream_packs(make_documents(lengths), LIMIT):
        labels, loss_mask = next_token_labels(pack)
        documents = split_pack(pack)
        assert position_ids(pack).tolist() == [p for d in documents for p in range(len(d))]
        assert labels.tolist() == [token for d in documents for token in [*d[1:], 0]]
        assert loss_mask.tolist() == [m for d in documents for m in [*[1.0] * (len(d) - 1), 0.0]]
        assert (labels.dtype, loss_mask.dtype) == (torch.int64, torch.float32)
        assert split_pack(pack) == documents, "labels leave the tokens as they were"
