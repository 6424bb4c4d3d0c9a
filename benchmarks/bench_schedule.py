# SPDX-License-Identifier: Apache-2.0
"""Schedules of packs that ranks share in groups of several sizes: which sizes come up, how even ranks are.

Lengths are lognormal: those of Megatron's benchmark of dynamic context parallelism (`mlm-dcp`: mean 1024,
sigma 1.5, 128 to 8192 tokens), and more skewed ones. Counting needs no GPU; how long it takes the host is
recorded beside one only.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from benchmarks.measuring.figures import Measurement, plain, timed
from benchmarks.measuring.results import Figure
from megagraph.demo.lengths import lognormal_lengths
from megagraph.packs.schedule import PackSchedule, ScheduleLimits, schedule_packs

LONGEST = 8192
MAX_SEQS = 64
MAX_MS = 10.0
TIMED_CALLS = 50


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps of some documents on some ranks."""

    lengths: str
    mean: int
    sigma: float
    ranks: int
    tokens: int  # of a rank and micro-batch
    documents: int
    steps: int

    @property
    def title(self) -> str:
        return f"{self.lengths}, {self.documents} documents onto {self.ranks} ranks of {self.tokens} tokens"

    @property
    def limits(self) -> ScheduleLimits:
        sizes = tuple(2**power for power in range(self.ranks.bit_length()))
        return ScheduleLimits(
            ranks=self.ranks,
            cp_sizes=sizes,
            max_seqlen_per_dp_cp_rank=self.tokens,
            max_packed_seqs=MAX_SEQS,
        )

    @property
    def static(self) -> ScheduleLimits:
        """All packs of the size that the longest document needs."""
        size = -(-LONGEST // self.tokens)
        return replace(self.limits, cp_sizes=(size,))

    def drawn(self) -> list[list[int]]:
        """Lengths of each step."""
        return [
            lognormal_lengths(
                self.documents, mean=self.mean, sigma=self.sigma, minimum=128, maximum=LONGEST, seed=seed
            ).tolist()
            for seed in range(self.steps)
        ]


_MLM = {"lengths": "mlm-dcp", "mean": 1024, "sigma": 1.5}
_SKEWED = {"lengths": "mlm-skew", "mean": 768, "sigma": 1.8}
CASES = tuple(
    Case(**lengths, ranks=ranks, tokens=tokens, documents=documents, steps=steps)  # type: ignore[arg-type]
    for lengths in (_MLM, _SKEWED)
    for ranks, documents, steps in ((8, 256, 50), (64, 10_000, 5))
    for tokens in (2048, 4096)
)


def figures_of(case: Case) -> list[Figure]:
    """Balance, filling and sizes over all steps of a case."""
    steps = case.drawn()
    schedules = [schedule_packs(lengths, case.limits) for lengths in steps]
    of_static = [schedule_packs(lengths, case.static) for lengths in steps]
    imbalances = [schedule.imbalance for schedule in schedules]
    rows = case.ranks * case.tokens
    packs = [pack for schedule in schedules for packs in schedule.micro_batches for pack in packs]
    num_packs = Counter(pack.cp_size for pack in packs)
    num_documents = Counter[int]()
    for pack in packs:
        num_documents[pack.cp_size] += len(pack.documents)
    rival = f"static CP={case.static.cp_sizes[0]}"
    figures = [
        Figure(name=f"{case.title}: imbalance, mean", value=fmean(imbalances), unit="of the mean rank"),
        Figure(
            name=f"{case.title}: imbalance, worst step",
            value=max(imbalances),
            unit="of the mean rank",
            rival_value=max(schedule.imbalance for schedule in of_static),
            bar=1.05,
            rival=rival,
        ),
        Figure(
            name=f"{case.title}: cost of the costliest rank, mean",
            value=_cost(schedules),
            unit="tokens",
            rival_value=_cost(of_static),
            rival=rival,
        ),
        Figure(
            name=f"{case.title}: micro-batches, mean",
            value=_number(schedules),
            unit="micro-batches",
            rival_value=_number(of_static),
            floor=fmean(-(-sum(lengths) // rows) for lengths in steps),
            rival=rival,
        ),
    ]
    for size in sorted(num_packs):
        counts = {
            f"packs of {size} ranks": (100 * num_packs[size] / len(packs), "%"),
            f"documents on {size} ranks": (100 * num_documents[size] / num_documents.total(), "%"),
        }
        figures += plain(case.title, counts)
    return figures


def _cost(schedules: Sequence[PackSchedule]) -> float:
    return fmean(max(schedule.costs) for schedule in schedules)


def _number(schedules: Sequence[PackSchedule]) -> float:
    return fmean(len(schedule.micro_batches) for schedule in schedules)


def time_figures(case: Case) -> list[Figure]:
    """How long one schedule takes, from a list of integers to the packs in Python."""
    lengths = case.drawn()[0]
    times = []
    for _ in range(TIMED_CALLS):
        start = time.perf_counter()
        schedule_packs(lengths, case.limits)
        times.append((time.perf_counter() - start) * 1e3)
    return [timed(f"{case.title}: host time of a schedule", times, "ms", bar=MAX_MS)]


def measure(measurement: Measurement) -> None:
    """Counts, and beside a GPU times."""
    for case in CASES:
        measurement.take(case.title, lambda case=case: figures_of(case))  # type: ignore[misc]
    if torch.cuda.is_available():
        for case in CASES:
            measurement.take(f"{case.title}, time", lambda case=case: time_figures(case))  # type: ignore[misc]
