# SPDX-License-Identifier: Apache-2.0
"""Documents of the demo, and packs of a stream of them."""

import re
import sysconfig
import tempfile
from collections.abc import Iterable
from itertools import accumulate, pairwise, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_scripts import Files

from megagraph.demo.documents import Document, DocumentError, load_documents
from megagraph.demo.packs import Pack, next_token_labels, position_ids, stream_packs


def texts(documents: Iterable[Document]) -> list[bytes]:
    return [bytes(document.tokens.tolist()) for document in documents]


def refuses(path: Path | None, message: str, **options: Any) -> None:
    """`message` is how it begins; FILE stands for the path."""
    with pytest.raises(DocumentError, match="^" + re.escape(message.replace("FILE", str(path)))):
        load_documents(path, **options)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=8))
def test_any_text_comes_back_byte_for_byte(tmp_path_factory: pytest.TempPathFactory, rows: list[str]) -> None:
    path = Files(tmp_path_factory.mktemp("rows")).jsonl(*({"text": text} for text in rows))
    documents = [*load_documents(path)]
    assert [text.decode() for text in texts(documents)] == rows
    assert [document.name for document in documents] == [f"docs.jsonl:{it + 1}" for it in range(len(rows))]


def test_a_length_is_filled_from_its_row_number_alone(tmp_path: Path) -> None:
    path = Files(tmp_path).jsonl({"length": 9000}, {"length": 9000})
    first, second = load_documents(path, max_length=9000)
    assert first.tokens.shape == (9000,) and first.tokens.dtype == torch.int64
    assert set(first.tokens.tolist()) == set(range(256))
    assert not torch.equal(first.tokens, second.tokens)
    assert texts(load_documents(path)) == texts([first, second])


def test_text_goes_before_tokens_and_these_before_a_length(tmp_path: Path) -> None:
    path = tmp_path / "docs.JSONL"
    for lines, expected in (
        (b'{"tokens": [0, 255]}\n{"tokens": [5]}\n', [b"\x00\xff", b"\x05"]),
        (b'{"tokens": [7], "text": "a"}\n', [b"a"]),
        (b'{"length": 3, "tokens": [7]}\n', [b"\x07"]),
        (b'{"text": "a"}\r\n{"text": "b"}', [b"a", b"b"]),  # the last line needs no newline
    ):
        path.write_bytes(lines)
        assert texts(load_documents(path)) == expected


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of that of Python's own library."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_the_standard_library_is_its_text_and_sources_only_in_the_same_order_each_time(library: Path) -> None:
    files = {"LICENSE": b"a", "b.py": b"b", "c/d.txt": b"c", "e.so": b"d", "f.py": b"a\0b", "empty.py": b""}
    files |= {"site-packages/f.py": b"e", "test/g.py": b"f", ".hidden.py": b"g", ".git/h.py": b"h"}
    for name, data in files.items():
        (library / name).parent.mkdir(exist_ok=True)
        (library / name).write_bytes(data)
    assert [it.name for it in load_documents(None)] == ["LICENSE[0:1]", "b.py[0:1]", "c/d.txt[0:1]"]


def test_a_paragraph_ends_with_its_blank_line_and_is_cut_if_long_and_dropped_if_short(library: Path) -> None:
    (library / "d.py").write_bytes(b"one\n\ntwo\nmore\n\nthree")
    documents = [*load_documents(None)]
    assert texts(documents) == [b"one\n\n", b"two\nmore\n\n", b"three"]
    assert [document.name for document in documents] == ["d.py[0:5]", "d.py[5:15]", "d.py[15:20]"]
    (library / "d.py").write_bytes(b"abcdefgh\n\nx\n\n\n")
    assert texts(load_documents(None, min_length=3, max_length=4)) == [b"abcd", b"efgh", b"x\n\n"]


@given(st.binary(min_size=1, max_size=60), st.integers(1, 9) | st.none())
def test_every_token_of_a_text_appears_once_in_order(data: bytes, limit: int | None) -> None:
    data = data.replace(b"a", b"\n").replace(b"\0", b"b")
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sysconfig, "get_path", lambda _: folder):
        Path(folder, "d.py").write_bytes(data)
        pieces = texts(load_documents(None, max_length=limit))
    assert b"".join(pieces) == data
    assert limit is None or max(map(len, pieces)) <= limit


NO_ROW = "expected a JSON object with one of the columns text, tokens, length, got "
OVER = "document of 900 tokens is over the limit of 800; shorten it, or raise --max-document or --pack-tokens"
EMPTY = "document of 0 tokens is under the minimum of 1"
NO_COLUMN = "expected one of the columns text, tokens, length; found "
NO_LIST = "expected a list of integers in column tokens, got "


