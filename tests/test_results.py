# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megagraph import results
from megagraph.results import Comparison, Environment, Figure, Result, describe_environment

ENVIRONMENT = Environment(
    commit="0123abc",
    device="NVIDIA H200",
    driver="580.1",
    torch="2.11.0+cu130",
    megatron_core="0.16.1",
    transformer_engine="2.20.0",
    command="python -m benchmarks host_time",
)
FORWARD = Figure(
    name="forward", value=3.5, unit="us", bar=4.0, rival="make_graphed_callables", rival_value=25.0, floor=1.1
)
COMPARISON = Comparison(
    bitwise_equal=True, steps=10, calls=80, replays=70, eager={"WARMING_UP": 8, "TOO_MANY_TOKENS": 2}
)


def written(path: Path, **changes: Any) -> Path:
    """A valid file with some top-level keys changed; `...` takes a key out."""
    Result(environment=ENVIRONMENT, figures=(FORWARD,), comparison=COMPARISON).write(path)
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in record.items() if value is not ...}))
    return path


def figure_record(**changes: Any) -> dict[str, Any]:
    record = {
        "name": "forward",
        "value": 3.5,
        "unit": "us",
        "bar": 4.0,
        "holds": True,
        "rival": None,
        "rival_value": None,
        "floor": None,
    }
    return record | changes


@pytest.mark.parametrize("comparison", [None, COMPARISON])
def test_reading_gives_back_what_was_written(tmp_path: Path, comparison: Comparison | None) -> None:
    bandwidth = Figure(name="bandwidth", value=93, unit="%", bar=92, better="higher")
    seen = Figure(name="peak memory", value=1.5, unit="GiB")
    result = Result(environment=ENVIRONMENT, figures=(FORWARD, bandwidth, seen), comparison=comparison)
    result.write(tmp_path / "new" / "host_time.json")
    read = Result.read(tmp_path / "new" / "host_time.json")
    assert read == result
    assert [figure.better for figure in read.figures] == ["lower", "higher", "lower"]
    assert [figure.holds for figure in read.figures] == [True, True, None]


def test_the_file_has_these_keys_and_no_others(tmp_path: Path) -> None:
    path = written(tmp_path / "r.json")
    record = json.loads(path.read_text())
    assert list(record) == [
        *("commit", "device", "driver", "torch", "megatron_core", "transformer_engine", "command", "figures"),
        *("bitwise_equal", "steps", "calls", "replays", "eager"),
    ]
    assert record["figures"] == [
        figure_record(rival="make_graphed_callables", rival_value=25.0, floor=1.1),
    ]


def test_an_older_file_has_no_transformer_engine(tmp_path: Path) -> None:
    read = Result.read(written(tmp_path / "r.json", transformer_engine=...))
    assert read.environment == dataclasses.replace(ENVIRONMENT, transformer_engine=None)
    committed = sorted((results.ROOT / "benchmarks" / "results").glob("*.json"))
    assert committed and all(Result.read(path).figures for path in committed)


def test_the_comparison_keys_are_absent_where_nothing_was_compared(tmp_path: Path) -> None:
    Result(environment=ENVIRONMENT, figures=()).write(tmp_path / "r.json")
    assert "bitwise_equal" not in json.loads((tmp_path / "r.json").read_text())


