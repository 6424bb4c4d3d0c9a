# SPDX-License-Identifier: Apache-2.0
"""`megagraph run SCRIPT`: a script as it was, with the plugin around it; and `megagraph report` after it."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch
from run_scripts import TOML, TRAINING, WITNESS, Files, run_python

from megagraph.cli import main
from megagraph.cli.reports import read_report
from megagraph.reasons import EagerReason

pytestmark = pytest.mark.megatron


def run(*arguments: str | Path) -> int:
    return main(["run", *map(str, arguments)])


def seen(path: Path) -> dict[str, Any]:
    return json.loads(path.with_name("seen.json").read_text())


@pytest.mark.parametrize("is_module", [False, True], ids=["a script", "a module"])
def test_what_runs_is_main_with_its_own_arguments(files: Files, monkeypatch: Any, is_module: bool) -> None:
    package = files.folder / "a_package"
    package.mkdir()
    (package / "__init__.py").touch()
    path = package / "training.py"
    path.write_text(WITNESS)
    monkeypatch.chdir(files.folder)
    arguments = ["--", "--lr", "3", "--config", "its-own.toml", "-h", "--", "last"]
    argv, paths, program = sys.argv, list(sys.path), sys.modules["__main__"]
    try:
        named = ["-m", "a_package.training"] if is_module else [path]
        assert run("--set", "mode=eager", *named, *arguments) == 0
    finally:
        sys.modules.pop("a_package", None)
    found = seen(path)
    assert found["argv"] == [str(path), *arguments] and found["config"]["mode"] == "eager"
    assert found["name"] == "__main__" and found["main"]
    assert sys.argv is argv and sys.path == paths and sys.modules["__main__"] is program


def test_the_megatron_that_lies_beside_a_script_is_the_one_that_counts(files: Files) -> None:
    """Bug: the one that is installed was imported first, and the script trained with that."""
    path = files.script("")
    for package, text in {"megatron": "", "megatron/core": "__version__ = '9.9'"}.items():
        (path.parent / package).mkdir()
        (path.parent / package / "__init__.py").write_text(text)
    done = run_python("-c", f"from megagraph.cli import main; assert main(['run', '{path}']) == 2")
    assert done.stderr.startswith("megagraph run: megatron-core 9.9 does not fit")


SET = ("--set", "mode=eager", "--set", "capacities=8:2,32:4", "--set", "cuda_graph_warmup_steps=2")
CHANGED = {"CUDA_GRAPH_WARMUP_STEPS": "5", "POISON": "true", "CUDA_GRAPH_MAX_PACKED_SEQS": "3,9"}


@pytest.mark.parametrize(
    ("has_file", "variables", "given", "expected"),
    [
        (True, {}, (), {"mode": "graph", "warmup": 1, "poison": False, "capacities": [[64, 6]]}),
        # Variables go before the file, and leave its other options.
        (True, CHANGED, (), {"mode": "graph", "warmup": 5, "poison": True, "capacities": [[64, 3], [64, 9]]}),
        # And --set before both.
        (True, CHANGED, SET, {"mode": "eager", "warmup": 2, "poison": True, "capacities": [[8, 2], [32, 4]]}),
        (False, {"MODE": "eager"}, (), {"mode": "eager", "warmup": None, "poison": False, "capacities": []}),
        (False, {"MODE": "off"}, (), None),
    ],
)
def test_the_plugin_is_there_for_the_script_as_file_and_variables_say_and_gone_after_it(
    files: Files, monkeypatch: Any, has_file: bool, variables: Any, given: Any, expected: Any
) -> None:
    path = files.script(WITNESS)
    for name, value in variables.items():
        monkeypatch.setenv(f"MEGAGRAPH_{name}", value)
    assert run(*(("--config", files.toml()) if has_file else ()), *given, path) == 0
    assert seen(path)["config"] == expected


def test_modules_beside_the_script_precede_the_working_folder(files: Files, monkeypatch: MonkeyPatch) -> None:
    (files.folder / "helper_of_a_script.py").write_text("WHERE = 'working folder'")
    files.script("WHERE = 'beside the script'", "helper_of_a_script.py")
    lines = "pathlib.Path(__file__).with_suffix('.txt').write_text(helper_of_a_script.WHERE)"
    # Bug: a script that changed its folder lost its own `__file__`, which Python makes absolute.
    path = files.script(f"import helper_of_a_script, os, pathlib\nos.chdir('/')\n{lines}\n")
    monkeypatch.chdir(files.folder)
    monkeypatch.syspath_prepend(str(files.folder))
    try:
        assert run(path.relative_to(files.folder)) == 0
    finally:
        sys.modules.pop("helper_of_a_script", None)
    assert path.with_suffix(".txt").read_text() == "beside the script"


NAMES_CUDA = """import torch
torch.cuda.set_device(0)
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cuda:0"
store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
assert torch.nn.Linear(2, 2).to(device)(torch.ones(2).to(device)).sum().cuda().numel() == 1
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="--cpu is refused beside a GPU")
def test_a_script_for_gpus_trains_on_the_cpu(files: Files) -> None:
    """It ended with `Found no NVIDIA driver`, and the context that helps was ours alone."""
    path = files.script(NAMES_CUDA + TRAINING.replace("megatron_on_cpu(), ", ""))
    command = "-W", "ignore", "-m", "megagraph", "run", "--cpu", "--config", files.toml()
    assert "80 % of layer calls replayed" in run_python(*command, path, "5", "pass").stderr


