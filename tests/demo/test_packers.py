# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagraph.demo.documents import Document
from megagraph.demo.packers import (
    PACKERS,
    Pack,
    first_fit_packs,
    next_token_labels,
    position_ids,
    stream_packs,
)

LIMIT = 50
lengths_strategy = st.lists(st.integers(1, LIMIT), max_size=60)
max_num_seqs_strategy = st.none() | st.integers(1, 6)
open_packs_strategy = st.integers(1, 5)


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


def pack_lengths(packs: Iterable[Pack]) -> list[list[int]]:
    return [pack.cu_seqlens.diff().tolist() for pack in packs]


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


def assert_equal_packs(packs: list[Pack], others: list[Pack]) -> None:
    assert len(packs) == len(others)
    for pack, other in zip(packs, others, strict=True):
        assert torch.equal(pack.tokens, other.tokens)
        assert torch.equal(pack.cu_seqlens, other.cu_seqlens)
        assert pack.max_seqlen == other.max_seqlen


@given(lengths_strategy, max_num_seqs_strategy)
def test_streaming_keeps_every_token_once_and_in_order(lengths: list[int], max_num_seqs: int | None) -> None:
    documents = make_documents(lengths)
    packs = list(stream_packs(documents, LIMIT, max_num_seqs))
    check_packs(packs, max_num_seqs)
    assert [d for pack in packs for d in split_pack(pack)] == [d.tokens.tolist() for d in documents]


@given(lengths_strategy, max_num_seqs_strategy)
def test_streaming_begins_a_pack_only_where_the_document_did_not_fit(
    lengths: list[int], max_num_seqs: int | None
) -> None:
    packs = list(stream_packs(make_documents(lengths), LIMIT, max_num_seqs))
    for pack, following in pairwise(packs):
        is_out_of_seqs = pack.num_seqs == max_num_seqs
        assert is_out_of_seqs or pack.num_tokens + following.cu_seqlens[1].item() > LIMIT


@given(lengths_strategy, max_num_seqs_strategy, open_packs_strategy)
def test_first_fit_keeps_every_document_once_and_whole(
    lengths: list[int], max_num_seqs: int | None, open_packs: int
) -> None:
    documents = make_documents(lengths)
    packs = list(first_fit_packs(documents, LIMIT, max_num_seqs, open_packs=open_packs))
    check_packs(packs, max_num_seqs)
    packed = sorted(d for pack in packs for d in split_pack(pack))
    assert packed == [d.tokens.tolist() for d in documents]


@given(lengths_strategy, max_num_seqs_strategy, open_packs_strategy)
def test_first_fit_keeps_the_order_of_documents_within_a_pack(
    lengths: list[int], max_num_seqs: int | None, open_packs: int
) -> None:
    for pack in first_fit_packs(make_documents(lengths), LIMIT, max_num_seqs, open_packs=open_packs):
        assert pack.tokens.tolist() == sorted(pack.tokens.tolist())


@given(lengths_strategy, max_num_seqs_strategy)
def test_first_fit_over_one_open_pack_packs_like_streaming(
    lengths: list[int], max_num_seqs: int | None
) -> None:
    documents = make_documents(lengths)
    first_fit = first_fit_packs(documents, LIMIT, max_num_seqs, open_packs=1)
    assert_equal_packs(list(first_fit), list(stream_packs(documents, LIMIT, max_num_seqs)))


@given(lengths_strategy, max_num_seqs_strategy)
def test_the_same_documents_give_the_same_packs(lengths: list[int], max_num_seqs: int | None) -> None:
    for packer in PACKERS.values():
        first = list(packer(make_documents(lengths), LIMIT, max_num_seqs))
        assert_equal_packs(first, list(packer(make_documents(lengths), LIMIT, max_num_seqs)))


def test_first_fit_fills_the_oldest_pack_with_room() -> None:
    packs = first_fit_packs(make_documents([30, 40, 10, 10, 20]), LIMIT)
    assert pack_lengths(packs) == [[30, 10, 10], [40], [20]]


def test_first_fit_gives_out_the_fullest_pack_when_its_buffer_is_full() -> None:
    packs = first_fit_packs(make_documents([30, 40, 45, 20]), LIMIT, open_packs=2)
    assert pack_lengths(packs) == [[40], [30, 20], [45]]


def test_first_fit_gives_out_the_oldest_of_equally_full_packs() -> None:
    packs = list(first_fit_packs(make_documents([40, 40, 40]), LIMIT, open_packs=2))
    assert [pack.tokens[0].item() for pack in packs] == [0, 40, 80]


