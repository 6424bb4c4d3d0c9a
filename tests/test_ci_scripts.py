# SPDX-License-Identifier: Apache-2.0
"""`.ci/run`, `.ci/tests`: what fails runs once more, who is flaky is counted, no bit is forgiven. `.ci/gpu`
counts every test, names what failed, and says what did not run and why."""

import argparse
import datetime
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from notes import told
from pytest import CaptureFixture, MonkeyPatch
from same_bits import BitsDiffer, assert_same_bits

FOLDER = Path(__file__).parents[1] / ".ci"


def load(name: str) -> ModuleType:
    """A fresh module of that script, which has not run; it leaves no bytecode beside it."""
    loader = SourceFileLoader(f"ci_{name}", str(FOLDER / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.multiple(sys, dont_write_bytecode=True, path=[str(FOLDER), *sys.path]):
        loader.exec_module(module)
    return module


def load_runner(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One that runs pytest, which begins and is looked at more quickly."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    module = load(name)
    monkeypatch.setattr(sys.modules["lanes"], "LOOK_SECONDS", 0.02)
    return module


pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="is no part of the source distribution")

# What happens in the first of three runs, as an accident does now and then.
HELPERS = """
from pathlib import Path

class BitsDiffer(AssertionError): pass

def happens(name):
    counter = Path(__file__).with_name(f"count of {name}")
    times = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(times + 1))
    return times % 3 == 0
"""

Suite = Callable[..., int]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`.ci/tests`, for the folder of a test in place of the checkout."""
    module = load_runner("tests", monkeypatch)
    module.PROCESSES = "0"  # for a quicker start
    monkeypatch.setattr(sys.modules["lanes"], "ROOT", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "helpers.py").write_text(HELPERS, encoding="utf-8")
    module.FLAKY_FILE = tmp_path / "flaky.txt"
    module.FLAKY_FILE.write_text("# date | test | cause\n", encoding="utf-8")
    return module


@pytest.fixture
def run(script: ModuleType, tmp_path: Path) -> Suite:
    """Runs the texts of tests, each in a lane of its own, and judges them. Returns the exit status."""

    def texts(**tests: str) -> int:
        script.LANES = {name: script.Plan((f"test_{name}.py",)) for name in tests}
        options = argparse.Namespace(out=tmp_path / "out", other_core=None)
        lanes = []
        for name, text in tests.items():
            text = f"import os\nfrom helpers import BitsDiffer, happens\n{text}\n"
            (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
            lanes.append(script.run_to_its_end(script.begin(name, options, [])))
        return script.judge(lanes, options)

    return texts


def logs_of(folder: Path, name: str) -> list[Path]:
    """Of the runs again."""
    return sorted((folder / "out" / "again").glob(f"{name}*.log"))


def flaky_lines(script: ModuleType) -> list[str]:
    text: str = script.FLAKY_FILE.read_text(encoding="utf-8")
    return text.splitlines()[1:]


def test_what_passes_alone_is_flaky_and_counted_and_a_process_that_is_killed_costs_its_own_test_only(
    run: Suite, script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tests = """
def test_accident(): assert not happens("an accident"), "it rained"
def test_dies():
    if happens("a death"): os.kill(os.getpid(), 9)
def test_behind(): pass
"""
    script.PROCESSES = "1"
    assert run(one=tests) == 0
    (again,), (of_death,) = (logs_of(tmp_path, f"one-{it}") for it in ("0-test_accident", "1-test_dies"))
    said = capfd.readouterr().out
    assert f"FLAKY test_one.py::test_accident: failed in {tmp_path}/out/one.log, passed in {again}" in said
    assert "FLAKY test_one.py::test_dies" in said
    assert re.search("2 failed, [12] passed", said)  # the new process may run it once more
    assert "it rained" in (tmp_path / "out" / "one.log").read_text()
    assert "1 passed" in again.read_text() and "1 passed" in of_death.read_text()
    names = ("accident", "dies")
    today = datetime.date.today()
    assert flaky_lines(script) == [f"{today} | test_one.py::test_{it} | unknown" for it in names]


def test_what_fails_again_is_a_failure_with_its_own_text_and_a_difference_of_bits_is_not_run_again(
    run: Suite, script: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tests = """
def test_fails(): assert 1 + 1 == 3, 'a sum'
def test_too(): assert False
def test_bits():
    if happens("a difference"):
        raise BitsDiffer("steps[0].losses[1]: 1 of 8 entries differ")
"""
    script.MOST_AGAIN = 1
    assert run(one=tests, other="def test_passes(): pass") == 1
    said = capfd.readouterr().out
    assert "test_one.py::test_too: one of many, and so it did not run again" in said
    text = said.split("---- test_one.py::test_fails")[1].split("----")[0]
    assert "AssertionError: a sum" in text and "def test_fails()" in text
    assert "test_one.py::test_fails: failed again" in said
    assert "test_one.py::test_bits: bits differ, and so it did not run again" in said
    assert "1 of 8 entries differ" in said
    assert len(logs_of(tmp_path, "one")) == 1 and flaky_lines(script) == []
    closing = said.rstrip().splitlines()[-2:]
    assert "3 failed" in closing[0] and "1 passed" in closing[1]


def test_who_is_flaky_for_long_is_a_failure_and_so_are_three_flaky_tests(
    run: Suite, script: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    today = datetime.date.today()
    first, later = (today - datetime.timedelta(days=days) for days in (15, 14))
    lines = [
        f"{first} | test_one.py::test_accident | a slow disk | or so",
        f"{later} | test_two.py::test_x | unknown",
    ]
    with script.FLAKY_FILE.open("a", encoding="utf-8") as file:
        file.write("\n".join([*lines, ""]))
    assert script.too_flaky(["test_two.py::test_x", "a"]) == []
    assert script.too_flaky(["test_two.py::test_x", "a", "b"]) == ["3 flaky tests: at most 2 in a run"]
    new = [f"{today} | {it} | unknown" for it in ("a", "b")]
    assert run(one="def test_accident(): assert not happens('it')") == 1
    assert f"test_one.py::test_accident: flaky since {first}" in capfd.readouterr().out
    assert flaky_lines(script) == [*lines, *new]
    three = "".join(f"def test_{it}(): assert not happens('{it}')\n" for it in "bcd")
    assert run(three=three) == 1 and "3 flaky tests: at most 2 in a run" in capfd.readouterr().out


def test_a_test_of_its_whole_file_runs_again_with_the_file(run: Suite, tmp_path: Path) -> None:
    """Alone it would judge nothing, and pass."""
    (tmp_path / "elsewhere.py").write_text("def test_models_are_gone(): assert not left\nleft = []\n")
    tests = """
from elsewhere import left, test_models_are_gone as gone
def test_leaves_something(): left.append(1)
test_models_are_gone = gone
"""
    assert run(one=tests) == 1
    assert "1 failed, 1 passed" in logs_of(tmp_path, "one-0-test_models")[0].read_text()
    assert [*(tmp_path / "__pycache__").glob("elsewhere.*.pyc")]  # nobody compiles what another has


def test_a_lane_that_runs_nothing_is_a_failure(run: Suite, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(one="", two="import nothing_of_this_name") == 1
    said = capfd.readouterr().out
    assert "lane one: pytest ended with 5" in said
    assert "No module named 'nothing_of" in said


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (torch.ones(2), torch.ones(3), r"they: torch.float32 \[2\] and torch.float32 \[3\]"),
        (torch.ones(2), torch.ones(2).double(), "torch.float32 .* and torch.float64"),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), "1 of 1 entries differ, first nan and nan"),
        (torch.ones(2), None, "they: .* and None"),
        ([1], [1, 2], r"other parts: \[0\] and \[0, 1\]"),
        ({"a": [torch.ones(2)]}, {"a": [torch.zeros(2)]}, r"\['a'\]\[0\]: 2 of 2 entries differ"),
        (1, 2, "they: 1 and 2"),
    ],
)
def test_whatever_differs_is_an_error(one: Any, other: Any, message: str) -> None:
    assert_same_bits([None, 3, "a", (1.0, torch.ones(2))], [None, 3, "a", [1.0, torch.ones(2)]])
    with pytest.raises(BitsDiffer, match=message):
        assert_same_bits(one, other)


# -- .ci/run ---------------------------------------------------------------------------------------

TARGETS = {"environment", "environment-newest", "test", "lint", "wheel-newest", "matrix-newest"}
# In make's place: says what a file has for the target, and fails if that tells of a failure.
MAKE = '#!/bin/sh\necho "$2" >> made\ntest ! -e "$2" && exit\ncat "$2"; ! grep -q failed "$2"\n'
FLAKY = "FLAKY tests/test_one.py::test_accident\n"


@pytest.mark.parametrize(
    ("code", "end", "says"),
    [
        (0, "", {}),
        (0, FLAKY * 2, {"test": FLAKY * 2}),
        (1, "failed: 3 flaky tests, at most 2:\n", {"test": FLAKY * 2, "matrix-newest": FLAKY}),
        (1, "failed: test\n---- a sum\n", {"test": "a lane\n---- a sum\nE  1 failed\n"}),
        (1, "failed: lint\nE  1 failed\n", {"lint": "E  1 failed\n"}),
        (1, "failed: environment\nno torch: failed\n", {"environment": "no torch: failed\n"}),
    ],
)
def test_a_run_makes_all_whatever_fails_and_tells_it_at_its_end(
    code: int, end: str, says: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(FOLDER / "run", tmp_path / ".ci")
    for target, text in {"make": MAKE, **says}.items():
        (tmp_path / target).write_text(text, encoding="utf-8")
    (tmp_path / "make").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True)
    assert ran.returncode == code and end in ran.stdout.partition("\nmatrix-newest ")[2]
    assert {*(tmp_path / "made").read_text(encoding="utf-8").split()} == TARGETS


# -- .ci/gpu ---------------------------------------------------------------------------------------

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


@pytest.fixture
def suite(monkeypatch: MonkeyPatch) -> ModuleType:
    return load_runner("gpu", monkeypatch)


def run_parts(suite: ModuleType, folder: Path, *, limit: float = 120, gib: float = 80, **tests: str) -> int:
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
    assert run_parts(suite, tmp_path, one=TESTS, other="def test_passes(): pass", none="") == 1
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
    at_interrupt = partial(signal.signal, signal.SIGINT)
    # As in a job in the background of a shell.
    with told(at_interrupt, signal.SIG_IGN, signal.getsignal(signal.SIGINT)):
        assert run_parts(suite, tmp_path, one=hangs) == 1
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
    assert run_parts(suite, tmp_path, gib=40.0, limit=0.0, one=TESTS, other=TESTS) == 1
    late = "part other: waited for memory of the GPU until the time was over"
    assert late in capsys.readouterr().out and not (tmp_path / "other.log").exists()
    assert suite.tell([], 0.0, late=["other"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_nothing_runs(suite: ModuleType, tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    with mock.patch.object(sys, "argv", [".ci/gpu", "--out", str(tmp_path / "out")]):
        assert suite.main() == 2
    assert "torch sees no GPU here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
