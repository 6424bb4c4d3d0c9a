# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import json
import re
import sysconfig
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagraph.demo.documents import Document, DocumentError, load_documents, read_documents


def write_jsonl(folder: Path, *rows: object) -> Path:
    """Rows as JSON; a row of bytes goes in as it is."""
    path = folder / "docs.jsonl"
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    return path


def write_parquet(folder: Path, **columns: list[Any]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = folder / "docs.parquet"
    parquet.write_table(arrow.table(columns), path)
    return path


def write_files(folder: Path, **files: bytes) -> Path:
    for name, data in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def contents(documents: list[Document]) -> list[list[int]]:
    return [document.tokens.tolist() for document in documents]


def refuses(path: Path | None, message: str, **options: Any) -> None:
    """`message` is how it begins; FILE stands for the path."""
    expected = message.replace("FILE", str(path))
    with pytest.raises(DocumentError, match=f"^{re.escape(expected)}"):
        load_documents(path, **options)


def test_text_becomes_its_utf8_bytes(tmp_path: Path) -> None:
    (document,) = load_documents(write_jsonl(tmp_path, {"text": "aé"}))
    assert document.tokens.dtype == torch.int64
    assert document.tokens.tolist() == list("aé".encode())
    assert document.name == "docs.jsonl:1"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=8))
def test_any_text_comes_back_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("rows"), *({"text": text} for text in texts))
    assert [bytes(tokens).decode() for tokens in contents(load_documents(path))] == texts


def test_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"tokens": [0, 999]}, {"tokens": [5]})
    assert contents(load_documents(path, vocab_size=1000)) == [[0, 999], [5]]


def test_a_length_is_filled_from_its_row_number_alone(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"length": 300}, {"length": 300})
    first, second = load_documents(path, vocab_size=7)
    assert first.tokens.shape == (300,)
    assert first.tokens.dtype == torch.int64
    assert set(first.tokens.tolist()) == set(range(7))
    assert not torch.equal(first.tokens, second.tokens)
    assert contents(load_documents(path, vocab_size=7)) == contents([first, second])


def test_a_parquet_reads_like_the_same_jsonl(tmp_path: Path) -> None:
    values: dict[str, list[Any]] = {"text": ["ab", "c"], "tokens": [[1, 2], [3]], "length": [4, 5]}
    for column, rows in values.items():
        parquet = load_documents(write_parquet(tmp_path, **{column: rows}))
        jsonl = load_documents(write_jsonl(tmp_path, *({column: row} for row in rows)))
        assert contents(parquet) == contents(jsonl)
    assert [document.name for document in parquet] == ["docs.parquet:row 1", "docs.parquet:row 2"]


def test_a_parquet_of_several_batches_keeps_its_rows_in_order(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, tokens=[[i % 256] for i in range(1000)])
    assert contents(load_documents(path)) == [[i % 256] for i in range(1000)]


def test_text_goes_before_tokens_before_length(tmp_path: Path) -> None:
    assert contents(load_documents(write_jsonl(tmp_path, {"tokens": [7], "text": "a"}))) == [[97]]
    assert contents(load_documents(write_jsonl(tmp_path, {"length": 3, "tokens": [7]}))) == [[7]]


def test_the_chosen_column_goes_before_all(tmp_path: Path) -> None:
    row = {"length": 3, "tokens": [7], "text": "a"}
    assert contents(load_documents(write_jsonl(tmp_path, row), column="tokens")) == [[7]]
    path = write_parquet(tmp_path, **{name: [value] for name, value in row.items()})
    assert contents(load_documents(path, column="tokens")) == [[7]]


def test_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    path = tmp_path / "docs.JSONL"
    path.write_bytes(b'{"text": "a"}\r\n{"text": "b"}')
    assert contents(load_documents(path)) == [[97], [98]]


def test_a_folder_gives_its_text_files_in_order_of_path(tmp_path: Path) -> None:
    write_files(tmp_path, z=b"3", b__c=b"2", a_dot_txt=b"\xff")
    documents = load_documents(tmp_path)
    assert [document.name for document in documents] == ["a.txt", "b/c", "z"]
    assert contents(documents) == [[0xFF], [ord("2")], [ord("3")]]


def test_a_folder_skips_hidden_binary_and_short_files(tmp_path: Path) -> None:
    write_files(tmp_path, _dot_hidden=b"abc", _dot_git__config=b"abc", binary=b"a\0b", empty=b"", short=b"a")
    write_files(tmp_path, kept=b"abc")
    assert [document.name for document in load_documents(tmp_path, min_length=2)] == ["kept"]


def test_no_path_reads_the_standard_library_in_the_same_order_each_time() -> None:
    first = list(islice(read_documents(None, max_length=512, over_length="split"), 200))
    again = list(islice(read_documents(None, max_length=512, over_length="split"), 200))
    assert [document.name for document in first] == [document.name for document in again]
    assert contents(first) == contents(again)
    assert max(document.tokens.numel() for document in first) == 512


