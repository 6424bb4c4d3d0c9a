# SPDX-License-Identifier: Apache-2.0
"""How benchmarks run modules in processes of their own: forked with much imported, or fresh."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks are not installed

from benchmarks.measuring import fork_children, run_children  # noqa: E402


def test_a_process_answers_with_its_last_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(tmp_path, "told.py").write_text(
        "import sys\nprint('{not json}')\nprint('{\"a\": 1}')\nprint('{\"b\": 2}')\n"
        "if sys.argv[1] == 'fail':\n    raise ValueError('no such thing')\n"
    )
    how: dict[str, Any] = {"environment": {"PYTHONPATH": str(tmp_path)}}
    assert run_children.measure_part("told", "well", **how) == {"b": 2}
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answers = run_children.collect("told", "fail", timeout=60)
    assert answers["a"] == 1 and answers["c"] == {"error": "not measured: ValueError: no such thing"}
    assert run_children.try_part("told", "fail") == {"error": "ValueError: no such thing"}
    with pytest.raises(RuntimeError, match="told fail: ValueError: no such thing"):
        run_children.measure_part("told", "fail")


each_way = pytest.mark.parametrize("way", ["fork", "afresh"])


@pytest.fixture
def run(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., run_children.Ended]:
    """Runs a program in a fork, or in a fresh interpreter."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    how: dict[str, Any] = {} if way == "fork" else {"environment": {"OF_A_TEST": "1"}}

    def run_program(program: str, *arguments: str, timeout: float = 60) -> run_children.Ended:
        Path(tmp_path, "program.py").write_text("import os, sys, time\n" + program)
        return run_children.run_module("program", *arguments, timeout=timeout, **how)

    return run_program


@each_way
def test_a_process_ends_as_its_module_does(run: Callable[..., run_children.Ended]) -> None:
    for program, code, log in (
        ("print('said', file=sys.stderr)", 0, "said\n"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("print('{}', flush=True)\nos._exit(4)", 4, ""),
        ("os.kill(os.getpid(), 6)", -6, ""),
    ):
        ended = run(program)
        assert (ended.code, ended.log) == (code, log)
    ended = run("raise KeyError('x')")
    assert (ended.code, ended.why) == (1, "KeyError: 'x'")
    ended = run("import atexit\natexit.register(print, '{\"a\": 1}')")
    assert (ended.code, ended.answers) == (0, [{"a": 1}])


@each_way
def test_a_process_is_as_if_called_by_its_name(
    run: Callable[..., run_children.Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THIS_CALL", "1")
    told = "__name__, sys.argv[1:], os.environ.get('OF_THIS_CALL'), sys.path[0], os.getsid(0) == os.getpid()"
    program = f"import json\nprint(json.dumps(dict(enumerate([{told}]))))"
    (answer,) = run(program, "a", "b").answers
    assert list(answer.values()) == ["__main__", ["a", "b"], "1", os.getcwd(), True]
    monkeypatch.delenv("OF_THIS_CALL")
    assert run(program).answers[0]["2"] is None


@each_way
def test_a_process_that_takes_too_long_is_killed(run: Callable[..., run_children.Ended]) -> None:
    program = "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
    ended = run(program + "print('{\"a\": %d}' % child.pid, flush=True)\ntime.sleep(60)", timeout=4)
    assert ended.code is None and "out of time" in ended.why
    state = Path("/proc", str(ended.answers[0]["a"]), "stat")
    for _ in range(100):  # it dies soon, not at once
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("what it started goes on")


def test_processes_are_forked_side_by_side_with_modules_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fork_children.can_fork()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    Path(tmp_path, "imported.py").write_text(
        "import json, sys\n"
        "print(json.dumps({'seen': 'torch' in sys.modules, "
        "'run': [name for name in sys.modules if name.startswith('benchmarks.bench_')]}))\n"
    )
    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(lambda _: run_children.run_module("imported", timeout=60), range(8)))
    assert [(each.code, each.answers) for each in ended] == [(0, [{"seen": True, "run": []}])] * 8


def test_where_forks_do_not_work_every_process_starts_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # What the probe is given says whether there is a GPU; here it is an exit code.
    monkeypatch.setattr(fork_children, "_probe", os._exit)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: 7)
    fork_children.can_fork.cache_clear()
    try:
        assert not fork_children.can_fork()
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        Path(tmp_path, "imported.py").write_text(
            "import sys\nprint('{\"seen\": %d}' % ('torch' in sys.modules))"
        )
        assert run_children.run_module("imported", timeout=60).answers == [{"seen": 0}]
    finally:
        fork_children.can_fork.cache_clear()
    assert "imports what it needs itself" in capfd.readouterr().err


def test_the_environment_of_a_fork_is_its_callers_and_what_imports_have_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {"KEPT": "1", "GONE": "1", "CHANGED": "1"}
    monkeypatch.setattr(os, "environ", {**before, "SET_BY_IMPORT": "1", "KEPT": "2"})
    fork_children._take_over({"KEPT": "1", "CHANGED": "3", "NEW": "1"}, before)
    assert os.environ == {"KEPT": "2", "CHANGED": "3", "NEW": "1", "SET_BY_IMPORT": "1"}


def test_nothing_that_is_run_as_main_is_imported_beforehand() -> None:
    code = (
        "import sys; from benchmarks.measuring import preload; print(*preload._MODULES); print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    asked, found = (set(line.split()) for line in run.stdout.splitlines())
    assert {name for name in asked if name.startswith(("benchmarks.", "megagraph."))} <= found
    run_as_main = {
        line.removeprefix("_MODULE = ").strip('"')
        for path in Path(ROOT, "benchmarks").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("_MODULE = ")
    }
    assert len(run_as_main) >= 5 and not found & run_as_main
    assert "torch" in found and "not imported beforehand" not in run.stderr
