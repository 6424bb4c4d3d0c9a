# SPDX-License-Identifier: Apache-2.0
"""Whether graphs pay, from what a trial has measured and counted. Pure: `trial.py` measures.

Steps are timed in blocks, eager and graphed ones in pairs of neighbours. So whatever drifts is in both of a
pair, and the interval is of their ratios.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch  # noqa: F401  # whose libraries the core needs

from megagraph._C import Capacity, PackShape, best_capacities
from megagraph.config import GraphConfig
from megagraph.reasons import verdict

__all__ = ["FEWEST_PAIRS", "Advice", "Block", "Findings", "Interval", "Packs", "advice_on", "interval_of"]

FEWEST_PAIRS = 3  # of which an interval says something
_MOST_CAPTURES = 4
_WORTH_A_CAPTURE = 0.01  # of all rows


class Block(NamedTuple):
    """A few steps of one kind in a row, in seconds a step."""

    step: float
    host: float  # in the schedule, on the host


class Interval(NamedTuple):
    """How many times as fast graphed steps are, and within which bounds for 95 %."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Packs:
    """Those that came.

    Args:
        counts: how often each shape came.
        room: tokens and documents that larger ones to come may have.
        multiple: of which a capacity's tokens have to be, or had better be.
    """

    counts: Mapping[PackShape, int]
    room: tuple[int, int]
    multiple: int


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a trial has found.

    Args:
        reports: of every model, without the calls that were eager for the sake of the trial.
        pairs: of an eager and a graphed block.
        packs: None if no model was given any.
        is_timed: whether steps were to be timed.
    """

    reports: Sequence[Mapping[str, Any]] = ()
    pairs: Sequence[tuple[Block, Block]] = ()
    packs: Packs | None = None
    is_timed: bool = True


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What comes of them.

    Args:
        pays: whether to turn graphs on; None if that is not known.
        verdict: that in a sentence.
        speed_up: None without enough pairs.
        padding_share: of the rows that replayed; None without a replay.
        choices: the best capacities for at most one, two, ... captures, and the share of padding they leave.
        chosen: by index, what of them the table names.
        toml: the table to paste.
    """

    pays: bool | None
    verdict: str
    speed_up: Interval | None = None
    padding_share: float | None = None
    choices: Sequence[tuple[Sequence[Capacity], float]] = field(default=())
    chosen: int = 0
    toml: str = ""


def advice_on(found: Findings, config: GraphConfig) -> Advice:
    """What to do, by what was found under this config."""
    choices = [] if found.packs is None else _choices(found.packs)
    # More captures cost memory and time, and are to be worth it.
    enough = choices[-1][1] + _WORTH_A_CAPTURE if choices else 0.0
    chosen = next((index for index, (_capacities, share) in enumerate(choices) if share <= enough), 0)
    speed_up, padding = interval_of(found.pairs), _padding_share(found.reports)
    least = choices[chosen][1] if choices else None
    pays, is_of_padding, said = _verdict(found, speed_up, padding, least)
    capacities = choices[chosen][0] if choices else ()
    longest = max((shape.max_seqlen for shape in found.packs.counts), default=0) if found.packs else 0
    return Advice(
        pays=pays,
        verdict=said,
        speed_up=speed_up,
        padding_share=padding,
        choices=choices,
        chosen=chosen,
        toml=_toml(config, capacities, longest, is_off=pays is False and not is_of_padding),
    )


def _choices(packs: Packs) -> list[tuple[list[Capacity], float]]:
    rows = sum(shape.tokens * count for shape, count in packs.counts.items())
    found = best_capacities(packs.counts, room=packs.room, multiple=packs.multiple, captures=_MOST_CAPTURES)
    return [(capacities, padded / (padded + rows)) for capacities, padded in found]


def _padding_share(reports: Sequence[Mapping[str, Any]]) -> float | None:
    """Of all models, by how much each has replayed."""
    shares = [(it["padding_share"], it["replays"]) for it in reports if it["padding_share"] is not None]
    replays = sum(count for _share, count in shares)
    return sum(share * count for share, count in shares) / replays if replays else None


