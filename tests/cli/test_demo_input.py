# SPDX-License-Identifier: Apache-2.0
"""`megagraph demo` on input that it cannot use: exit code 2, a sentence, and nothing left behind."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megagraph.cli import demo as demo_module
from megagraph.cli import main
from megagraph.megatron.patch.installation import installed_plugin

COLUMNS = "expected a JSON object with one of the columns text, tokens, length"
GOOD = {"length": 20}


@pytest.fixture(autouse=True)
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may come as far as a model."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a model was made of input that cannot be used")

    monkeypatch.setattr(demo_module, "Trainer", refuse)


@pytest.fixture
def refused(
    demo: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the demo, which must end with 2 and leave the folder of its result alone; what it says."""

    def run(*arguments: str | Path, **changes: str) -> str:
        folder = tmp_path / "results"
        folder.mkdir()
        (folder / "old.json").write_text("an older result")
        for name in ("old.json", "new.json"):
            assert demo(*arguments, "--json", folder / name, **changes) == 2
        assert {path.name: path.read_text() for path in folder.iterdir()} == {"old.json": "an older result"}
        assert installed_plugin() is None
        out, err = capsys.readouterr()
        assert out == ""
        first, second = err.splitlines()
        assert first == second
        assert first.startswith("megagraph demo: ")
        return first.removeprefix("megagraph demo: ")

    return run


# -- rows ----------------------------------------------------------------------------------------


# Each kind of error; tests/demo/test_documents.py has all.
BAD_ROWS: list[tuple[object, list[str], str]] = [
    ({"length": -5}, [], "expected a length in [1, 2147483647], got -5"),
    ({"length": 65}, [], "document of 65 tokens is over the limit of 64; shorten it or raise --max"),
    ({"length": 31}, ["--max-document", "30"], "document of 31 tokens is over the limit of 30; "),
    ({"length": 1}, [], "document of 1 tokens is under the minimum of 2"),
    (b"\xff\xfe", [], f"{COLUMNS}, got b'"),
]


@pytest.mark.parametrize(("row", "options", "message"), BAD_ROWS)
def test_a_bad_row_is_named_with_file_line_and_what_was_expected(
    refused: Callable[..., str], jsonl: Callable[..., Path], row: object, options: list[str], message: str
) -> None:
    path = jsonl(GOOD, GOOD, row, GOOD)
    assert refused("--data", path, *options).startswith(f"{path}:3: {message}")


def test_a_document_longer_than_a_pack_is_named_with_the_limit_of_a_pack(
    refused: Callable[..., str], jsonl: Callable[..., Path]
) -> None:
    path = jsonl(GOOD, {"length": 80})
    assert refused("--data", path, "--max-document", "100") == (
        "document 'docs.jsonl:2' of 80 tokens is over the limit of 64 tokens a pack"
    )


def test_a_missing_file_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "gone.jsonl"
    assert refused("--data", path) == f"{path}: expected a .jsonl file, found nothing there"


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["steps", "pack_tokens", "micro_batches", "layers", "hidden", "heads"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_count_below_1_is_named_with_its_option(
    refused: Callable[..., str], jsonl: Callable[..., Path], option: str, value: str
) -> None:
    message = refused("--data", jsonl(GOOD), **{option: value})
    assert message == f"--{option.replace('_', '-')}: expected at least 1, got {value}"


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--warmup-steps", "0"], "cuda_graph_warmup_steps: expected at least 1, got 0"),
        (["--max-packed-seqs", "8", "0"], "num_seqs must be an integer of at least 1, got 0"),
    ],
)
def test_an_option_of_the_graphs_is_refused_with_its_value(
    refused: Callable[..., str], jsonl: Callable[..., Path], arguments: list[str], message: str
) -> None:
    assert message in refused("--data", jsonl(GOOD), *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "few"], "argument --steps: invalid int value: 'few'"),
        (["--max-packed-seqs"], "argument --max-packed-seqs: expected at least one argument"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_an_option_that_cannot_be_parsed_is_named(
    demo: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        demo(*arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        # 0 counted as not given; -3 and 1 left no document and ended in a StopIteration.
        *(("max_document", value, f"at least 2, got {value}") for value in ("0", "-3", "1")),
        # Of 2 heads and 3 groups the demo made a RuntimeError deep inside Megatron; of 0 a division by it.
        *(("query_groups", value, "") for value in ("0", "3")),
        ("heads", "64", ""),
        ("timed_steps", "-1", ""),
    ],
)
def test_a_shape_that_no_model_has_is_named_with_its_option(
    refused: Callable[..., str], jsonl: Callable[..., Path], option: str, value: str, expected: str
) -> None:
    message = refused("--data", jsonl(GOOD), **{option: value})
    assert message.startswith(f"--{option.replace('_', '-')}: expected {expected}")


# -- where the figures go ------------------------------------------------------------------------


@pytest.mark.megatron
@pytest.mark.parametrize("target", ["file/new.json", "file/deeper/new.json", "."])
def test_a_result_that_cannot_be_written_is_refused_before_the_training(
    demo: Callable[..., int],
    jsonl: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    target: str,
) -> None:
    """The demo trained to the end, then lost its figures in a FileExistsError."""
    (tmp_path / "file").write_text("no folder")
    data = jsonl(GOOD)
    before = sorted(tmp_path.rglob("*"))
    assert demo("--data", data, "--json", tmp_path / target) == 2
    assert str(tmp_path / target) in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_the_process_ends_with_2_and_one_line(jsonl: Callable[..., Path]) -> None:
    path = jsonl({"length": -5})
    command = [sys.executable, "-m", "megagraph", "demo", "--data", str(path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stdout == ""
    (line,) = (line for line in run.stderr.splitlines() if line.startswith("megagraph"))
    assert line == f"megagraph demo: {path}:1: expected a length in [1, 2147483647], got -5"
    assert "Traceback" not in run.stderr


def test_without_a_command_it_ends_with_2_and_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "demo | run | report" in capsys.readouterr().err
