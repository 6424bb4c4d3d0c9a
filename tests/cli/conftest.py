# SPDX-License-Identifier: Apache-2.0
"""What all tests of the command line share: tiny runs, documents, and a process left as it was found."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS, read at its start

import pytest
import torch
from run_scripts import TOML

from megagraph.cli import main
from megagraph.megatron.patch.installation import uninstall

TINY = {
    "--layers": "2",
    "--hidden": "32",
    "--heads": "2",
    "--pack-tokens": "64",
    "--micro-batches": "1",
    "--warmup-steps": "1",
    "--steps": "6",
    "--timed-steps": "2",
}


@pytest.fixture(autouse=True)
def as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No options from outside, lines that do not wrap; afterwards no plugin, and logging as it was."""
    for name in list(os.environ):
        if name.startswith("MEGAGRAPH_") and name != "MEGAGRAPH_TEST_CORE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "300")
    loggers = [logging.getLogger(name) for name in ("megagraph", "megatron")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    uninstall()
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models as tiny as these wait for a second thread longer than it works."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def demo() -> Callable[..., int]:
    """Runs `megagraph demo` on a tiny model and returns the exit code; further options go last."""

    def run(*arguments: str | Path, **changes: str) -> int:
        options = TINY | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        words = [word for option in options.items() for word in option]
        return main(["demo", *words, *map(str, arguments)])

    return run


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as lines of JSON; a row of bytes goes in as it is."""

    def write(*rows: object) -> Path:
        path = tmp_path / "docs.jsonl"
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """Writes a script into a folder of its own."""

    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / "scripts" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def toml(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config file."""

    def write(text: str = TOML, report: Path | None = None) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text + (f'report = "{report}"\n' if report else ""))
        return path

    return write
