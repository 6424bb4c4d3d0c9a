# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own loop on a GPU: does its log say the same with graphs as without, digit for digit?

Starts docs/examples/pretrain_packed.py through `megagraph run`, once for each mode of the plugin: a whole
run with evaluations and saves, and a run that resumes at its half. Compares losses and gradient norms as
they are printed. Needs megatron-core 0.19 with psutil, and Transformer Engine for its spec.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "examples" / "pretrain_packed.py"
LAUNCH = (sys.executable, "-m", "megagraph", "run")
TIMEOUT_SECONDS = 300

_MODEL = (
    "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --position-embedding-type rope --bf16 "
    "--attention-dropout 0 --hidden-dropout 0 --global-batch-size 4 --lr 3e-4 --lr-warmup-iters 5 "
    "--seed 1234 --log-interval 1 --eval-iters 4 --deterministic-mode"
)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """How a layer is built, and on which packs.

    Args:
        arguments: of the script.
        max_packed_seqs: documents of the capacities, as the variable spells them.
        modes: of the plugin; the first one is compared with each of the others.
        tokens: of a pack.
    """

    arguments: str
    max_packed_seqs: str
    modes: tuple[str, ...]
    tokens: int


SPECS = {
    # Packs as they are, some of them over both capacities.
    "local": Spec(
        arguments="--transformer-impl local --no-gradient-accumulation-fusion "
        "--no-rope-fusion --no-masked-softmax-fusion",
        max_packed_seqs="8,20",
        modes=("graph", "eager"),
        tokens=2048,
    ),
    # Canonical packs: the unpatched run sees what the graphs see. Few and short documents, since
    # deterministic attention takes memory with their number and the square of their length.
    "transformer_engine": Spec(
        arguments="--transformer-impl transformer_engine --no-gradient-accumulation-fusion "
        "--pack-canonical 8",
        max_packed_seqs="8",
        modes=("graph", "eager", "off"),
        tokens=1024,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one process left.

    Args:
        figures: losses and gradient norms by name, as printed.
        steps: in the log.
        seconds: of the process.
        report: the plugin's, of its only model; None in mode `off`.
    """

    figures: dict[str, str]
    steps: int
    seconds: float
    report: dict[str, Any] | None


def read_log(log: str) -> tuple[dict[str, str], int]:
    """Losses and gradient norms as Megatron printed them, and the number of steps."""
    steps = re.findall(r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+) ", log)
    evaluations = re.findall(r"validation loss at (.+?) \| lm loss value: (\S+)", log)
    figures = {f"loss {number}": loss for number, loss, _ in steps}
    figures |= {f"grad norm {number}": norm for number, _, norm in steps}
    figures |= {f"evaluation at {where}": loss for where, loss in evaluations}
    return figures, len(steps)


def compare(one: dict[str, str], other: dict[str, str]) -> dict[str, Any]:
    """How many figures both logs print, and those that differ by a digit."""
    names = one.keys() & other.keys()
    different = {name: [one[name], other[name]] for name in one if name in names and one[name] != other[name]}
    return {"compared": len(names), "only_in_one": len(one.keys() ^ other.keys()), "different": different}


def measure(
    folder: Path,
    *,
    spec: str = "local",
    iterations: int = 100,
    tokens: int | None = None,
    extra: Sequence[str] = (),
    gpu: str | None = None,
) -> dict[str, Any]:
    """Trains in each mode of a spec, whole and resumed, and compares the logs.

    The modes run side by side, so their times tell nothing.

    Args:
        folder: for logs, reports, and checkpoints that are deleted after use.
        spec: a key of `SPECS`.
        iterations: of a whole run, at least 10: evaluation after two fifths, a save after half.
        tokens: of a pack; by default the spec's.
        extra: further arguments of the script.
        gpu: which to use; by default the first.

    Returns:
        For each pair of runs the count of compared figures and the differences; for each run its steps
        and the plugin's counters.

    Raises:
        RuntimeError: where a run fails; its whole log is printed.
    """
    if iterations < 10:
        raise ValueError(f"expected at least 10 iterations, got {iterations}")
    half, chosen = iterations // 2, SPECS[spec]
    tokens = chosen.tokens if tokens is None else tokens
    arguments = [*_MODEL.split(), *chosen.arguments.split(), "--eval-interval", str(iterations * 2 // 5)]
    for name, value in {
        "seq-length": tokens,
        "max-position-embeddings": tokens,
        "train-iters": iterations,
        "lr-decay-iters": iterations,
    }.items():
        arguments += [f"--{name}", str(value)]
    arguments += extra

    def both_runs(mode: str) -> tuple[Run, Run]:
        place = folder / f"{spec}-{mode}"
        checkpoints = place / "checkpoints"
        place.mkdir(parents=True, exist_ok=True)
        environment = _environment(mode, chosen.max_packed_seqs, tokens)
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        save = ["--save", str(checkpoints), "--save-interval", str(half)]
        load = ["--load", str(checkpoints), "--ckpt-step", str(half), "--exit-on-missing-checkpoint"]
        try:
            return (
                _run(place / "whole", [*arguments, *save], environment),
                _run(place / "resumed", [*arguments, *load], environment),
            )
        finally:
            shutil.rmtree(checkpoints, ignore_errors=True)

    with ThreadPoolExecutor(len(chosen.modes)) as side_by_side:
        runs = dict(zip(chosen.modes, side_by_side.map(both_runs, chosen.modes), strict=True))
    whole = {mode: pair[0] for mode, pair in runs.items()}
    resumed = {mode: pair[1] for mode, pair in runs.items()}
    first = chosen.modes[0]
    comparisons = {}
    for mode in chosen.modes[1:]:
        comparisons[f"{first}, {mode}"] = compare(whole[first].figures, whole[mode].figures)
        comparisons[f"{first}, {mode}, resumed"] = compare(resumed[first].figures, resumed[mode].figures)
    for mode in chosen.modes:
        # The second line after a start has the mean loss of two steps: Megatron's.
        later = {name: figure for name, figure in resumed[mode].figures.items() if name != f"loss {half + 2}"}
        before = {name: figure for name, figure in whole[mode].figures.items() if name in later}
        comparisons[f"{mode}, {mode} resumed"] = compare(before, later)
    return {
        "spec": spec,
        "iterations": iterations,
        "tokens": tokens,
        "comparisons": comparisons,
        "runs": {
            **{mode: _summary(run) for mode, run in whole.items()},
            **{f"{mode}, resumed": _summary(run) for mode, run in resumed.items()},
        },
    }


def _environment(mode: str, max_packed_seqs: str, tokens: int) -> dict[str, str]:
    """This process's own, with our options and nobody else's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MEGAGRAPH_")}
    return {
        **kept,
        # Megatron's writer of checkpoints imports the script in another process.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "MEGAGRAPH_MODE": mode,
        "MEGAGRAPH_CUDA_GRAPH_MAX_PACKED_SEQS": max_packed_seqs,
        "MEGAGRAPH_MAX_SEQLEN_PER_DP_CP_RANK": str(tokens),
        "MEGAGRAPH_PROGRESS": "0",
    }


def _run(place: Path, arguments: list[str], environment: dict[str, str]) -> Run:
    report, log = place.with_suffix(".json"), place.with_suffix(".log")
    report.unlink(missing_ok=True)
    start = time.perf_counter()
    with log.open("w", encoding="utf-8") as output:
        try:
            code = subprocess.run(
                [*LAUNCH, str(SCRIPT), *arguments],
                cwd=ROOT,
                env={**environment, "MEGAGRAPH_REPORT": str(report.resolve())},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_SECONDS,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    seconds = time.perf_counter() - start
    text = log.read_text(encoding="utf-8", errors="replace")
    figures, steps = read_log(text)
    if code != 0 or not figures:
        print(text, flush=True)
        ended = f"took over {TIMEOUT_SECONDS} s" if code is None else f"ended with {code}"
        raise RuntimeError(f"{place}: the run {ended}, with {steps} steps in its log")
    models = json.loads(report.read_text(encoding="utf-8"))["models"] if report.exists() else [None]
    if len(models) != 1:
        raise RuntimeError(f"{place}: expected one model in the report, got {len(models)}")
    print(f"{place}: {steps} steps in {seconds:.0f} s", flush=True)
    return Run(figures=figures, steps=steps, seconds=seconds, report=models[0])


def _summary(run: Run) -> dict[str, Any]:
    counters = ("calls", "replays", "eager", "graphs", "capture_seconds", "failures")
    return {
        "steps": run.steps,
        "seconds": round(run.seconds, 1),
        "report": None if run.report is None else {name: run.report[name] for name in counters},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hosts.compare_megatron_lm", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="for logs and checkpoints (4 GB for a moment)")
    parser.add_argument("--spec", choices=SPECS, nargs="+", default=list(SPECS))
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--tokens", type=int, help="of a pack; by default the spec's")
    parser.add_argument("--extra", default="", help="further arguments of the script, in one string")
    options = parser.parse_args()
    results = [
        measure(
            options.folder,
            spec=spec,
            iterations=options.iterations,
            tokens=options.tokens,
            extra=options.extra.split(),
        )
        for spec in options.spec
    ]
    (options.folder / "megatron_lm.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))
    pairs = [pair for result in results for pair in result["comparisons"].values()]
    return int(any(pair["different"] or pair["only_in_one"] or not pair["compared"] for pair in pairs))


if __name__ == "__main__":
    sys.exit(main())
