# SPDX-License-Identifier: Apache-2.0
"""`.ci/gpu` counts every test, names what failed, and says what did not run and why."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from ci_scripts import FOLDER, load

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
def suite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # for a quicker start
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    return load("gpu")


def run(suite: ModuleType, folder: Path, *, limit: float = 120.0, gib: float = 80.0, **tests: str) -> int:
    """Runs files of tests as the parts that there are, each of 30 GiB, and tells what came out."""
    parts = {}
    for name, text in tests.items():
        file = folder / f"test_{name}.py"
        file.write_text(text, encoding="utf-8")
        parts[name] = suite.Part([str(file), "--rootdir", str(folder), "-c", os.devnull], "load", 1, 30)
    suite.PARTS = {**parts, "absent": suite.Part([], "load", 1, 30)}
    suite.what_is_missing, suite.gpu_gib = lambda: None, lambda: gib
    with mock.patch.object(sys, "argv", [".ci/gpu", "--out", str(folder), "--limit", str(limit), *parts]):
        code: int = suite.main()
    return code


def test_what_passed_failed_and_did_not_run_is_told(
    suite: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(suite, tmp_path, one=TESTS, other="def test_passes(): pass") == 1
    said = capsys.readouterr().out
    table = said.split("seconds\n")[1].split(" s in all")[0].splitlines()
    rows = {line.split()[0]: line.split()[1:4] for line in table[:2]}
    assert rows == {"one": ["1", "1", "3"], "other": ["1", "0", "0"]}
    assert "test_one.py::test_fails: AssertionError: a sum" in said
    left_out = said.split("did not run:")[1].split("\n")[1:5]
    assert [line.strip() for line in left_out] == [
        suite.ELSEWHERE,
        "part absent",
        "2 tests: needs another one",
        "1 tests: needs two of them",
    ]
    assert (tmp_path / "one.log").exists() and (tmp_path / "one.xml").exists()


def test_a_run_without_failures_says_so(
    suite: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(suite, tmp_path, one="def test_passes(): pass") == 0
    assert "failed: nothing" in capsys.readouterr().out


def test_a_part_that_is_stopped_is_a_failure_and_keeps_what_has_run(
    suite: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.xml").write_text("<testsuites/>", encoding="utf-8")  # of an earlier run
    hangs = f"""
import subprocess, sys
def test_passes(): pass
def test_fails(): assert 1 + 1 == 3, "a sum"
def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
    child.wait()
"""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a job in the background of a shell
    try:
        assert run(suite, tmp_path, limit=8.0, one=hangs) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr().out
    assert "part one: pytest ended with 2" in said
    (row,) = (line.split() for line in said.splitlines() if line.startswith("one  "))
    assert int(row[-1]) >= 8
    assert "test_one.py::test_fails: AssertionError: a sum" in said
    assert "assert (1 + 1) == 3" in (tmp_path / "one.log").read_text()
    child = Path("/proc", (tmp_path / "child").read_text(), "cmdline")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)  # it has been killed, and may not have noticed
    assert not child.exists() or not child.read_text()


def test_parts_begin_when_their_memory_is_free(
    suite: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    when = """
import pathlib, time
def test_when():
    here = pathlib.Path(__file__)
    times = [time.time(), time.sleep(1) or time.time()]
    here.with_suffix(".when").write_text(" ".join(map(str, times)))
"""
    for folder, gib, are_side_by_side in (("large", 80, True), ("small", 40, False), ("tiny", 10, False)):
        (tmp_path / folder).mkdir()
        assert run(suite, tmp_path / folder, gib=gib, one=when, other=when) == 0
        spans = [
            [*map(float, (tmp_path / folder / f"test_{name}.when").read_text().split())]
            for name in ("one", "other")
        ]
        assert (spans[1][0] < spans[0][1]) == are_side_by_side
    hangs = "import time\ndef test_hangs(): time.sleep(600)"
    assert run(suite, tmp_path, gib=40, limit=3, one=hangs, other=when) == 1
    assert "part other: waited for memory of the GPU until the time was over" in capsys.readouterr().out


def test_a_part_that_runs_nothing_is_a_failure(
    suite: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(suite, tmp_path, one="") == 1
    assert "part one: pytest ended with 5" in capsys.readouterr().out


def test_unknown_parts_are_an_error() -> None:
    told = subprocess.run([SCRIPT, "bank", "banks"], capture_output=True, text=True)
    assert (
        told.returncode == 2
        and "expected parts of ranks, megatron" in told.stderr
        and "got banks" in told.stderr
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_nothing_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out")]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 2 and "torch sees no GPU here" in told.stderr
    assert not (tmp_path / "out").exists()
