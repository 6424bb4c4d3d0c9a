# SPDX-License-Identifier: Apache-2.0
"""`megagraph demo` on tiny models: what it trains on, what it reports, what it leaves behind."""

import errno
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from notes import told
from pytest import MonkeyPatch
from run_scripts import Files

from megagraph.cli import demo as demo_module
from megagraph.cli import main
from megagraph.cli.ends import ExitCode
from megagraph.cli.reports import read_report
from megagraph.demo.packs import Pack
from megagraph.demo.trainer import Trainer

pytestmark = pytest.mark.megatron

LAYERS, STEPS = 2, 6  # of the tiny run
CALLS = LAYERS * STEPS  # one micro-batch a step
NO_MEMORY = "megagraph demo: not enough memory: "
TEXTS = [f"document {number} says " + "word " * (number % 4) for number in range(12)]
Compare = Callable[..., SimpleNamespace]
Demo = Callable[..., int]
Change = Callable[[Trainer], object]
Changes = Callable[[Change], None]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def texts(files: Files) -> list[str]:
    """The options that name documents of text, and a capacity for their packs."""
    return ["--data", str(files.jsonl(*({"text": text} for text in TEXTS))), "--max-packed-seqs", "8"]


@pytest.fixture
def compare(demo: Demo, tmp_path: Path) -> Compare:
    """Runs the demo, which must end with `code`. Returns the comparison: its calls are all accounted for."""

    def run(*arguments: str | Path, code: int = 0, **changes: str) -> SimpleNamespace:
        path = tmp_path / "result.json"
        assert demo(*arguments, "--json", path, **changes) == code
        document, (model,) = json.loads(path.read_text()), read_report(path)
        assert model["calls"] == model["replays"] + sum(model["eager"].values())
        assert len(document["losses"]) == document["steps"]
        return SimpleNamespace(**document, **model)

    return run


@pytest.fixture
def second_trainer(monkeypatch: MonkeyPatch) -> Changes:
    """Lets a test change the demo's graphed trainer: the second that it makes."""

    def change_with(change: Change) -> None:
        changes: Iterator[Change] = iter([lambda _eager: None, change])

        def make(*args: Any, **kwargs: Any) -> Trainer:
            trainer = Trainer(*args, **kwargs)
            next(changes)(trainer)
            return trainer

        monkeypatch.setattr(demo_module, "Trainer", make)

    return change_with


def test_pythons_own_files_train_bit_equal_in_replays(compare: Compare, monkeypatch: MonkeyPatch) -> None:
    """Without a GPU no kernel of Transformer Engine is called."""
    from megatron.core import optimizer
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as steps

    if not torch.cuda.is_available():
        needs_a_gpu = mock.Mock(side_effect=RuntimeError("no CUDA-capable device is detected"))
        monkeypatch.setattr(optimizer, "Adam", needs_a_gpu)
        monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
        for module in (clip_grads, steps):
            monkeypatch.setattr(module, "multi_tensor_applier", needs_a_gpu)
    comparison = compare("--max-packed-seqs", "8", "32")
    assert comparison.bitwise_equal and (comparison.steps, comparison.calls) == (STEPS, CALLS)
    assert comparison.eager == {"WARMING_UP": LAYERS}


def test_without_capacities_a_warm_up_learns_them(compare: Compare, texts: list[str], capsys: Any) -> None:
    comparison = compare(*texts[:2], warmup_steps="3")
    assert comparison.bitwise_equal and comparison.replays > 0
    assert comparison.eager["WARMING_UP"] == 3 * LAYERS
    assert re.search(r"\d+ tokens, \d+ documents", capsys.readouterr().out)


def test_it_prints_and_writes_the_same_again(demo: Demo, texts: Any, tmp_path: Path, capsys: Capture) -> None:
    """`megagraph report` could not read what `megagraph demo --json` wrote."""
    read = []
    for name in ("first.json", "result.json"):
        result = tmp_path / name
        assert demo(*texts, "--json", result) == 0
        read.append(json.loads(result.read_text()))
        (model,) = read[-1]["models"]
        del model["capture_seconds"], model["verification"]["seconds"]
    document = read[1]
    assert {**document, "times": None} == {**read[0], "times": None}
    out = capsys.readouterr().out
    assert re.search(rf"layer calls\W+{CALLS}\b", out)
    assert re.search(r"eager: WARMING_UP\W+2 \(16\.7%\)", out)
    assert re.search(r"loss \d\.\d{4} -> \d\.\d{4} over 6 steps", out)
    assert "bit-equal: every loss and every parameter's gradient, 6 steps" in out
    assert "NOT" not in out
    if not torch.cuda.is_available():
        assert "No GPU: the host backend stands in for graphs. It shows the bits, not the speed." in out
        assert "forward and backward" not in out and document["times"] is None
    assert document["bitwise_equal"] is True and document["differences"] == []
    assert [type(loss) for loss in document["losses"]] == [float] * STEPS
    assert document["versions"]["torch"] == str(torch.__version__)
    assert document["versions"]["megatron-core"] and document["device"]
    assert document["command"].split()[0] == "megagraph"
    assert main(["report", str(result)]) == 0
    assert re.search(rf"layer calls\W+{CALLS}\b", capsys.readouterr().out)