def test_the_standard_library_is_its_text_and_sources_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, LICENSE=b"a", b_dot_py=b"b", c__d_dot_txt=b"c", e_dot_so=b"d")
    write_files(tmp_path, **{"site-packages__f_dot_py": b"e", "test__g_dot_py": b"f"})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert [document.name for document in load_documents(None)] == ["LICENSE", "b.py", "c/d.txt"]


@given(length=st.integers(1, 200), limit=st.integers(1, 60))
def test_split_keeps_every_token_in_full_pieces_but_the_last(
    tmp_path_factory: pytest.TempPathFactory, length: int, limit: int
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("rows"), {"tokens": list(range(length))})
    pieces = contents(load_documents(path, max_length=limit, over_length="split"))
    assert [token for piece in pieces for token in piece] == list(range(length))
    assert all(len(piece) == limit for piece in pieces[:-1])
    assert 1 <= len(pieces[-1]) <= limit


def test_a_piece_is_named_by_its_range_and_dropped_below_the_minimum(tmp_path: Path) -> None:
    write_files(tmp_path, a=b"12345", b=b"1234", c=b"123")
    documents = load_documents(tmp_path, min_length=2, max_length=3, over_length="split")
    assert [document.name for document in documents] == ["a[0:3]", "a[3:5]", "b[0:3]", "c"]


def test_a_document_over_the_limit_is_refused(tmp_path: Path) -> None:
    over = "document of 9000 tokens is over the limit of 8192; shorten it or raise --max-document"
    for row in ({"text": "a" * 9000}, {"tokens": [1] * 9000}, {"length": 9000}):
        refuses(write_jsonl(tmp_path, {**row}), f"FILE:1: {over}", max_length=8192)
    refuses(write_parquet(tmp_path, length=[1, 9000]), f"FILE:row 2: {over}", max_length=8192)
    folder = write_files(tmp_path / "folder", a=b"a" * 9000)
    refuses(folder, f"FILE/a: {over}", max_length=8192)


def test_a_document_at_the_limit_is_taken(tmp_path: Path) -> None:
    (document,) = load_documents(write_jsonl(tmp_path, {"length": 8192}), max_length=8192)
    assert document.tokens.numel() == 8192


def test_an_empty_document_is_refused(tmp_path: Path) -> None:
    message = "document of 0 tokens is under the minimum of 1"
    refuses(write_jsonl(tmp_path, {"text": "a"}, {"text": ""}), f"FILE:2: {message}")
    refuses(write_jsonl(tmp_path, {"tokens": []}), f"FILE:1: {message}")
    refuses(write_parquet(tmp_path, text=["a", ""]), f"FILE:row 2: {message}")


@pytest.mark.parametrize("length", [0, -3, 2**31])
def test_a_length_no_pack_can_hold_is_refused(tmp_path: Path, length: int) -> None:
    message = f"expected a length in [1, 2147483647], got {length}"
    refuses(write_jsonl(tmp_path, {"length": length}), f"FILE:1: {message}")
    refuses(write_parquet(tmp_path, length=[length]), f"FILE:row 1: {message}")


# --- rows that are bad ------------------------------------------------------------------------

EXPECTED = "FILE:2: expected a JSON object with one of the columns text, tokens, length, got "


@pytest.mark.parametrize(
    ("line", "got"),
    [
        (b"{text: a}", "b'{text: a}\\n': Expecting property name"),
        (b'{"text": "a"', "b'{\"text\": \"a\"\\n': Expecting ',' delimiter"),
        (b'{"text": "\xff"}', "b'{\"text\": \"\\xff\"}\\n': 'utf-8' codec can't decode byte 0xff"),
        (b"[" * 200_000, "b'[[[[[[[[[[["),
        (b"", "a blank line"),
        (b"  ", "a blank line"),
        (b"[1, 2]", "a list ([1, 2])"),
        (b'"text"', "a string ('text')"),
        (b"17", "an integer (17)"),
        (b"null", "null"),
    ],
    ids=lambda value: value[:12].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_a_line_that_is_not_an_object_is_refused(tmp_path: Path, line: bytes, got: str) -> None:
    refuses(write_jsonl(tmp_path, {"text": "a"}, line), EXPECTED + got)


def test_a_row_without_a_column_of_ours_is_refused_naming_its_columns(tmp_path: Path) -> None:
    message = "expected one of the columns text, tokens, length; found "
    refuses(write_jsonl(tmp_path, {"id": 1, "title": "a"}), f"FILE:1: {message}id, title")
    refuses(write_jsonl(tmp_path, {}), f"FILE:1: {message}no columns")
    refuses(write_parquet(tmp_path, id=[1], title=["a"]), f"FILE: {message}id, title")


def test_an_absent_chosen_column_is_refused_naming_those_there(tmp_path: Path) -> None:
    message = "expected the column tokens; found text, id"
    refuses(write_jsonl(tmp_path, {"text": "a", "id": 1}), f"FILE:1: {message}", column="tokens")
    refuses(write_parquet(tmp_path, text=["a"], id=[1]), f"FILE: {message}", column="tokens")


def test_a_row_with_another_column_than_the_first_row_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"text": "a"}, {"tokens": [1]})
    refuses(path, "FILE:2: expected the column text; found tokens")