# The last of these rows is the bad one.
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([b"{text: a}"], NO_ROW + "b'{text: a}\\n': Expecting property name"),
        ([b'{"text": "\xff"}'], NO_ROW + "b'{\"text\": \"\\xff\"}\\n': 'utf-8' codec can't decode byte 0xff"),
        ([b"[" * 200_000], NO_ROW + "b'[[[[[[[[[[["),
        *(([{"text": "a"}, blank], NO_ROW + "a blank line") for blank in (b"", b"  ")),
        ([[1, 2]], NO_ROW + "a list ([1, 2])"),
        (["text"], NO_ROW + "a string ('text')"),
        ([None], NO_ROW + "null"),
        *(([{"text": "a"}, {"text": text}], why) for text, why in (("a" * 900, OVER), ("", EMPTY))),
        ([{"tokens": [1] * 900}], OVER),
        ([{"length": 900}], OVER),
        *(([{"length": it}], f"expected a length in [1, 2147483647], got {it}") for it in (0, -3, 2**31)),
        ([{"id": 1, "title": "a"}], f"{NO_COLUMN}id, title"),
        ([{}], f"{NO_COLUMN}no columns"),
        ([{"text": "a"}, {"tokens": [1]}], "expected the column text; found tokens"),
        ([{"text": 5}], "expected a string in column text, got an integer (5)"),
        ([{"text": {"a": 1}}], "expected a string in column text, got an object"),
        ([{"tokens": "a"}], f"{NO_LIST}a string ('a')"),
        ([{"tokens": [1, 2.5]}], f"{NO_LIST}a number (2.5) at index 1"),
        ([{"tokens": [True]}], f"{NO_LIST}a boolean (True) at index 0"),
        ([{"length": True}], "expected an integer in column length, got a boolean (True)"),
        *(([{"tokens": [0, it]}], f"expected tokens in [0, 256), got {it} at index 1") for it in (256, -1)),
        ([b'{"text": "\\ud800"}'], "expected text that UTF-8 can encode, got 'utf-8' codec can't encode"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_row_that_cannot_be_used_is_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    refuses(Files(tmp_path).jsonl(*rows), f"FILE:{len(rows)}: {message}", max_length=800)


def test_a_path_that_is_no_jsonl_with_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").touch()
    (tmp_path / "docs.csv").write_bytes(b"a,b")
    refuses(tmp_path / "docs.jsonl", "FILE: expected at least one document, got an empty file")
    refuses(tmp_path / "nowhere.jsonl", "FILE: expected a .jsonl file, found nothing there")
    refuses(tmp_path, "FILE: expected a .jsonl file, found a folder")
    refuses(tmp_path / "docs.csv", "FILE: expected a .jsonl file, found 'docs.csv'")


def test_a_limit_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^expected min_length of at least 1, got 0$"):
        load_documents(None, min_length=0)
    with pytest.raises(ValueError, match=r"^expected max_length of at least min_length \(9\), got 8$"):
        load_documents(None, min_length=9, max_length=8)


# -- packs of a stream -------------------------------------------------------------------------------

LIMIT = 50


def make_documents(lengths: Iterable[int]) -> list[Document]:
    """Every token is unique, so that a lost, doubled or moved one shows."""
    ends = accumulate(lengths, initial=0)
    return [Document(name=f"d{n}", tokens=torch.arange(*ends)) for n, ends in enumerate(pairwise(ends))]


def split_pack(pack: Pack) -> list[list[int]]:
    return [pack.tokens[a:b].tolist() for a, b in pairwise(pack.cu_seqlens.tolist())]


@given(st.lists(st.integers(1, LIMIT), max_size=60), st.none() | st.integers(1, 6))
def test_streaming_keeps_every_token_once_and_in_order(lengths: list[int], max_num_seqs: int | None) -> None:
    documents = make_documents(lengths)
    packs = list(stream_packs(documents, LIMIT, max_num_seqs))
    for pack in packs:
        assert (pack.tokens.dtype, pack.cu_seqlens.dtype) == (torch.int64, torch.int32)
        assert pack.cu_seqlens[0].item() == 0
        assert pack.cu_seqlens[-1].item() == pack.num_tokens == pack.tokens.numel()
        in_pack = pack.cu_seqlens.diff()
        assert (in_pack > 0).all() and pack.max_seqlen == in_pack.max().item()
        assert 1 <= pack.num_tokens <= LIMIT and pack.num_seqs == in_pack.numel()
        assert max_num_seqs is None or pack.num_seqs <= max_num_seqs
    assert [d for pack in packs for d in split_pack(pack)] == [d.tokens.tolist() for d in documents]
    for pack, following in pairwise(packs):  # which begins only if its first document did not fit
        assert pack.num_seqs == max_num_seqs or pack.num_tokens + following.cu_seqlens[1].item() > LIMIT


def test_packs_come_before_the_documents_end_and_own_their_tokens() -> None:
    document = Document(name="d", tokens=torch.arange(LIMIT))
    packs = stream_packs(repeat(document), LIMIT)
    pack = next(packs)
    document.tokens.fill_(-1)
    assert pack.tokens.tolist() == list(range(LIMIT)) and next(packs).num_tokens == LIMIT


def test_documents_and_sizes_that_no_pack_takes_are_refused_by_name() -> None:
    said = r"^document 'd1' of 51 tokens is over the limit of 50 tokens a pack$"
    with pytest.raises(ValueError, match=said):
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
