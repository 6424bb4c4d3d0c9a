# SPDX-License-Identifier: Apache-2.0
"""The format of measured figures: what is written is read, nonsense is refused, and the commit is named."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks are not installed

from benchmarks.measuring import results  # noqa: E402
from benchmarks.measuring.results import Figure, read_result, write_result  # noqa: E402

FIGURE = {"name": "forward", "value": 3.5, "unit": "us", "bar": 4.0, "holds": True}
FIGURE |= {"rival": "eager", "rival_value": 25.0, "floor": 1.1, "p10": 3.0, "p90": 5.0}
RECORD: dict[str, Any] = {
    **{"commit": "0123abc", "device": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0"},
    **{"megatron_core": "0.19.2", "transformer_engine": None, "command": "python -m benchmarks replay"},
    "figures": [FIGURE],
}


def test_a_file_is_read_and_written_again_key_for_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "new" / "other.json"
    one.write_text(json.dumps(RECORD))
    result = read_result(one)
    monkeypatch.setattr(results, "describe_environment", lambda: result.environment)
    write_result(other, result.figures)
    written = json.loads(other.read_text())
    assert written == RECORD and [*written] == [*RECORD] and [*written["figures"][0]] == [*FIGURE]
    assert [path.name for path in other.parent.iterdir()] == ["other.json"]


def test_every_committed_file_is_a_result_also_where_it_is_older_than_some_keys() -> None:
    paths = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert len(paths) >= 12
    for path in paths:
        result = read_result(path)
        assert result.figures and not (result.environment["commit"] or "").endswith("-dirty"), path


@pytest.mark.parametrize(("value", "better", "holds"), [(4, "lower", True), (5, "lower", False)])
def test_a_figure_holds_on_the_better_side_of_its_bar(value: float, better: Any, holds: bool) -> None:
    assert Figure(name="f", value=value, unit="us", bar=4, better=better).holds is holds
    assert Figure(name="f", value=-value, unit="us", bar=-4, better="higher").holds is holds
    assert Figure(name="f", value=value, unit="us").holds is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": ...}, "expected keys commit, device, .*, got commit, driver"),
        ({"colour": "red"}, "expected keys .*, got .*, colour"),
        ({"figures": ...}, "figures"),
        ({"figures": [1]}, "must be a mapping, not int"),
        ({"figures": [FIGURE | {"colour": "red"}]}, "unexpected keyword argument 'colour'"),
        ({"figures": [FIGURE | {"value": "3"}]}, "not supported between instances of .str. and .float."),
        ({"figures": [FIGURE | {"value": math.nan}]}, "key 'value': expected a finite number, got nan"),
        (
            {"figures": [FIGURE | {"holds": None}]},
            "expected `holds` to say whether 3.5 reaches 4.0, got None",
        ),
        ({"figures": [FIGURE | {"bar": None}]}, "expected `holds` to say whether 3.5 reaches None, got True"),
        ({"figures": [FIGURE | {"bar": 3.5, "holds": False}]}, "whether 3.5 reaches 3.5, got False"),
        ({"figures": [FIGURE | {"rival": None}]}, "expected who measured 25.0, got no rival"),
    ],
)
def test_nonsense_is_refused_by_file_and_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    record = {key: value for key, value in (RECORD | changes).items() if value is not ...}
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"r.json: .*{message}"):
        read_result(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"r\.json: "):
        read_result(path)


def test_the_commit_says_when_the_tree_differed_but_for_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path.resolve() / "checkout"
    (root / "benchmarks" / "results").mkdir(parents=True)
    (root / "code").write_text("1")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(root), *identity, *command], check=True, capture_output=True)
    monkeypatch.setattr(results, "ROOT", root)
    monkeypatch.setenv("MEGAGRAPH_COMMIT", "exported")
    clean = results.describe_environment()["commit"]
    assert clean is not None and len(clean) == 40
    (root / "benchmarks" / "results" / "r.json").write_text("{}")
    assert results.describe_environment()["commit"] == clean
    (root / "code").write_text("2")
    assert results.describe_environment()["commit"] == f"{clean}-dirty"
    monkeypatch.setattr(results, "ROOT", root / "benchmarks")  # no checkout of its own
    assert results.describe_environment()["commit"] == "exported"


def test_the_environment_names_device_versions_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/pytest", "--name", "two words"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    described = results.describe_environment()
    assert list(described) == list(RECORD)[:7]
    assert described["torch"] == torch.__version__ and described["device"]
    assert (described["driver"] is None) == (not torch.cuda.is_available())
    assert described["command"] == "pytest --name 'two words'"
    # And no folder.
    paths = (ROOT / "benchmarks" / "results").glob("*.json")
    monkeypatch.setattr(sys, "argv", ["x", "memory", "--out", "/somewhere", "--json"])
    assert results.describe_environment()["command"].endswith(" memory --json")
    assert not any(" --out" in read_result(path).environment["command"] for path in paths)
