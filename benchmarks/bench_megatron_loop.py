# SPDX-License-Identifier: Apache-2.0
"""Megatron's own loop: the log of `megatron.training` with and without graphs, digit for digit."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.hosts import compare_megatron_lm
from benchmarks.measuring.publish import Measurement
from megagraph import results


def figures_of(spec: str, loop: dict[str, Any]) -> list[results.Figure]:
    """The figures of one spec, from what `compare_megatron_lm.measure()` returns.

    Raises:
        RuntimeError: where nothing was compared, or a graphed run replayed nothing.
    """
    figures = []
    for pair, found in loop["comparisons"].items():
        if not found["compared"]:
            raise RuntimeError(f"{spec}: the logs of {pair} have no figure in common")
        figures.append(
            results.Figure(
                name=f"Megatron-LM's loop, {spec}: printed losses and norms that differ ({pair}), "
                f"of {found['compared']}",
                value=len(found["different"]) + found["only_in_one"],
                unit="figures",
                bar=0,
            )
        )
    for name, run in loop["runs"].items():
        if name.partition(",")[0] != "graph":
            continue
        report = run["report"]
        if report is None or not report["replays"]:
            raise RuntimeError(f"{spec}, {name}: expected replays, got {report}")
        figures.append(
            results.Figure(
                name=f"Megatron-LM's loop, {spec}: replays ({name}), of {report['calls']} layer calls",
                value=report["replays"],
                unit="replays",
            )
        )
    return figures


def _loop(spec: str, gpu: str) -> list[results.Figure]:
    with tempfile.TemporaryDirectory() as folder:
        return figures_of(spec, compare_megatron_lm.measure(Path(folder), spec=spec, gpu=gpu))


def run() -> None:
    """Measures and writes benchmarks/results/megatron_loop.json; raises where a part failed."""
    gpus = torch.cuda.device_count()
    measurement = Measurement("megatron_loop")
    loops = {
        f"Megatron-LM's loop, {spec}": partial(_loop, spec, str(index % gpus))
        for index, spec in enumerate(compare_megatron_lm.SPECS)
    }
    measurement.take_side_by_side(loops, len(loops))
    measurement.publish()
