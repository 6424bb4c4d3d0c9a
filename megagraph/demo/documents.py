# SPDX-License-Identifier: Apache-2.0
"""Reads documents as tokens: the rows of a ``.jsonl``, or the paragraphs of Python's own library.

Text becomes one token a byte. There is no tokenizer here: bring ``tokens`` for that.
"""

from __future__ import annotations

import json
import os
import reprlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["VOCAB", "Document", "DocumentError", "load_documents"]

VOCAB = 256  # a token is a byte

# In order of preference: tokenized data often carries a `length` beside its `tokens`.
_COLUMNS = ("text", "tokens", "length")
_MAX_INT32 = 2**31 - 1  # packs index their tokens with int32
_NEWLINE = ord("\n")

# `test` is there or not depending on who packaged Python; the other two are not Python's own text.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test"})

_JSON_NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}


class _Limits(NamedTuple):
    """Of a document's length, in tokens."""

    least: int
    most: int | None

    def check(self, where: str, length: int) -> None:
        if length < self.least:
            raise DocumentError(f"{where}: document of {length} tokens is under the minimum of {self.least}")
        if self.most is not None and length > self.most:
            why = f"over the limit of {self.most}; shorten it, or raise --max-document or --pack-tokens"
            raise DocumentError(f"{where}: document of {length} tokens is {why}")