# -- the interval ----------------------------------------------------------------------------------


def interval_of(pairs: Sequence[tuple[Block, Block]]) -> Interval | None:
    """Of the ratio of eager to graphed steps: Student's, of its logarithm; None of too few pairs."""
    if len(pairs) < FEWEST_PAIRS:
        return None
    ratios = [math.log(eager.step / graphed.step) for eager, graphed in pairs]
    mean = statistics.fmean(ratios)
    half = _t_quantile(len(ratios) - 1) * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return Interval(*map(math.exp, (mean, mean - half, mean + half)))


def _t_quantile(freedom: int) -> float:
    """Student's, of 0.975; Abramowitz and Stegun 26.7.5, within 1 % from two degrees of freedom on."""
    x: float = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


# -- the verdict -----------------------------------------------------------------------------------


def _verdict(
    found: Findings, speed_up: Interval | None, padding: float | None, least: float | None
) -> tuple[bool | None, bool, str]:
    """Whether graphs pay, whether they would but for the padding, and the sentence."""
    if not any(report["replays"] for report in found.reports):
        if {reason for report in found.reports for reason in report["eager"]} == {"WARMING_UP"}:
            why = "the warm-up has not ended: run more steps, or see docs/reasons.md"
            return None, False, f"whether it pays is not known: {why}"
        return False, False, f"leave it off: {verdict(found.reports)}"
    if not found.is_timed:
        return None, False, "whether it pays is not known: without a GPU there are no times"
    if speed_up is None:
        had = f"expected {FEWEST_PAIRS} pairs of eager and graphed blocks, got {len(found.pairs)}"
        why = f"{had}; the script has ended, or replays too rarely"
        return None, False, f"whether it pays is not known: {why}"
    estimate, low, high = speed_up
    measured = f"graphed steps are {estimate:.2f} times as fast ({low:.2f} to {high:.2f}, 95 %)"
    if low > 1:
        return True, False, f"turn it on: {measured}"
    # Where the device is the limit, rows cost time.
    if padding is not None and least is not None and low * (1 - least) / (1 - padding) > 1:
        eats = f"padding eats the gain, {padding:.0%} of the rows"
        remedy = f"try the capacities of the table, which leave {least:.0%}"
        return False, True, f"leave it off as it is: {measured}; {eats}: {remedy}"
    if high < 1:
        return False, False, f"leave it off: {measured}"
    return False, False, f"leave it off: {measured}, which is no gain; more --steps may tell more"


# -- the table -------------------------------------------------------------------------------------

_OF_THE_TRIAL = ("mode", "report", "progress")
_CAPACITIES = ("capacities", "cuda_graph_max_packed_seqs", "max_seqlen_per_dp_cp_rank", "max_seqlen")


def _toml(config: GraphConfig, capacities: Sequence[Capacity], longest: int, *, is_off: bool) -> str:
    """The options that the script ran under, with these capacities; documents had up to `longest` tokens."""
    default = GraphConfig().spelled()
    left_out = (*_OF_THE_TRIAL, *_CAPACITIES)
    options = {
        name: value
        for name, value in config.spelled().items()
        if name not in left_out and value != default.get(name)
    }
    if is_off:
        options = {"mode": "off", **options}
    limit = sum(it.max_seqlen for it in config.all_capacities()[-1:] if it.max_seqlen < it.tokens)
    if capacities:
        options["capacities"] = [_spelled(it, max(limit, longest) if limit else 0) for it in capacities]
    # JSON's numbers, texts and lists of them are TOML's.
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in options.items())
    return "\n".join(["[megagraph]", *lines])


def _spelled(capacity: Capacity, longest: int) -> str:
    """With the longest document, if one was set and it is no whole pack."""
    limit = f":{longest}" if 0 < longest < capacity.tokens else ""
    return f"{capacity.tokens}:{capacity.num_seqs}{limit}"