@pytest.mark.parametrize("command", ["run", "doctor", "advise --steps 24"])
def test_a_script_may_install_with_the_options_that_its_command_was_given(files: Files, command: str) -> None:
    """Bug: refused, if a command had changed them itself: 'report is r.json, not None'."""
    given, out = files.toml(report=files.folder / "its-own.json"), files.folder / "out.json"
    installs = f"import megagraph\nmegagraph.install({str(given)!r})\n"
    path = files.script(installs + TRAINING.replace("range(60)", "range(600)"))
    assert main([*command.split(), *map(str, ("--config", given, "--json", out, path, "40", "pass"))]) == 0
    assert json.loads(out.read_text())["verdict"] and not (files.folder / "its-own.json").exists()


ENDS = [KeyboardInterrupt("its own"), ValueError("its own"), FileNotFoundError("its own")]
ENDS += [SystemExit(0), SystemExit(7), SystemExit("a sentence")]


@pytest.mark.parametrize("end", ENDS, ids=repr)
def test_the_scripts_end_comes_through_with_a_report(files: Any, capsys: Any, caplog: Any, end: Any) -> None:
    """A user's ValueError was taken for bad input, exit code 2. For want of a GPU nothing told of --cpu."""
    report = files.folder / "reports" / "report.json"
    with pytest.raises(type(end)) as raised:
        run("--config", files.toml(report=report), files.script(f"raise {end!r}"))
    assert type(raised.value) is type(end) and raised.value.args == end.args
    assert read_report(report) == []
    failed = not isinstance(end, SystemExit)
    why = f"{type(end).__name__} ended the script before a model ran" if failed else "no GPTModel"
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"megagraph: nothing replayed: {why}")
    asks = isinstance(end, Exception) and not torch.cuda.is_available()
    assert ("if it asks for one, add --cpu" in caplog.text) == asks


def test_a_script_ends_as_ever_if_nobody_reads_what_is_said(files: Files, monkeypatch: MonkeyPatch) -> None:
    """Bug: with a full disk, or a reader gone, behind standard error any exit code became 1."""
    monkeypatch.setattr(sys.stderr, "write", mock.Mock(side_effect=BrokenPipeError))
    with pytest.raises(SystemExit, match="7"):
        run(files.script("import sys; sys.exit(7)"))
    assert run(files.script("pass")) == 0