class DocumentError(ValueError):
    """A document that cannot be used: says where it is, what was expected and what came."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Document:
    """One document.

    Args:
        name: where it came from, for messages.
        tokens: its tokens, int64 ``[length]``.
    """

    name: str
    tokens: torch.Tensor


def load_documents(
    path: Path | None, *, min_length: int = 1, max_length: int | None = None
) -> Iterator[Document]:
    """Reads every row before returning any, so that a bad last one starts no work; paragraphs when asked for.

    Args:
        path: a ``.jsonl``, each row of which is a document, in the first of the columns that it has:
            ``text`` (its UTF-8 bytes), ``tokens`` (a list of integers in ``[0, 256)``) or ``length`` (that
            many tokens from a generator seeded by the row's number, counted from 1). None for the text and
            sources of the standard library of the running Python, cut at their blank lines.
        min_length: the fewest tokens of a document. Shorter rows are errors, shorter paragraphs dropped.
        max_length: the most tokens of a document, or None. Longer rows are errors, longer paragraphs cut.

    Raises:
        ValueError: on a limit out of range.
        DocumentError: on a file, row or document that cannot be used.
    """
    limits = _Limits(min_length, max_length)
    if min_length < 1:
        raise ValueError(f"expected min_length of at least 1, got {min_length}")
    if max_length is not None and max_length < min_length:
        raise ValueError(f"expected max_length of at least min_length ({min_length}), got {max_length}")
    if path is None:
        return _paragraphs(limits)
    if not path.is_file() or path.suffix.lower() != ".jsonl":
        found = "a folder" if path.is_dir() else repr(path.name) if path.exists() else "nothing there"
        raise DocumentError(f"{path}: expected a .jsonl file, found {found}")
    if path.stat().st_size == 0:
        raise DocumentError(f"{path}: expected at least one document, got an empty file")
    return iter([*_rows(path, limits)])


# --- Python's own library ---------------------------------------------------------------------


def _paragraphs(limits: _Limits) -> Iterator[Document]:
    folder = Path(sysconfig.get_path("stdlib"))
    for file in _stdlib_text(folder):
        data = file.read_bytes()
        if data and b"\0" not in data:
            name = file.relative_to(folder).as_posix()
            yield from _cut_at_blank_lines(name, _tokens_of_bytes(data), limits)


def _stdlib_text(folder: Path) -> list[Path]:
    """The text and source files of the library, in order of relative path, without hidden ones."""

    def fail(error: OSError) -> None:
        raise error  # os.walk would leave an unreadable folder out without a word

    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NOT_STDLIB]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    text = (it for it in files if it.suffix in (".py", ".txt") or it.name.startswith("LICENSE"))
    return sorted(filter(Path.is_file, text), key=lambda file: file.relative_to(folder).as_posix())


def _cut_at_blank_lines(name: str, tokens: torch.Tensor, limits: _Limits) -> Iterator[Document]:
    """Each paragraph with the blank line at its end, in pieces where it is longer than it may be."""
    blank = (tokens[:-1] == _NEWLINE) & (tokens[1:] == _NEWLINE)
    ends = (torch.nonzero(blank).flatten() + 2).tolist()
    start = 0
    for end in [*ends, tokens.numel()]:
        step = limits.most or max(end - start, 1)
        for first in range(start, end, step):
            last = min(first + step, end)
            if last - first >= limits.least:
                yield Document(name=f"{name}[{first}:{last}]", tokens=tokens[first:last])
        start = max(start, end)


# --- rows -------------------------------------------------------------------------------------


def _rows(path: Path, limits: _Limits) -> Iterator[Document]:
    column: str | None = None
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            row = _parsed(where, line)
            column = _choose_column(where, column, row)
            tokens = _tokens_of_row(where, number, column, row[column], limits)
            limits.check(where, tokens.numel())
            yield Document(name=f"{path.name}:{number}", tokens=tokens)


def _parsed(where: str, line: bytes) -> dict[str, object]:
    expected = f"{where}: expected a JSON object with one of the columns {', '.join(_COLUMNS)}"
    if not line.strip():
        raise DocumentError(f"{expected}, got a blank line")
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, bottomless JSON
        raise DocumentError(f"{expected}, got {reprlib.repr(line)}: {error}") from error
    if not isinstance(row, dict):
        raise DocumentError(f"{expected}, got {_describe(row)}")
    return row


def _choose_column(where: str, column: str | None, row: dict[str, object]) -> str:
    """The column of the first row, which all others must have."""
    found = ", ".join(row) if row else "no columns"
    if column is None:
        column = next((name for name in _COLUMNS if name in row), None)
        if column is None:
            raise DocumentError(f"{where}: expected one of the columns {', '.join(_COLUMNS)}; found {found}")
    elif column not in row:
        raise DocumentError(f"{where}: expected the column {column}; found {found}")
    return column


def _tokens_of_row(where: str, number: int, column: str, value: object, limits: _Limits) -> torch.Tensor:
    if column == "text":
        if not isinstance(value, str):
            raise DocumentError(f"{where}: expected a string in column text, got {_describe(value)}")
        try:
            return _tokens_of_bytes(value.encode("utf-8"))
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise DocumentError(f"{where}: expected text that UTF-8 can encode, got {error}") from error
    if column == "tokens":
        return _tokens_of_list(where, value)
    if type(value) is not int:
        raise DocumentError(f"{where}: expected an integer in column length, got {_describe(value)}")
    if not 1 <= value <= _MAX_INT32:
        raise DocumentError(f"{where}: expected a length in [1, {_MAX_INT32}], got {value}")
    limits.check(where, value)  # before so many tokens are made
    return torch.randint(VOCAB, (value,), generator=torch.Generator().manual_seed(number))


def _tokens_of_list(where: str, value: object) -> torch.Tensor:
    expected = f"{where}: expected a list of integers in column tokens"
    if not isinstance(value, list):
        raise DocumentError(f"{expected}, got {_describe(value)}")
    for index, token in enumerate(value):
        if type(token) is not int:  # a bool is an int to isinstance
            raise DocumentError(f"{expected}, got {_describe(token)} at index {index}")
        if not 0 <= token < VOCAB:
            raise DocumentError(f"{where}: expected tokens in [0, {VOCAB}), got {token} at index {index}")
    return torch.tensor(value, dtype=torch.int64)


def _tokens_of_bytes(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(torch.int64)


def _describe(value: object) -> str:
    """A JSON value in words, with the value if it says more than its type."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    return f"{_JSON_NAMES.get(type(value), type(value).__name__)} ({reprlib.repr(value)})"