WRONG_TYPES = [
    ("text", 5, "expected a string in column text, got an integer (5)"),
    ("text", None, "expected a string in column text, got null"),
    ("text", {"a": 1}, "expected a string in column text, got an object"),
    ("tokens", "a", "expected a list of integers in column tokens, got a string ('a')"),
    ("tokens", [1, 2.5], "expected a list of integers in column tokens, got a number (2.5) at index 1"),
    ("tokens", [True], "expected a list of integers in column tokens, got a boolean (True) at index 0"),
    ("tokens", [None], "expected a list of integers in column tokens, got null at index 0"),
    ("length", "9", "expected an integer in column length, got a string ('9')"),
    ("length", 9.0, "expected an integer in column length, got a number (9.0)"),
    ("length", True, "expected an integer in column length, got a boolean (True)"),
]


@pytest.mark.parametrize(("column", "value", "message"), WRONG_TYPES)
def test_a_wrong_type_in_a_column_is_refused(tmp_path: Path, column: str, value: Any, message: str) -> None:
    refuses(write_jsonl(tmp_path, {column: value}), f"FILE:1: {message}")


def test_a_wrong_type_in_a_parquet_is_refused(tmp_path: Path) -> None:
    refuses(
        write_parquet(tmp_path, text=["a", None]), "FILE:row 2: expected a string in column text, got null"
    )
    message = "FILE:row 1: expected a string in column text, got bytes (b'a')"
    refuses(write_parquet(tmp_path, text=[b"a"]), message)


@pytest.mark.parametrize("token", [256, -1, 10**30])
def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path, token: int) -> None:
    path = write_jsonl(tmp_path, {"tokens": [0, 255]}, {"tokens": [0, token, 5]})
    refuses(path, f"FILE:2: expected tokens in [0, 256), got {token} at index 1")


def test_a_byte_outside_a_small_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"text": "aé"})
    refuses(path, "FILE:1: expected tokens in [0, 128), got 195 at index 1", vocab_size=128)


def test_text_with_half_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, b'{"text": "\\ud800"}')
    refuses(path, "FILE:1: expected text that UTF-8 can encode, got 'utf-8' codec can't encode")


# --- paths and arguments that are bad ---------------------------------------------------------


def test_a_source_without_documents_is_refused(tmp_path: Path) -> None:
    for name in ("docs.jsonl", "docs.parquet"):
        (tmp_path / name).touch()
        refuses(tmp_path / name, "FILE: expected at least one document, got an empty file")
    without_rows = write_parquet(tmp_path, text=[])
    refuses(without_rows, "FILE: expected at least one document, got a file without rows")
    folder = write_files(tmp_path / "folder", _dot_hidden=b"abc", binary=b"\0", empty=b"")
    refuses(folder, "FILE: expected at least one text file of 1 bytes or more, found none")


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "docs.parquet"
    path.write_bytes(b"this is not a parquet file at all")
    refuses(path, "FILE: expected a parquet file, got one that is not: ")


def test_a_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_pyarrow(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    path = tmp_path / "docs.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setattr(importlib, "import_module", without_pyarrow)
    refuses(path, "FILE: a .parquet file needs pyarrow: pip install megagraph[parquet]")


def test_a_path_that_is_none_of_ours_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"nowhere: expected a folder or a file, found nothing there$"):
        read_documents(tmp_path / "nowhere")
    write_files(tmp_path, docs_dot_csv=b"a,b")
    message = r"docs\.csv: expected a folder, a \.jsonl or a \.parquet file, got 'docs\.csv'$"
    with pytest.raises(DocumentError, match=message):
        read_documents(tmp_path / "docs.csv")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, r"^expected vocab_size of at least 1, got 0$"),
        ({"min_length": 0}, r"^expected min_length of at least 1, got 0$"),
        ({"min_length": 9, "max_length": 8}, r"^expected max_length of at least min_length \(9\), got 8$"),
        ({"over_length": "cut"}, r"^expected over_length 'error' or 'split', got 'cut'$"),
        ({"column": "body"}, r"^expected column to be one of text, tokens, length, got 'body'$"),
        ({"column": "text"}, r"^expected no column for text files, got 'text'$"),
    ],
)
def test_an_argument_out_of_range_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_documents(None, **options)


def test_reading_gives_good_rows_before_a_bad_one(tmp_path: Path) -> None:
    documents = read_documents(write_jsonl(tmp_path, {"text": "a"}, b"bad"))
    assert next(documents).tokens.tolist() == [97]
    with pytest.raises(DocumentError, match=r"docs\.jsonl:2: expected a JSON object"):
        next(documents)


def test_loading_counts_the_documents_as_they_come(tmp_path: Path) -> None:
    counts: list[int] = []
    load_documents(write_jsonl(tmp_path, *[{"text": "a"}] * 3), progress=counts.append)
    assert counts == [1, 2, 3]
