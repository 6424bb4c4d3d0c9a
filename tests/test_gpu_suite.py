# SPDX-License-Identifier: Apache-2.0
"""`.ci/gpu` counts every test, names what failed, and says what did not run and why."""

import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ci_scripts import FOLDER, load_runner
from pytest import CaptureFixture, MonkeyPatch

SCRIPT = FOLDER / "gpu"
TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert 1 + 1 == 3, "a sum"
@pytest.mark.skip(reason="needs two of them")
def test_needs(): pass
@pytest.mark.parametrize("what", range(2))
@pytest.mark.skip(reason="needs another one")
def test_others(what): pass
"""
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="is no part of the source distribution")


@pytest.fixture
def suite(monkeypatch: MonkeyPatch) -> ModuleType:
    return load_runner("gpu", monkeypatch)


def run(suite: ModuleType, folder: Path, *, limit: float = 120.0, gib: float = 80.0, **tests: str) -> int:
    """Runs files of tests as the parts that there are, each of 30 GiB, and tells what came out."""
    parts = {}
    for name, text in tests.items():
        file = folder / f"test_{name}.py"
        file.write_text(text, encoding="utf-8")
        parts[name] = suite.Part([str(file), "--rootdir", str(folder), "-c", os.devnull], "load", 0, 30)
    suite.PARTS = {**parts, "absent": suite.Part([], "load", 1, 30)}
    suite.what_is_missing, suite.gpu_gib = lambda: None, lambda: gib
    with mock.patch.object(sys, "argv", [".ci/gpu", "--out", str(folder), "--limit", str(limit), *parts]):
        code: int = suite.main()
    return code


def test_what_passed_failed_and_did_not_run_is_told(suite: ModuleType, tmp_path: Path, capsys: Any) -> None:
    assert run(suite, tmp_path, one=TESTS, other="def test_passes(): pass", none="") == 1
    said = capsys.readouterr().out
    table = said.split("seconds\n")[1].split(" s in all")[0].splitlines()
    rows = {line.split()[0]: line.split()[1:4] for line in table[:3]}
    assert rows == {"one": ["1", "1", "3"], "other": ["1", "0", "0"], "none": ["0", "0", "0"]}
    assert "test_one.py::test_fails: AssertionError: a sum" in said
    assert "part none: pytest ended with 5" in said
    left_out = said.split("did not run:")[1].split("\n")[1:5]
    expected = [suite.ELSEWHERE, "part absent", "2 tests: needs another one", "1 tests: needs two of them"]
    assert [line.strip() for line in left_out] == expected
    assert (tmp_path / "one.log").exists() and (tmp_path / "one.xml").exists()


def test_a_part_that_is_stopped_is_a_failure_and_keeps_what_has_run(
    suite: ModuleType, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    (tmp_path / "one.xml").write_text("<testsuites/>", encoding="utf-8")  # of an earlier run
    pid = tmp_path / "child"
    hangs = f"""
import subprocess, sys
def test_passes(): pass
def test_fails(): assert 1 + 1 == 3, "a sum"
def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open({str(pid)!r}, "w").write(str(child.pid))
    child.wait()
"""

    def hangs_now() -> bool:
        return pid.exists() and pid.read_text() != ""  # which is made before it is written

    # The time is over as soon as it hangs.
    clock = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + 120 * hangs_now())
    monkeypatch.setattr(sys.modules["lanes"], "time", clock)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a job in the background of a shell
    try:
        assert run(suite, tmp_path, one=hangs) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr().out
    assert "part one: pytest ended with 2" in said
    (row,) = (line.split() for line in said.splitlines() if line.startswith("one  "))
    assert int(row[-1]) >= 120
    assert "test_one.py::test_fails: AssertionError: a sum" in said
    assert "assert (1 + 1) == 3" in (tmp_path / "one.log").read_text()
    child = Path("/proc", pid.read_text(), "cmdline")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)  # it has been killed, and may not have noticed
    assert not child.exists() or not child.read_text()


def test_a_part_that_never_has_memory_is_a_failure(suite: ModuleType, tmp_path: Path, capsys: Any) -> None:
    assert run(suite, tmp_path, gib=40.0, limit=0.0, one=TESTS, other=TESTS) == 1
    late = "part other: waited for memory of the GPU until the time was over"
    assert late in capsys.readouterr().out and not (tmp_path / "other.log").exists()
    assert suite.tell([], 0.0, late=["other"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_nothing_runs(suite: ModuleType, tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    with mock.patch.object(sys, "argv", [".ci/gpu", "--out", str(tmp_path / "out")]):
        assert suite.main() == 2
    assert "torch sees no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
