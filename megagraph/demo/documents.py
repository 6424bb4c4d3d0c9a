# SPDX-License-Identifier: Apache-2.0
"""Reads documents as tokens: from a folder, a ``.jsonl``, a ``.parquet``, or Python's own library.

Text becomes one token a byte. There is no tokenizer here: bring ``tokens`` for that.
"""

from __future__ import annotations

import importlib
import json
import os
import reprlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

__all__ = ["Document", "DocumentError", "load_documents", "read_documents"]

OverLength = Literal["error", "split"]

# In order of preference: tokenized data often carries a `length` beside its `tokens`.
_COLUMNS = ("text", "tokens", "length")

# Packs index their tokens with int32.
_MAX_INT32 = 2**31 - 1

# `test` is there or not depending on who packaged Python; the other two are not Python's own text.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test"})

_JSON_NAMES = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}


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


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """What a document must satisfy."""

    vocab_size: int
    min_length: int
    max_length: int | None
    over_length: OverLength

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"expected vocab_size of at least 1, got {self.vocab_size}")
        if self.min_length < 1:
            raise ValueError(f"expected min_length of at least 1, got {self.min_length}")
        if self.max_length is not None and self.max_length < self.min_length:
            raise ValueError(
                f"expected max_length of at least min_length ({self.min_length}), got {self.max_length}"
            )
        if self.over_length not in ("error", "split"):
            raise ValueError(f"expected over_length 'error' or 'split', got {self.over_length!r}")

    def check_length(self, where: str, length: int) -> None:
        """Refuses a length outside the limits; cheap, so it runs before any token is made."""
        if length < self.min_length:
            raise DocumentError(
                f"{where}: document of {length} tokens is under the minimum of {self.min_length}"
            )
        if self.over_length == "error" and self.max_length is not None and length > self.max_length:
            raise DocumentError(
                f"{where}: document of {length} tokens is over the limit of {self.max_length}; "
                "shorten it or raise --max-document"
            )

    def check_range(self, where: str, tokens: Sequence[int]) -> None:
        """Refuses a token outside ``[0, vocab_size)``; `tokens` is not empty."""
        if min(tokens) >= 0 and max(tokens) < self.vocab_size:
            return
        index = next(i for i, token in enumerate(tokens) if not 0 <= token < self.vocab_size)
        raise DocumentError(
            f"{where}: expected tokens in [0, {self.vocab_size}), got {tokens[index]} at index {index}"
        )


def read_documents(
    path: Path | None,
    *,
    column: str | None = None,
    vocab_size: int = 256,
    min_length: int = 1,
    max_length: int | None = None,
    over_length: OverLength = "error",
) -> Iterator[Document]:
    """Yields the documents at `path`, in an order that depends only on what is there.

    Reads lazily: a bad row raises when it is reached, not before (see `load_documents`).

    Args:
        path: one of
            a folder: each text file under it is a document, in order of relative path; hidden
            files, files with NUL bytes and files shorter than `min_length` are skipped;
            a ``.jsonl`` or a ``.parquet``: each row is a document, in one of the columns ``text``
            (its UTF-8 bytes), ``tokens`` (a list of integers) or ``length`` (that many tokens from
            a generator seeded by the row's number, counted from 1);
            None: the text and sources of the standard library of the running Python.
        column: the column of the rows; None takes the first of text, tokens, length that the
            first row has.
        vocab_size: tokens must lie in ``[0, vocab_size)``.
        min_length: the fewest tokens of a document.
        max_length: the most tokens of a document, or None.
        over_length: a longer document is an ``"error"``, or is ``"split"`` into documents of
            `max_length` whose last may be shorter (and is dropped below `min_length`).

    Returns:
        An iterator of `Document`.

    Raises:
        ValueError: on a bad argument, at once.
        DocumentError: on a bad path, at once; on a bad file, row or document, when it is reached.
    """
    rules = _Rules(
        vocab_size=vocab_size, min_length=min_length, max_length=max_length, over_length=over_length
    )
    if column is not None and column not in _COLUMNS:
        raise ValueError(f"expected column to be one of {', '.join(_COLUMNS)}, got {column!r}")
    if path is not None and not path.exists():
        raise DocumentError(f"{path}: expected a folder or a file, found nothing there")

    if path is None or path.is_dir():
        if column is not None:
            raise ValueError(f"expected no column for text files, got {column!r}")
        if path is not None:
            return _read_files(path, _files_under(path), rules)
        stdlib = Path(sysconfig.get_path("stdlib"))
        return _read_files(stdlib, filter(_is_stdlib_text, _files_under(stdlib, _NOT_STDLIB)), rules)

    readers = {".jsonl": _read_jsonl_rows, ".parquet": _read_parquet_rows}
    if path.suffix.lower() not in readers:
        raise DocumentError(f"{path}: expected a folder, a .jsonl or a .parquet file, got {path.name!r}")
    if path.stat().st_size == 0:
        raise DocumentError(f"{path}: expected at least one document, got an empty file")
    return _read_rows(path, readers[path.suffix.lower()](path, column), rules)


def load_documents(
    path: Path | None,
    *,
    column: str | None = None,
    vocab_size: int = 256,
    min_length: int = 1,
    max_length: int | None = None,
    over_length: OverLength = "error",
    progress: Callable[[int], None] | None = None,
) -> list[Document]:
    """Reads every document before returning any, so that a bad last row starts no work.

    Arguments and errors are those of `read_documents`; `progress` is called after each document
    with the number read so far.
    """
    documents: list[Document] = []
    for document in read_documents(
        path,
        column=column,
        vocab_size=vocab_size,
        min_length=min_length,
        max_length=max_length,
        over_length=over_length,
    ):
        documents.append(document)
        if progress is not None:
            progress(len(documents))
    return documents