@pytest.mark.parametrize(
    ("value", "better", "holds"),
    [
        *[(3, "lower", True), (4, "lower", True), (5, "lower", False)],
        *[(3, "higher", False), (4, "higher", True), (5, "higher", True)],
    ],
)
def test_a_figure_holds_on_the_better_side_of_its_bar(value: float, better: Any, holds: bool) -> None:
    assert Figure(name="f", value=value, unit="us", bar=4, better=better).holds is holds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": math.nan}, "key 'value': expected a finite number, got nan"),
        ({"bar": math.inf}, "key 'bar': expected a finite number, got inf"),
        ({"rival_value": 2.0}, "key 'rival': expected what measured 2.0"),
        ({"better": "faster"}, "expected better='lower' or 'higher', got 'faster'"),
    ],
)
def test_a_figure_refuses_what_cannot_be_compared(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Figure(**({"name": "f", "value": 1.0, "unit": "us"} | changes))


def test_a_comparison_accounts_for_every_call() -> None:
    with pytest.raises(ValueError, match="expected replays \\+ eager = 80 calls, got 81"):
        dataclasses.replace(COMPARISON, calls=81)
    with pytest.raises(ValueError, match="key 'NESTING': expected a count, got -1"):
        dataclasses.replace(COMPARISON, calls=69, eager={"NESTING": -1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": ...}, "key 'device': expected it to be there, got nothing"),
        ({"colour": "red"}, "key 'colour': expected only commit, .*, got it too"),
        ({"commit": 7}, "key 'commit': expected a string, got 7"),
        ({"transformer_engine": 2}, "key 'transformer_engine': expected a string, got 2"),
        ({"device": None}, "key 'device': expected a string, got null"),
        ({"figures": {}}, "key 'figures': expected a list, got {}"),
        ({"figures": [1]}, "key 'figures\\[0\\]': expected an object, got 1"),
        ({"figures": [figure_record(value="3")]}, "key 'figures\\[0\\].value': expected a number, got \"3\""),
        ({"figures": [figure_record(value=True)]}, "key 'figures\\[0\\].value': expected a number, got true"),
        ({"figures": [figure_record(holds=None)]}, "holds': expected true or false, got null"),
        ({"figures": [figure_record(bar=None)]}, "holds': expected null without a bar, got true"),
        ({"figures": [figure_record(bar=3.5, holds=False)]}, "holds': expected true where value equals bar"),
        ({"steps": 1.5}, "key 'steps': expected a whole number, got 1.5"),
        ({"steps": ...}, "key 'steps': expected it to be there, got nothing"),
        ({"bitwise_equal": 1}, "key 'bitwise_equal': expected true or false, got 1"),
        ({"eager": {"NESTING": "2"}}, "key 'eager.NESTING': expected a whole number, got \"2\""),
        ({"calls": 79}, "key 'calls': expected replays \\+ eager = 80 calls, got 79"),
    ],
)
def test_reading_names_file_key_expected_and_got(tmp_path: Path, changes: Any, message: str) -> None:
    path = written(tmp_path / "r.json", **changes)
    with pytest.raises(ValueError, match=f"r.json: .*{message}"):
        Result.read(path)


@pytest.mark.parametrize(("text", "message"), [("[]", "expected an object, got \\[\\]"), ("{", "line 1")])
def test_reading_names_a_file_that_is_no_result(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"r.json: .*{message}"):
        Result.read(path)


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "r.json")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        Result(environment=ENVIRONMENT, figures=()).write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one commit, taken for megagraph's own."""
    root = tmp_path.resolve() / "checkout"
    root.mkdir()
    git(root, "init", "-q")
    (root / "code").write_text("1")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    monkeypatch.setattr(results, "ROOT", root)
    monkeypatch.setenv("MEGAGRAPH_COMMIT", "fromenv")
    return root


def test_the_commit_says_when_the_tree_differed(checkout: Path) -> None:
    clean = describe_environment().commit
    assert clean is not None
    assert len(clean) == 40
    (checkout / "code").write_text("2")
    assert describe_environment().commit == f"{clean}-dirty"


def test_results_do_not_make_the_commit_dirty(checkout: Path) -> None:
    clean = describe_environment().commit
    (checkout / "benchmarks" / "results").mkdir(parents=True)
    (checkout / "benchmarks" / "results" / "r.json").write_text("{}")
    assert describe_environment().commit == clean


def test_without_a_checkout_of_its_own_the_commit_comes_from_the_variable(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = checkout / "site-packages"
    inside.mkdir()
    monkeypatch.setattr(results, "ROOT", inside)
    assert describe_environment().commit == "fromenv"
    monkeypatch.delenv("MEGAGRAPH_COMMIT")
    assert describe_environment().commit is None


def test_the_environment_names_device_and_versions() -> None:
    environment = describe_environment()
    assert environment.torch == torch.__version__
    assert environment.device
    assert (environment.driver is None) == (not torch.cuda.is_available())


def test_describing_does_not_import_megatron() -> None:
    code = (
        "import sys; from megagraph.results import describe_environment; describe_environment(); "
        "assert not {'megatron.core', 'transformer_engine'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=results.ROOT)


def test_the_version_is_of_what_is_imported_else_of_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results._version("no_such_module", "no-such-one", "nor-this") is None
    folder = tmp_path / "nor_this-1.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: nor-this\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert results._version("no_such_module", "no-such-one", "nor-this") == "1.2"
    assert results._version("torch", "nor-this") == torch.__version__


def test_the_command_has_no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/megagraph", "demo", "--name", "two words"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert describe_environment().command == "megagraph demo --name 'two words'"


def test_a_module_run_with_m_is_named_as_it_was_called() -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "timeit",
            "-n1",
            "-r1",
            "from megagraph import results; print(results._command())",
        ],
        check=True,
        cwd=results.ROOT,
        capture_output=True,
        text=True,
    )
    assert run.stdout.startswith("python -m timeit -n1 -r1 '")
