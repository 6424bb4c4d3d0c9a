# SPDX-License-Identifier: Apache-2.0
"""What all tests of the command line share: tiny runs, documents, and a process left as it was found."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from run_scripts import Files

from megagraph.cli import main
from megagraph.megatron.patch.installation import installed_plugin, uninstall
from megagraph.megatron.plugin import is_cuda_graph_skipped

TINY = {"--layers": "2", "--hidden": "32", "--heads": "2", "--pack-tokens": "64", "--micro-batches": "1"}
TINY |= {"--warmup-steps": "1", "--steps": "6", "--timed-steps": "2"}


@pytest.fixture(autouse=True)
def as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No options from outside, lines that do not wrap, Megatron's errors alone; all is left as it was."""
    for name in list(os.environ):
        if name.startswith("MEGAGRAPH_") and name != "MEGAGRAPH_TEST_CORE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # these models use no compiler: nobody need import it

    def found() -> list[object]:
        torchs = torch.are_deterministic_algorithms_enabled(), torch.distributed.is_initialized()
        return [installed_plugin(), is_cuda_graph_skipped(), *torchs, torch.cuda.current_device]

    as_before, loggers = found(), [logging.getLogger(name) for name in ("megagraph", "megatron")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    loggers[1].setLevel(logging.ERROR)
    yield
    left = found()
    uninstall()
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
    assert left == as_before


@pytest.fixture
def demo() -> Callable[..., int]:
    """Runs `megagraph demo` on a tiny model and returns the exit code; further options go last."""

    def run(*arguments: str | Path, **changes: str) -> int:
        options = TINY | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        return main(["demo", *[word for option in options.items() for word in option], *map(str, arguments)])

    return run


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)
