# SPDX-License-Identifier: Apache-2.0
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagraph.demo.documents import Document
from megagraph.demo.paragraphs import split_at_blank_lines


def document(text: bytes) -> Document:
    return Document(name="d", tokens=torch.tensor(list(text), dtype=torch.int64))


def texts(pieces: list[Document]) -> list[bytes]:
    return [bytes(piece.tokens.tolist()) for piece in pieces]


def test_a_paragraph_ends_with_its_blank_line() -> None:
    pieces = list(split_at_blank_lines([document(b"one\n\ntwo\nmore\n\nthree")]))
    assert texts(pieces) == [b"one\n\n", b"two\nmore\n\n", b"three"]
    assert [piece.name for piece in pieces] == ["d[0:5]", "d[5:15]", "d[15:20]"]


def test_a_long_paragraph_is_cut_and_a_short_one_dropped() -> None:
    pieces = split_at_blank_lines([document(b"abcdefgh\n\nx\n\n\n")], min_length=3, max_length=4)
    assert texts(list(pieces)) == [b"abcd", b"efgh", b"x\n\n"]


@given(st.binary(min_size=1, max_size=60), st.integers(1, 9) | st.none())
def test_every_token_appears_once_in_order(data: bytes, limit: int | None) -> None:
    data = data.replace(b"a", b"\n")
    pieces = texts(list(split_at_blank_lines([document(data)], max_length=limit)))
    assert b"".join(pieces) == data
    assert limit is None or max(map(len, pieces)) <= limit
