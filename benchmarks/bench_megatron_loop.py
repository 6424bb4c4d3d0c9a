# SPDX-License-Identifier: Apache-2.0
"""Megatron's own loop: the log of `megatron.training` with and without graphs, digit for digit."""

import tempfile
from functools import partial
from pathlib import Path

import torch

from benchmarks import megatron_lm
from benchmarks.processes import Measurement
from megagraph import results


def _loop(spec: str, gpu: str) -> list[results.Figure]:
    with tempfile.TemporaryDirectory() as folder:
        loop = megatron_lm.measure(Path(folder), spec=spec, gpu=gpu)
    return [
        results.Figure(
            name=f"Megatron-LM's loop, {spec}: printed losses and norms that differ ({pair}), "
            f"of {found['compared']}",
            value=len(found["different"]) + found["only_in_one"],
            unit="figures",
            bar=0,
        )
        for pair, found in loop["comparisons"].items()
    ]


def run() -> None:
    """Measures and writes benchmarks/results/megatron_loop.json; raises where a part failed."""
    gpus = torch.cuda.device_count()
    measurement = Measurement("megatron_loop")
    loops = {
        f"Megatron-LM's loop, {spec}": partial(_loop, spec, str(index % gpus))
        for index, spec in enumerate(megatron_lm.SPECS)
    }
    measurement.take(loops, len(loops))
    measurement.check()