def test_without_a_replay_it_ends_with_3_and_a_remedy(compare: Compare, files: Files, capsys: Any) -> None:
    """It printed 'bit-equal' and ended with 0, although no graph had run."""
    assert ExitCode.NOTHING_REPLAYED == 3
    data = files.jsonl(*[{"length": 8}] * 8)
    for steps, arguments, why in (
        ("3", [], "the run ended in its warm-up. Give more --steps (3) than --warmup-steps (3)."),
        ("6", ["--max-packed-seqs", "2"], "packs hold more documents than --max-packed-seqs. Raise it"),
    ):
        assert compare("--data", data, *arguments, code=3, steps=steps, warmup_steps="3").replays == 0
        out = capsys.readouterr().out
        assert f"Nothing was replayed: {why}" in out and "bit-equal" not in out
        assert "cuda_graph_max_packed_seqs" not in out  # which nobody has typed


def test_other_weights_are_found_in_the_first_step_and_end_with_1(
    compare: Compare, second_trainer: Changes, texts: list[str], capsys: Capture
) -> None:
    second_trainer(lambda it: it.chunk.decoder.final_layernorm.weight.data[3].add_(0.5))
    comparison = compare(*texts, code=1)
    out = capsys.readouterr().out
    assert "NOT bit-equal:" in out and "bit-equal: every" not in out
    assert re.search(r"step 0, micro-batch 0: loss \d\.\d+ eager, \d\.\d+ graphed", out)
    assert "step 0: gradient of embedding.word_embeddings.weight" in out
    assert not comparison.bitwise_equal
    assert comparison.steps == STEPS


def test_a_bit_of_a_gradient_is_named_alone(demo: Any, second_trainer: Any, texts: Any, capsys: Any) -> None:
    name = "decoder.layers.1.mlp.linear_fc1.weight"

    def flip_a_bit_in_the_last_step(trainer: Trainer) -> None:
        forward_backward, calls = trainer.forward_backward, iter(range(STEPS))

        def flipped(packs: list[Pack]) -> list[torch.Tensor]:
            losses = forward_backward(packs)
            if next(calls, None) == STEPS - 1:  # on a GPU, timed steps follow
                dict(trainer.named_main_grads())[name].view(torch.int32)[-1, -1] ^= 1
            return losses

        trainer.forward_backward = flipped

    second_trainer(flip_a_bit_in_the_last_step)
    assert demo(*texts) == 1
    _, _, differences = capsys.readouterr().out.partition("NOT bit-equal:")
    assert differences.split("\n")[1:] == [f"  step {STEPS - 1}: gradient of {name}", ""]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ((130, KeyboardInterrupt), "megagraph demo: interrupted"),
        ((70, MemoryError), NO_MEMORY),
        ((70, RuntimeError, "[..] DefaultCPUAllocator: can't allocate memory"), f"{NO_MEMORY}[..]"),
        ((ExitCode.CRASHED, RuntimeError, "out of luck"), "RuntimeError: out of luck"),
    ],
)
def test_what_ends_it_is_told_in_one_line_or_a_traceback_and_leaves_no_json(
    demo: Demo, second_trainer: Changes, texts: Any, tmp_path: Path, capsys: Any, error: Any, said: str
) -> None:
    """Ctrl-C left 53 lines. Any traceback ended with 1, which says that bits differ."""
    code, kind, *words = error

    def fail(_trainer: Trainer) -> None:
        raise kind(*words)  # a new one: it keeps its frames, and what they hold

    second_trainer(fail)
    result = tmp_path / "result.json"
    with told(torch.use_deterministic_algorithms, True, False):
        assert demo(*texts, "--json", result) == code
        assert torch.are_deterministic_algorithms_enabled() and not result.exists()
    lines = capsys.readouterr().err.splitlines()
    (line,) = (line for line in lines if line.startswith(("megagraph", "RuntimeError")))
    assert line.startswith(said)


def test_json_on_standard_output_is_alone_there_and_a_full_disk_ends_it_with_a_sentence(
    demo: Demo, texts: list[str], tmp_path: Path, capsys: Capture, monkeypatch: MonkeyPatch
) -> None:
    assert demo(*texts, "--json", "-", steps="4") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["bitwise_equal"] and "layer calls" in err
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "x.json"))
    monkeypatch.setattr("megagraph.cli.ends.write_report", full)
    assert demo(*texts, "--json", tmp_path / "x.json", steps="4") == ExitCode.NOT_WRITTEN == 74
    assert "megagraph demo: --json: x.json: No space left on device\n" in capsys.readouterr().err
