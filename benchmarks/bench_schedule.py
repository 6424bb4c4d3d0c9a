# SPDX-License-Identifier: Apache-2.0
"""Schedules of packs that ranks share as needed, beside one size for all packs. Counts, and needs no GPU.

Lengths are those of Megatron's benchmark of dynamic context parallelism: lognormal, 128 to 8192 tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from benchmarks.measuring.figures import Measurement
from benchmarks.measuring.results import Figure
from megagraph.demo.lengths import lognormal_lengths
from megagraph.packs.schedule import PackSchedule, ScheduleLimits, schedule_packs

COUNTED: dict[str, tuple[str, Callable[[PackSchedule], float]]] = {
    "cost of the costliest rank, mean": ("tokens", lambda schedule: max(schedule.costs)),
    "micro-batches, mean": ("micro-batches", lambda schedule: len(schedule.micro_batches)),
}
RANKS, DOCUMENTS, LONGEST, STEPS = 8, 256, 8192, 50


def figures_of(tokens: int) -> list[Figure]:
    """Micro-batches, and the cost of the costliest rank, of which each holds `tokens`."""
    steps = [
        lognormal_lengths(DOCUMENTS, mean=1024, sigma=1.5, minimum=128, maximum=LONGEST, seed=seed).tolist()
        for seed in range(STEPS)
    ]
    limits = ScheduleLimits(
        ranks=RANKS, cp_sizes=(1, 2, 4, 8), max_seqlen_per_dp_cp_rank=tokens, max_packed_seqs=64
    )
    size = LONGEST // tokens  # what the longest document needs
    ours, static = (
        [schedule_packs(lengths, each) for lengths in steps]
        for each in (limits, replace(limits, cp_sizes=(size,)))
    )
    title = f"mlm-dcp, {DOCUMENTS} documents onto {RANKS} ranks of {tokens} tokens"
    figures = []
    for what, (unit, of) in COUNTED.items():
        counted, its = (fmean(map(of, schedules)) for schedules in (ours, static))
        rival = f"static CP={size}"
        figures.append(
            Figure(name=f"{title}: {what}", value=counted, unit=unit, rival=rival, rival_value=its)
        )
    least = fmean(-(-sum(lengths) // (RANKS * tokens)) for lengths in steps)
    return [*figures[:-1], replace(figures[-1], floor=least)]


def measure(measurement: Measurement) -> None:
    """Counts for two sizes of a rank's packs."""
    for tokens in (2048, 4096):
        measurement.take(f"{tokens} tokens", lambda tokens=tokens: figures_of(tokens))  # type: ignore[misc]
