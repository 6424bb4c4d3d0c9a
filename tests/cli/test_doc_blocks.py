# SPDX-License-Identifier: Apache-2.0
"""Every example of the documentation runs, or says in its first line that it is a fragment: in a
process without a GPU, and a folder with the script and the options of docs/first-hour.md."""

import contextlib
import io
import logging
import multiprocessing
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_docs import DOCS, FENCE, ROOT, named, read

from megagraph.cli import main
from megagraph.config import GraphConfig
from megagraph.demo.cpu import megatron_on_cpu
from megagraph.demo.trainer import process_groups
from megagraph.megatron.patch.installation import uninstall

FIRST_HOUR = ROOT / "docs" / "first-hour.md"
PAGES = [path for path in DOCS if FENCE.search(read(path))]


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_block_says_what_it_is(path: Path) -> None:
    assert read(path).count("\n```") == 2 * len(FENCE.findall(read(path)))
    assert {language for language, _ in FENCE.findall(read(path))} <= {"python", "toml", "sh", "text"}
    for language, code in FENCE.findall(read(path)):
        if language == "python":
            compile(code, named(path), "exec")


def write_first_hour(folder: Path) -> None:
    """`train.py`, also in a package, and `megagraph.toml`."""
    (script,), (options,) = (
        [code for found, code in FENCE.findall(read(FIRST_HOUR)) if found == language]
        for language in ("python", "toml")
    )
    (folder / "package").mkdir()
    for place in ("train.py", "package/train.py"):
        (folder / place).write_text(script, encoding="utf-8")
    (folder / "megagraph.toml").write_text(options, encoding="utf-8")


def run_line(line: str) -> None:
    """A line of a shell: commands of ours in this process, and whether targets of make are there."""
    from megatron.core import parallel_state

    uninstall()  # it is a process of its own
    program, *words = shlex.split(line, comments=True) or ["true"]
    if program == "make":
        done = subprocess.run(["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    elif program == "megagraph":
        try:
            assert main(words) == 0, line
        except SystemExit as end:
            assert end.code == 0, line
        finally:  # the groups of a script that was not run to its end
            parallel_state.destroy_model_parallel()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    else:
        assert program == "true", f"{line}: nothing runs this: mark its block as a fragment"


def without_figures(text: str) -> str:
    """Decimals are of one machine, and so are versions; spaces at the end of a line."""
    return re.sub(r"\d+(?:\.\d+)+\S*", "#", re.sub(r" +$", "", text, flags=re.MULTILINE))


@megatron_on_cpu()
def run_page(path: Path, folder: Path) -> None:
    """All of its examples, one after another."""
    os.chdir(folder)
    write_first_hour(folder)
    names: dict[str, Any] = {}
    printed = ""
    for language, code in FENCE.findall(read(path)):
        if code.startswith("# fragment: "):
            continue
        if language == "python" and path != FIRST_HOUR:
            with process_groups():
                exec(compile(code, named(path), "exec"), names)
        elif language == "toml":
            (folder / "shown.toml").write_text(code, encoding="utf-8")
            assert GraphConfig.from_toml(folder / "shown.toml").all_capacities()
        elif language == "sh":
            logging.getLogger("megagraph").handlers.clear()  # it has one that knows where to print
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                try:
                    for line in code.replace("\\\n", "").splitlines():
                        run_line(line)
                except AssertionError as error:
                    error.add_note(out.getvalue())
                    raise
            printed = without_figures(out.getvalue())
        elif language == "text" and path == FIRST_HOUR:
            for line in without_figures(code).splitlines():
                assert line.removesuffix("...") in printed, f"{line} in {printed}"


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Executor]:
    """A process on the CPU."""
    left = {name: value for name, value in os.environ.items() if not name.startswith("MEGAGRAPH_")}
    left |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80", "TORCHDYNAMO_DISABLE": "1"}
    with (
        mock.patch.dict(os.environ, left, clear=True),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes,
    ):
        processes.submit(int).result()  # begins under these variables
        yield processes


@pytest.mark.megatron
@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_block_runs(path: Path, elsewhere: Executor, tmp_path: Path) -> None:
    elsewhere.submit(run_page, path, tmp_path).result()
