# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own loop on a GPU: its log says the same with graphs as without, digit for digit. Starts
docs/examples/pretrain_packed.py through `megagraph run`, once for each mode of the plugin: a whole run with
evaluations and saves, and one that resumes at its half. Needs megatron-core 0.19 with psutil. With a folder
in the variable OUT, the figures are written there as megatron_loop.json."""

import importlib.util
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from run_scripts import ROOT, environment_with, run_python
from test_pretrain_example import EXAMPLES, log_figures

from benchmarks.measuring.results import Figure

pytestmark = [pytest.mark.soak, pytest.mark.gpu]
Model = tuple[int, int, int]  # layers, hidden size and iterations
LARGE, SMALL = (12, 1024, 100), (4, 256, 1000)
HALF = 50  # of the iterations of the large one
_COMMON = (
    "--num-attention-heads 16 --position-embedding-type rope --bf16 --attention-dropout 0 --hidden-dropout 0 "
    "--global-batch-size 4 --lr 3e-4 --lr-warmup-iters 5 --seed 1234 --log-interval 1 --eval-iters 4 "
    "--deterministic-mode --no-gradient-accumulation-fusion"
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


def _train(
    report: Path, spec: str, mode: str, model: Model, further: str = "", **variables: str
) -> tuple[dict[str, str], dict[str, Any]]:
    """Runs the script to its end; what its log says, and the plugin's report, empty in mode `off`."""
    arguments, max_packed_seqs, _, tokens = SPECS[spec]
    layers, hidden, iterations = model
    line = (
        f"{_COMMON} {arguments} --num-layers {layers} --hidden-size {hidden} --train-iters {iterations} "
        f"--lr-decay-iters {iterations} --eval-interval {iterations * 2 // 5} --seq-length {tokens} "
        f"--max-position-embeddings {tokens} {further}"
    )
    environment = {
        **environment_with(ROOT),  # Megatron's writer of checkpoints imports the script in another process
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "MEGAGRAPH_MODE": mode,
        "MEGAGRAPH_CUDA_GRAPH_MAX_PACKED_SEQS": max_packed_seqs,
        "MEGAGRAPH_MAX_SEQLEN_PER_DP_CP_RANK": str(tokens),
        "MEGAGRAPH_PROGRESS": "0",
        "MEGAGRAPH_REPORT": str(report),
        **variables,
    }
    script = EXAMPLES / "pretrain_packed.py"
    done = run_python("-m", "megagraph", "run", script, *line.split(), cwd=ROOT, env=environment)
    figures = log_figures(done.stdout)
    assert figures, done.stdout[-6000:]
    (found,) = json.loads(report.read_text(encoding="utf-8"))["models"] if report.exists() else [{}]
    return figures, found


def _both_runs(folder: Path, spec: str, mode: str) -> dict[str, tuple[dict[str, str], dict[str, Any]]]:
    checkpoints = folder / mode
    save = f"--save {checkpoints} --save-interval {HALF}"
    load = f"--load {checkpoints} --ckpt-step {HALF} --exit-on-missing-checkpoint"
    try:
        return {
            mode: _train(folder / f"{mode}-whole.json", spec, mode, LARGE, save),
            f"{mode}, resumed": _train(folder / f"{mode}-resumed.json", spec, mode, LARGE, load),
        }
    finally:
        shutil.rmtree(checkpoints, ignore_errors=True)


def _differ(one: dict[str, str], other: dict[str, str]) -> tuple[int, int]:
    """How many figures both logs print, and how many differ by a digit or are in one of them alone."""
    both = one.keys() & other.keys()
    return len(both), sum(one[name] != other[name] for name in both) + len(one.keys() ^ other.keys())


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> str:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("this megatron-core has no megatron.training")
    if request.param == "transformer_engine":
        pytest.importorskip("transformer_engine")
    return str(request.param)


def test_nothing_changes_in_a_thousand_iterations(spec: str, tmp_path: Path, measured: list[Figure]) -> None:
    _log, report = _train(tmp_path / "long.json", spec, "graph", SMALL, MEGAGRAPH_VERIFY="50")
    alarms = sum(report["eager"].get(reason, 0) for reason in ("STATE_CHANGED", "VERIFY_FAILED"))
    title = f"Megatron-LM's loop, {spec}, {SMALL[-1]} iterations"
    name = f"{title}: layer calls that ran eager in a false alarm"
    measured.append(Figure(name=name, value=alarms, unit="calls", bar=0))
    assert alarms == 0 and report["failures"] == []
    assert report["replays"] and report["verification"]["verified"] > 10


def test_the_log_is_that_of_every_other_mode(spec: str, tmp_path: Path, measured: list[Figure]) -> None:
    first, *others = modes = SPECS[spec][2]
    with ThreadPoolExecutor(len(modes)) as side_by_side:
        pairs = side_by_side.map(lambda mode: _both_runs(tmp_path, spec, mode), modes)
        runs = {name: run for pair in pairs for name, run in pair.items()}
    logs = {name: log for name, (log, _) in runs.items()}
    compared = {}
    for mode in others:
        for run in ("", ", resumed"):
            compared[f"{first}, {mode}{run}"] = _differ(logs[f"{first}{run}"], logs[f"{mode}{run}"])
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
