# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own loop on a GPU: its log says the same with graphs as without, digit for digit. Starts
docs/examples/pretrain_packed.py through `megagraph run`, once for each mode of the plugin: a whole run with
evaluations and saves, and one that resumes at its half. Needs megatron-core 0.19 with psutil. With a folder
in the variable OUT, the figures are written there as megatron_loop.json."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_pretrain_example import log_figures

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # benchmarks are not installed

from benchmarks.measuring.results import Figure  # noqa: E402

pytestmark = [pytest.mark.soak, pytest.mark.gpu]
ITERATIONS, HALF = 100, 50
MANY_ITERATIONS = 1000  # of a small model
TIMEOUT_SECONDS = 300
_COMMON = (
    "--num-attention-heads 16 --position-embedding-type rope --bf16 --attention-dropout 0 --hidden-dropout 0 "
    "--global-batch-size 4 --lr 3e-4 --lr-warmup-iters 5 --seed 1234 --log-interval 1 --eval-iters 4 "
    "--deterministic-mode --no-gradient-accumulation-fusion"
)


def _model(layers: int, hidden: int, iterations: int) -> str:
    return (
        f"{_COMMON} --num-layers {layers} --hidden-size {hidden} --train-iters {iterations} "
        f"--lr-decay-iters {iterations} --eval-interval {iterations * 2 // 5}"
    )


# By spec: arguments, documents of the capacities, modes, tokens of a pack. The first mode is compared with
# each of the others.
SPECS = {
    # Packs as they are, some of them over both capacities.
    "local": (
        "--transformer-impl local --no-rope-fusion --no-masked-softmax-fusion",
        "8,20",
        ("graph", "eager"),
        2048,
    ),
    # Canonical packs: the unpatched run sees what the graphs see. Few and short documents, since
    # deterministic attention takes memory with their number and the square of their length.
    "transformer_engine": (
        "--transformer-impl transformer_engine --pack-canonical 8",
        "8",
        ("graph", "eager", "off"),
        1024,
    ),
}


def _train(place: Path, line: str, environment: dict[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """Runs the script to its end; what its log says, and the plugin's report, empty in mode `off`."""
    report = place.with_suffix(".json")
    script = ROOT / "docs" / "examples" / "pretrain_packed.py"
    done = subprocess.run(
        [sys.executable, "-m", "megagraph", "run", str(script), *line.split()],
        cwd=ROOT,
        env={**environment, "MEGAGRAPH_REPORT": str(report)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    figures = log_figures(done.stdout)
    assert done.returncode == 0 and figures, done.stdout[-6000:]
    models = json.loads(report.read_text(encoding="utf-8"))["models"] if report.exists() else [{}]
    (model,) = models
    return figures, model


def _command(spec: str, mode: str, model: str) -> tuple[str, dict[str, str]]:
    arguments, max_packed_seqs, _, tokens = SPECS[spec]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEGAGRAPH_")}
    environment = {
        **kept,
        # Megatron's writer of checkpoints imports the script in another process.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "MEGAGRAPH_MODE": mode,
        "MEGAGRAPH_CUDA_GRAPH_MAX_PACKED_SEQS": max_packed_seqs,
        "MEGAGRAPH_MAX_SEQLEN_PER_DP_CP_RANK": str(tokens),
        "MEGAGRAPH_PROGRESS": "0",
    }
    return f"{model} {arguments} --seq-length {tokens} --max-position-embeddings {tokens}", environment


def _both_runs(folder: Path, spec: str, mode: str) -> dict[str, tuple[dict[str, str], dict[str, Any]]]:
    line, environment = _command(spec, mode, _model(12, 1024, ITERATIONS))
    checkpoints = folder / mode
    save = f"--save {checkpoints} --save-interval {HALF}"
    load = f"--load {checkpoints} --ckpt-step {HALF} --exit-on-missing-checkpoint"
    try:
        return {
            mode: _train(folder / f"{mode}-whole", f"{line} {save}", environment),
            f"{mode}, resumed": _train(folder / f"{mode}-resumed", f"{line} {load}", environment),
        }
    finally:
        shutil.rmtree(checkpoints, ignore_errors=True)


def _differ(one: dict[str, str], other: dict[str, str]) -> tuple[int, int]:
    """How many figures both logs print, and how many differ by a digit or are in one of them alone."""
    both = one.keys() & other.keys()
    return len(both), sum(one[name] != other[name] for name in both) + len(one.keys() ^ other.keys())


def _needs(spec: str) -> None:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("this megatron-core has no megatron.training")
    if spec == "transformer_engine":
        pytest.importorskip("transformer_engine")


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_changes_in_a_thousand_iterations(spec: str, tmp_path: Path, measured: list[Figure]) -> None:
    _needs(spec)
    line, environment = _command(spec, "graph", _model(4, 256, MANY_ITERATIONS))
    _log, report = _train(tmp_path / "long", line, environment | {"MEGAGRAPH_VERIFY": "50"})
    alarms = sum(report["eager"].get(reason, 0) for reason in ("STATE_CHANGED", "VERIFY_FAILED"))
    title = f"Megatron-LM's loop, {spec}, {MANY_ITERATIONS} iterations"
    name = f"{title}: layer calls that ran eager in a false alarm"
    measured.append(Figure(name=name, value=alarms, unit="calls", bar=0))
    assert alarms == 0 and report["failures"] == []
    assert report["replays"] and report["verification"]["verified"] > 10


@pytest.mark.parametrize("spec", SPECS)
def test_the_log_is_that_of_every_other_mode(spec: str, tmp_path: Path, measured: list[Figure]) -> None:
    _needs(spec)
    first, *others = modes = SPECS[spec][2]
    with ThreadPoolExecutor(len(modes)) as side_by_side:
        pairs = side_by_side.map(lambda mode: _both_runs(tmp_path, spec, mode), modes)
        runs = {name: run for pair in pairs for name, run in pair.items()}
    logs = {name: log for name, (log, _) in runs.items()}
    compared = {}
    for mode in others:
        compared[f"{first}, {mode}"] = _differ(logs[first], logs[mode])
        resumed = logs[f"{first}, resumed"], logs[f"{mode}, resumed"]
        compared[f"{first}, {mode}, resumed"] = _differ(*resumed)
    for mode in modes:
        # The second line after a start has the mean loss of two steps: Megatron's.
        later = {name: of for name, of in logs[f"{mode}, resumed"].items() if name != f"loss {HALF + 2}"}
        before = {name: of for name, of in logs[mode].items() if name in later}
        compared[f"{mode}, {mode} resumed"] = _differ(before, later)
    title = f"Megatron-LM's loop, {spec}"
    differ = f"{title}: printed losses and norms that differ"
    measured += [
        Figure(name=f"{differ} ({pair}), of {count}", value=different, unit="figures", bar=0)
        for pair, (count, different) in compared.items()
    ]
    for name in (first, f"{first}, resumed"):
        report = runs[name][1]
        assert report["replays"] > 0
        what = f"{title}: replays ({name}), of {report['calls']} layer calls"
        measured.append(Figure(name=what, value=report["replays"], unit="replays"))
    assert all(count and not different for count, different in compared.values()), compared