@pytest.mark.parametrize("command", ["doctor", "advise"])
@pytest.mark.parametrize("code", ["cannot find the data set", 3])
def test_of_a_script_that_gives_up_doctor_and_advise_say_that_and_nothing_else(
    files: Files, capsys: CaptureFixture[str], command: str, code: object
) -> None:
    """Bug: its text was swallowed, and the advice to leave graphs off given."""
    assert main([command, str(files.script(f"raise SystemExit({code!r})"))]) == 70
    out, err = capsys.readouterr()
    assert out == "" and err.endswith(f"megagraph {command}: the script ended with {code}\n")


@pytest.mark.parametrize("end", ["raise RuntimeError('its own')", "import gc; gc.collect()"])
def test_a_training_replays_and_has_a_report(files: Files, capsys: CaptureFixture[str], end: str) -> None:
    report = files.folder / "report.json"
    with pytest.raises(RuntimeError, match="its own") if end.startswith("raise") else nullcontext():
        assert run("--config", files.toml(report=report), files.script(TRAINING), "5", end) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["loss"] * 5
    assert "layer calls" in err and "eager: WARMING_UP" in err

    document = json.loads(report.read_text())
    assert (document["steps"], document["config"]["cuda_graph_warmup_steps"]) == (5, 1)
    assert document["verdict"] in err
    assert document["versions"]["torch"] == str(torch.__version__)
    # The first step, of a model that nobody knows yet, is not measured.
    (times,) = document["times"].values()
    assert times["steps"] == 4 and times["host_ms"] == sorted(times["host_ms"])
    (model,) = read_report(report)
    assert (model["model"], model["calls"], model["replays"]) == ("GPTModel", 10, 8)
    assert model["eager"] == {"WARMING_UP": 2}

    assert main(["report", str(report)]) == 0
    assert "8 (80.0%)" in capsys.readouterr().out
    assert main(["report", str(report), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    verdict = "80 % of layer calls replayed; the rest warmed up"
    assert document == {"format": 2, "models": [model], "verdict": verdict}
    written = files.folder / "written.json"
    assert main(["report", str(report), "--json", str(written)]) == 0
    assert json.loads(written.read_text()) == document


@pytest.mark.parametrize("end", ["pass", "raise RuntimeError('its own')"])
def test_a_run_does_not_fail_for_a_report_that_cannot_be_written_at_its_end(
    files: Files, capsys: CaptureFixture[str], caplog: LogCaptureFixture, end: str
) -> None:
    """A folder that was gone at the end turned a finished run into exit code 1, without the report."""
    report = files.folder / "reports" / "report.json"
    # The folder is there at the beginning; when the run ends, a file has taken its place.
    report.parent.mkdir()
    there = f"import pathlib; folder = pathlib.Path({str(report.parent)!r})"
    lines = f"{there}; folder.rmdir(); folder.touch()\n{end}"
    with nullcontext() if end == "pass" else pytest.raises(RuntimeError, match="its own"):
        assert run("--config", files.toml(report=report), files.script(lines)) == 0
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert f"the report could not be written to {report}" in record.getMessage()
    written, _, said = capsys.readouterr().err.partition("megagraph: nothing replayed: ")
    expected = "no GPTModel" if end == "pass" else "RuntimeError ended the script before a model ran"
    assert json.loads(written)["models"] == [] and said.startswith(expected)


def test_a_run_ends_with_what_was_replayed_or_why_that_is_not_known(files: Files, capsys: Any) -> None:
    seven = TRAINING.replace("(documents, 64, 6)", "(documents, 64, 7)")  # documents in a pack
    raise_it = f"TOO_MANY_SEQUENCES: {EagerReason.TOO_MANY_SEQUENCES.remedy} to 8 (packs held up to 7)"
    for script, toml, said in (
        ("import megagraph as it; it.uninstall()", "", "nothing is known: the script has called uninstall()"),
        ("pass", "mode = 'off'", "nothing is known: mode is off, so no report is written"),
        ("import megagraph as it; it.install(it.GraphConfig())", "mode = 'off'", "nothing is known: mode"),
        (seven, "", f"60 % of layer calls replayed; 20 % eager, {raise_it}"),
    ):
        assert run("--config", files.toml(TOML + toml), files.script(script), "5", "pass") == 0
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"megagraph: {said}")
