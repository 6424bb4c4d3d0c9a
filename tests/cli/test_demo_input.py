# SPDX-License-Identifier: Apache-2.0
"""`megagraph demo` on input that it cannot use: exit code 2, a sentence, and nothing left behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_scripts import Files

from megagraph.cli import demo as demo_module
from megagraph.cli import main
from megagraph.megatron.patch.installation import installed_plugin

GOOD = {"length": 20}


@pytest.fixture(autouse=True)
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may come as far as a model."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a model was made of input that cannot be used")

    monkeypatch.setattr(demo_module, "Trainer", refuse)


@pytest.fixture
def refused(demo: Callable[..., int], files: Files, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the demo, which must end with 2 and leave the folder of its result alone; what it says."""

    def run(*arguments: str | Path) -> str:
        folder = files.folder / "results"
        folder.mkdir()
        (folder / "old.json").write_text("an older result")
        for name in ("old.json", "new.json"):
            assert demo(*arguments, "--json", folder / name) == 2
        assert {path.name: path.read_text() for path in folder.iterdir()} == {"old.json": "an older result"}
        assert installed_plugin() is None
        out, err = capsys.readouterr()
        assert out == ""
        first, second = err.splitlines()
        assert first == second
        assert first.startswith("megagraph demo: ")
        return first.removeprefix("megagraph demo: ")

    return run


# Rows of a file, options, and how the sentence begins; tests/demo/test_documents.py has all kinds of rows.
WRONG: list[tuple[list[object], str, str]] = [
    (
        [GOOD, {"length": 65}],
        "",
        "FILE:2: document of 65 tokens is over the limit of 64; shorten it, or raise",
    ),
    ([{"length": 31}], "--max-document 30", "FILE:1: document of 31 tokens is over the limit of 30; "),
    ([{"length": 1}], "", "FILE:1: document of 1 tokens is under the minimum of 2"),
    (
        [GOOD, {"length": 80}],
        "--max-document 100",
        "--max-document: expected at most --pack-tokens (64), got 100",
    ),
    *(
        ([GOOD], f"{option} 0", f"{option}: expected at least 1, got 0")
        for option in ("--steps", "--micro-batches", "--layers", "--hidden", "--heads", "--warmup-steps")
    ),
    # These named no option, or another one.
    ([GOOD], "--pack-tokens 1", "--pack-tokens: expected at least 2, got 1"),
    ([GOOD], "--max-packed-seqs 8 0", "--max-packed-seqs: expected at least 1, got 0"),
    # These ended in tracebacks.
    ([GOOD], "--heads 3", "--heads: expected a divisor of --hidden (32), got 3"),
    ([GOOD], "--hidden 6", "--hidden: expected for each head a multiple of "),
    ([GOOD], "--seed 99999999999999999999999", "--seed: expected at most 4294967295, got 9999"),
    ([GOOD], "--layers 99999999999", "--layers: expected at most 1000, got 99999999999"),
    # 0 counted as not given; -3 and 1 left no document and ended in a StopIteration.
    *(
        ([GOOD], f"--max-document {value}", f"--max-document: expected at least 2, got {value}")
        for value in (0, -3, 1)
    ),
    # Of 2 heads and 3 groups the demo made a RuntimeError deep inside Megatron; of 0 a division by it.
    *(([GOOD], f"--query-groups {value}", "--query-groups: expected ") for value in (0, 3)),
    ([GOOD], "--heads 64", "--heads: expected "),
    ([GOOD], "--timed-steps -1", "--timed-steps: expected "),
]


@pytest.mark.megatron
@pytest.mark.parametrize(("rows", "options", "message"), WRONG)
def test_what_cannot_be_used_is_named(
    refused: Callable[..., str], files: Files, rows: list[object], options: str, message: str
) -> None:
    path = files.jsonl(*rows)
    assert refused("--data", path, *options.split()).startswith(message.replace("FILE", str(path)))


def test_a_command_that_is_left_out_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "demo | run | report" in capsys.readouterr().err


@pytest.mark.megatron
@pytest.mark.parametrize("target", ["file/new.json", "file/deeper/new.json", "."])
def test_a_result_that_cannot_be_written_is_refused_before_the_training(
    demo: Callable[..., int], files: Files, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    """The demo trained to the end, then lost its figures in a FileExistsError."""
    (files.folder / "file").write_text("no folder")
    data, path = files.jsonl(GOOD), files.folder / target
    before = sorted(files.folder.rglob("*"))
    assert demo("--data", data, "--json", path) == 2
    assert str(path) in capsys.readouterr().err
    assert sorted(files.folder.rglob("*")) == before