# --- files ------------------------------------------------------------------------------------


def _files_under(folder: Path, excluded: frozenset[str] = frozenset()) -> list[Path]:
    """The regular files under `folder` in order of relative path, without hidden ones."""

    def fail(error: OSError) -> None:
        raise error  # os.walk would leave an unreadable folder out without a word

    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in excluded]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(filter(Path.is_file, files), key=lambda file: file.relative_to(folder).as_posix())


def _is_stdlib_text(file: Path) -> bool:
    return file.suffix in (".py", ".txt") or file.name.startswith("LICENSE")


def _read_files(folder: Path, files: Iterable[Path], rules: _Rules) -> Iterator[Document]:
    num_documents = 0
    for file in files:
        data = file.read_bytes()
        if b"\0" in data or len(data) < rules.min_length:
            continue
        num_documents += 1
        tokens = _tokens_of_bytes(str(file), data, rules)
        yield from _split(file.relative_to(folder).as_posix(), tokens, rules)
    if num_documents == 0:
        raise DocumentError(
            f"{folder}: expected at least one text file of {rules.min_length} bytes or more, found none"
        )


# --- rows -------------------------------------------------------------------------------------

_Row = tuple[str, str, object]  # where it is (after the path), its column, its value there


def _read_rows(path: Path, rows: Iterator[_Row], rules: _Rules) -> Iterator[Document]:
    for number, (place, column, value) in enumerate(rows, start=1):
        tokens = _tokens_of_row(f"{path}:{place}", number, column, value, rules)
        yield from _split(f"{path.name}:{place}", tokens, rules)


def _read_jsonl_rows(path: Path, column: str | None) -> Iterator[_Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            expected = f"{where}: expected a JSON object with one of the columns {', '.join(_COLUMNS)}"
            if not line.strip():
                raise DocumentError(f"{expected}, got a blank line")
            try:
                row = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, bottomless JSON
                raise DocumentError(f"{expected}, got {reprlib.repr(line)}: {error}") from error
            if not isinstance(row, dict):
                raise DocumentError(f"{expected}, got {_describe(row)}")
            column = _choose_column(where, column, list(row))
            yield str(number), column, row[column]


def _read_parquet_rows(path: Path, column: str | None) -> Iterator[_Row]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise DocumentError(
            f"{path}: a .parquet file needs pyarrow: pip install megagraph[parquet]"
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except ValueError as error:  # pyarrow.ArrowInvalid
        raise DocumentError(f"{path}: expected a parquet file, got one that is not: {error}") from error
    with file:
        column = _choose_column(str(path), column, file.schema_arrow.names)
        if file.metadata.num_rows == 0:
            raise DocumentError(f"{path}: expected at least one document, got a file without rows")
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield f"row {number}", column, value


def _choose_column(where: str, column: str | None, found: list[str]) -> str:
    names = ", ".join(found) if found else "no columns"
    if column is None:
        column = next((name for name in _COLUMNS if name in found), None)
        if column is None:
            raise DocumentError(f"{where}: expected one of the columns {', '.join(_COLUMNS)}; found {names}")
    elif column not in found:
        raise DocumentError(f"{where}: expected the column {column}; found {names}")
    return column


# --- tokens -----------------------------------------------------------------------------------


def _tokens_of_row(where: str, number: int, column: str, value: object, rules: _Rules) -> torch.Tensor:
    if column == "text":
        if not isinstance(value, str):
            raise DocumentError(f"{where}: expected a string in column text, got {_describe(value)}")
        try:
            data = value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise DocumentError(f"{where}: expected text that UTF-8 can encode, got {error}") from error
        return _tokens_of_bytes(where, data, rules)

    if column == "tokens":
        if not isinstance(value, list):
            raise DocumentError(
                f"{where}: expected a list of integers in column tokens, got {_describe(value)}"
            )
        for index, token in enumerate(value):
            if type(token) is not int:  # a bool is an int to isinstance
                raise DocumentError(
                    f"{where}: expected a list of integers in column tokens, "
                    f"got {_describe(token)} at index {index}"
                )
        rules.check_length(where, len(value))
        rules.check_range(where, value)
        return torch.tensor(value, dtype=torch.int64)

    if type(value) is not int:
        raise DocumentError(f"{where}: expected an integer in column length, got {_describe(value)}")
    if not 1 <= value <= _MAX_INT32:
        raise DocumentError(f"{where}: expected a length in [1, {_MAX_INT32}], got {value}")
    rules.check_length(where, value)
    generator = torch.Generator().manual_seed(number)
    return torch.randint(rules.vocab_size, (value,), generator=generator)


def _tokens_of_bytes(where: str, data: bytes, rules: _Rules) -> torch.Tensor:
    rules.check_length(where, len(data))
    rules.check_range(where, data)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(torch.int64)


def _split(name: str, tokens: torch.Tensor, rules: _Rules) -> Iterator[Document]:
    """The whole document if it fits, otherwise pieces of `max_length`."""
    length = tokens.numel()
    if rules.max_length is None or length <= rules.max_length:
        yield Document(name=name, tokens=tokens)
        return
    for start in range(0, length, rules.max_length):
        stop = min(start + rules.max_length, length)
        if stop - start >= rules.min_length:
            yield Document(name=f"{name}[{start}:{stop}]", tokens=tokens[start:stop])


def _describe(value: object) -> str:
    """A JSON value in words, with the value if it says more than its type."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    return f"{_JSON_NAMES.get(type(value), type(value).__name__)} ({reprlib.repr(value)})"