def test_first_fit_leaves_less_room_than_streaming() -> None:
    documents = make_documents([40, 30, 10, 20] * 8)
    assert len(list(first_fit_packs(documents, LIMIT))) == 16
    assert len(list(stream_packs(documents, LIMIT))) == 24


@pytest.mark.parametrize("packer", [stream_packs, first_fit_packs])
def test_packs_come_before_the_documents_end(packer: Callable[..., Iterator[Pack]]) -> None:
    def endless() -> Iterator[Document]:
        while True:
            yield Document(name="d", tokens=torch.arange(LIMIT))

    packs = packer(endless(), LIMIT)
    assert next(packs).num_tokens == next(packs).num_tokens == LIMIT


@pytest.mark.parametrize("packer", [stream_packs, first_fit_packs])
def test_no_documents_give_no_packs(packer: Callable[..., Iterator[Pack]]) -> None:
    assert list(packer([], LIMIT)) == []


@pytest.mark.parametrize("packer", [stream_packs, first_fit_packs])
def test_a_pack_owns_its_tokens(packer: Callable[..., Iterator[Pack]]) -> None:
    documents = make_documents([LIMIT])
    (pack,) = packer(documents, LIMIT)
    documents[0].tokens.fill_(-1)
    assert pack.tokens.tolist() == list(range(LIMIT))


def test_the_packers_go_by_their_names() -> None:
    assert dict(PACKERS) == {"streaming": stream_packs, "first-fit": first_fit_packs}


@pytest.mark.parametrize("packer", PACKERS.values(), ids=PACKERS.keys())
class TestRefuses:
    def test_a_document_longer_than_a_pack_naming_it(self, packer: Callable[..., Iterator[Pack]]) -> None:
        packs = packer(make_documents([LIMIT, LIMIT + 1]), LIMIT)
        with pytest.raises(
            ValueError, match=r"^document 'd1' of 51 tokens is over the limit of 50 tokens a pack$"
        ):
            list(packs)

    def test_an_empty_document_naming_it(self, packer: Callable[..., Iterator[Pack]]) -> None:
        with pytest.raises(ValueError, match=r"^document 'd1': expected at least 1 token, got none$"):
            list(packer(make_documents([3, 0]), LIMIT))

    @pytest.mark.parametrize("tokens", [0, 2**31])
    def test_a_pack_size_that_int32_offsets_cannot_hold_at_once(
        self, packer: Callable[..., Iterator[Pack]], tokens: int
    ) -> None:
        with pytest.raises(ValueError, match=rf"^expected a pack of \[1, 2147483647\] tokens, got {tokens}$"):
            packer([], tokens)

    def test_a_pack_of_no_documents_at_once(self, packer: Callable[..., Iterator[Pack]]) -> None:
        with pytest.raises(ValueError, match=r"^expected max_num_seqs of at least 1, got 0$"):
            packer([], LIMIT, 0)


def test_first_fit_refuses_a_buffer_of_no_packs_at_once() -> None:
    with pytest.raises(ValueError, match=r"^expected open_packs of at least 1, got 0$"):
        first_fit_packs([], LIMIT, open_packs=0)


def test_positions_and_labels_of_a_pack_written_out() -> None:
    (pack,) = stream_packs(make_documents([3, 1, 2]), LIMIT)
    labels, loss_mask = next_token_labels(pack)
    assert position_ids(pack).tolist() == [0, 1, 2, 0, 0, 1]
    assert labels.tolist() == [1, 2, 0, 0, 5, 0]
    assert loss_mask.tolist() == [1, 1, 0, 0, 1, 0]
    assert (labels.dtype, loss_mask.dtype) == (torch.int64, torch.float32)


@given(st.lists(st.integers(1, LIMIT), min_size=1, max_size=20))
def test_positions_restart_and_labels_stop_at_every_document(lengths: list[int]) -> None:
    for pack in stream_packs(make_documents(lengths), LIMIT):
        labels, loss_mask = next_token_labels(pack)
        documents = split_pack(pack)
        assert position_ids(pack).tolist() == [p for d in documents for p in range(len(d))]
        assert labels.tolist() == [token for d in documents for token in [*d[1:], 0]]
        assert loss_mask.tolist() == [m for d in documents for m in [*[1.0] * (len(d) - 1), 0.0]]


def test_labels_leave_the_tokens_as_they_were() -> None:
    (pack,) = stream_packs(make_documents([4, 5]), LIMIT)
    next_token_labels(pack)
    assert pack.tokens.tolist() == list(range(9))
