# SPDX-License-Identifier: Apache-2.0
"""What benchmarks make of timings: pairs, ratios, errors of rivals, and the rows of their tables."""

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks are not installed

from benchmarks import (  # noqa: E402
    bench_capture,
    bench_megatron_graphs,
    bench_megatron_loop,
    bench_memory,
    bench_replay,
    bench_step,
)
from benchmarks.measuring import compare  # noqa: E402
from benchmarks.packs.cases import CASES  # noqa: E402
from benchmarks.packs.documents import filled  # noqa: E402
from benchmarks.packs.step_cases import StepCase, in_rounds  # noqa: E402
from benchmarks.replay import time_eager_calls, time_flat_banks  # noqa: E402
from benchmarks.step import time_own_steps, time_step_rivals  # noqa: E402
from megagraph.results import Figure  # noqa: E402

REFUSED: dict[str, Any] = {"error": "RuntimeError: no"}


def named(figures: Sequence[Figure], name: str) -> list[Figure]:
    """All rows of one name."""
    return [figure for figure in figures if figure.name == name]


def bars_by_name(figures: Sequence[Figure]) -> Counter[str]:
    """How many rows of each name carry a bar."""
    return Counter(figure.name for figure in figures if figure.bar is not None)


# -- errors --------------------------------------------------------------------------------------


def test_a_rivals_error_is_the_first_of_its_chain_in_one_short_line() -> None:
    def fail() -> dict[str, Any]:
        try:
            try:
                raise ValueError("operation not permitted\nwhile capturing")
            except ValueError:
                raise RuntimeError("the capture is broken") from None
        except RuntimeError as error:
            raise OSError("cannot end") from error

    assert compare.caught(fail) == {"error": "ValueError: operation not permitted"}
    assert len(compare.described(ValueError("x" * 500))) == 200


LOG = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "layers.py", line 3, in forward
[rank0]:     assert rows % 8 == 0
[rank0]:            ^^^^^^^^^^^^^
[rank0]: AssertionError

[rank0]: During handling of the above exception, another exception occurred:

[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 9, in main
[rank0]: torch.AcceleratorError: CUDA error: operation failed
"""


def test_of_a_log_the_first_traceback_counts() -> None:
    assert compare.first_error(LOG) == "AssertionError: assert rows % 8 == 0"
    second = LOG[LOG.index("[rank0]: During") :]
    assert compare.first_error(second) == "AcceleratorError: CUDA error: operation failed"
    assert compare.first_error("ValueError: of no traceback") == ""


# -- pairs and ratios ------------------------------------------------------------------------------


def test_pairs_are_compared_before_their_median_is_taken() -> None:
    # Medians alone would say 0, and 1.
    assert compare.median_difference([1.0, 5.0, 9.0], [0.0, 5.5, 5.0]) == 1.0
    assert compare.median_ratio([2.0, 10.0, 6.0], [1.0, 10.0, 2.0]) == 2.0
    with pytest.raises(ValueError):
        compare.median_ratio([1.0], [1.0, 2.0])
    assert compare.unevenness(0.8) == compare.unevenness(1.25) == 1.25


def test_calls_through_the_patch_are_compared_with_those_beside_them() -> None:
    answer = time_eager_calls.answer_of([3e-6, 9e-6, 5e-6], [2e-6, 1e-6, 4e-6])
    assert answer["more"] == pytest.approx(1.0)
    assert answer["samples"] == 3


# -- packs -----------------------------------------------------------------------------------------

each_step_case = pytest.mark.parametrize("case", bench_step.CASES.values(), ids=bench_step.CASES.keys())


@each_step_case
def test_every_way_to_run_a_step_has_each_distinct_step_as_often(case: StepCase) -> None:
    """Bug: eager was timed on two of four steps."""
    distinct = case.distinct_steps
    rounds = time_own_steps.ROUNDS if case.is_small else time_own_steps.LARGE_ROUNDS
    for count in (rounds * distinct, time_step_rivals.ROUNDS):
        assert set(Counter(in_rounds(distinct, count)).values()) == {count // distinct}
    with pytest.raises(ValueError, match="share evenly"):
        in_rounds(distinct, distinct + 1)


@each_step_case
def test_the_steps_of_a_small_model_have_one_pack_each(case: StepCase) -> None:
    steps = case.packs()
    assert len(steps) == case.distinct_steps
    kinds = {len({id(pack) for pack in step}) for step in steps}
    assert kinds == ({1} if case.is_small else {4})
    assert len({step[0].tokens.data_ptr() for step in steps}) == len(steps)
    shapes = {
        (batch["tokens"].shape, batch["offsets"].shape, batch["longest"])
        for step in case.batches(torch.device("cpu"), canonical=True)
        for batch in step
    }
    assert len(shapes) == 1


@pytest.mark.parametrize(("variants", "slots"), time_flat_banks.BANKS.values())
def test_every_bank_runs_as_many_micro_batches_of_each_variant(variants: int, slots: int) -> None:
    measured = range(time_flat_banks.WARM_UP, time_flat_banks.WARM_UP + time_flat_banks.ROUNDS)
    rounds = [time_flat_banks.keys_of_round(i, variants=variants, slots=slots) for i in measured]
    assert {len(keys) * slots for keys in rounds} == {time_flat_banks.MICRO_BATCHES}
    counts = Counter(key for keys in rounds for key in keys)
    assert len(counts) == variants and len(set(counts.values())) == 1


def test_every_bank_comes_first_in_turn() -> None:
    names = list(time_flat_banks.BANKS)
    orders = [time_flat_banks.in_turn(names, index) for index in range(len(names))]
    assert [order[0] for order in orders] == names
    assert all(sorted(order) == sorted(names) for order in orders)


# -- rows of replay --------------------------------------------------------------------------------


def phases(**medians: float) -> dict[str, dict[str, float]]:
    """Spreads as a process answers them; names have `_` for a space."""
    return {name.replace("_", " "): {"median": us, "fastest": us - 1} for name, us in medians.items()}


GRAPHED = phases(forward=3, backward=6, bare_forward=2, bare_backward=2, engine=48, around=9)
GRAPHED |= phases(backward_without_engine=4)
EAGER = phases(forward=100, backward=200)
OWN = {"stack": {"graphed": GRAPHED, "eager": EAGER}, "last": {"graphed": GRAPHED, "eager": EAGER}}


def test_the_bar_of_the_backward_stands_on_the_whole_of_it() -> None:
    figures = bench_replay.layer_figures(OWN, {"torch": EAGER, "Transformer Engine": REFUSED})
    rows = named(figures, "host time of a graphed layer, backward, median")
    assert [(row.value, row.rival, row.rival_value) for row in rows] == [
        (6, "eager", 200),
        (6, "torch", 200),
        (6, "Transformer Engine: RuntimeError: no", None),
    ]
    assert [row.bar for row in rows] == [5.0, None, None] and rows[0].holds is False
    (share,) = named(figures, "own share over bare cudaGraphLaunch, backward, median")
    assert (share.value, share.bar, share.holds) == (4, 3.0, False)
    (without,) = named(figures, "host time of a graphed layer, backward without autograd's own call, median")
    assert (without.value, without.bar) == (4, None)
    (engine,) = named(figures, "autograd's own call, a backward pass of one node")
    assert (engine.value, engine.bar) == (48, None)
    assert set(bars_by_name(figures).values()) == {1}


def test_a_bank_is_flat_where_neither_it_nor_the_other_is_slower() -> None:
    def bank(us: float) -> dict[str, Any]:
        answer = phases(forward=us, backward=us + 3, bare_forward=2, bare_backward=2)
        return answer | phases(backward_without_engine=us)

    figures = bench_replay.bank_figures({"1 variant": bank(5), "64 variants": bank(4), "16 slots": bank(5.2)})
    ratios = {figure.name: figure for figure in figures if figure.unit == "ratio"}
    faster = ratios["64 variants and 1 variant, host time, forward: the larger / the smaller"]
    assert (faster.value, faster.holds, faster.rival_value) == (1.25, False, 1.0)
    name = "16 slots and 1 variant, host time, backward without autograd's own call: the larger / the smaller"
    assert ratios[name].holds is True
    assert len(ratios) == 4


def test_autograds_own_call_is_taken_off_sample_by_sample() -> None:
    times = {phase: [24e-6] * 3 for phase in ("forward", "bare forward", "bare backward")}
    times |= {"backward": [72e-6, 240e-6, 96e-6], "engine": [24e-6, 216e-6, 24e-6]}
    answer = time_flat_banks.answer_of(times)
    assert answer["backward without engine"]["median"] == pytest.approx(48 / time_flat_banks.SITES)
    assert answer["engine"]["median"] == pytest.approx(24.0)


def test_the_bar_of_an_eager_call_stands_on_the_models_call() -> None:
    calls = {"no pack": time_eager_calls.answer_of([303e-6] * 3, [300e-6] * 3)}
    more, whole = bench_replay.call_figures(calls)
    assert (more.unit, more.bar, more.holds) == ("us more", 2.0, False)
    assert more.value == pytest.approx(3.0)
    assert (whole.bar, whole.rival_value) == (None, pytest.approx(300.0))


# -- rows of the others ----------------------------------------------------------------------------

OURS = {
    "graphed": {"median_ms": 10.0, "fastest_ms": 9.0, "by_step_ms": [9.0, 11.0]},
    "eager": {"median_ms": 12.0, "fastest_ms": 11.0, "by_step_ms": [12.0, 13.0]},
    "unpatched": {"median_ms": 8.0, "fastest_ms": 7.0, "by_step_ms": [7.0, 9.0], "kernels_ms": 5.0},
    "floor": None,
    "busy_ms": 7.5,
    "kernels_ms": 6.0,
}


def test_a_large_step_is_held_against_eager_as_users_have_it() -> None:
    case = next(case for case in bench_step.CASES.values() if not case.is_small)
    figures = bench_step.figures_of(case, OURS, {})
    (row,) = named(figures, f"{case.name}: wall / that of {bench_step.UNPATCHED}")
    assert (row.value, row.bar, row.holds) == (1.25, 1.0, False)
    (row,) = named(figures, f"{case.name}: wall / that of {bench_step.SAME_PACKS}")
    assert (row.value, row.bar) == (pytest.approx(20 / 25), None)
    (row,) = named(figures, f"{case.name}: kernel time of a step / that of {bench_step.UNPATCHED}")
    assert (row.value, row.bar, row.holds) == (pytest.approx(1.2), 1.01, False)
    rows = named(figures, f"{case.name}: step, median")
    assert [row.rival for row in rows] == [bench_step.SAME_PACKS, bench_step.UNPATCHED]
    refused = bench_step.figures_of(case, {**OURS, "unpatched": REFUSED}, {})
    assert not named(refused, f"{case.name}: wall / that of {bench_step.UNPATCHED}")


def test_steps_of_different_packs_are_not_one_median() -> None:
    answer = time_own_steps.spread_by_step([10.0, 30.0, 12.0, 32.0, 14.0, 34.0], [0, 1, 0, 1, 0, 1])
    assert answer == {"median_ms": 22.0, "fastest_ms": 10.0, "by_step_ms": [12.0, 32.0]}


def test_a_pack_is_filled_by_one_more_document() -> None:
    pack = next(iter(CASES["lognormal"].steps(1)[0]))
    full = filled(pack, pack.num_tokens + 7)
    assert (full.num_tokens, full.num_seqs) == (pack.num_tokens + 7, pack.num_seqs + 1)
    assert full.cu_seqlens.tolist() == [*pack.cu_seqlens.tolist(), pack.num_tokens + 7]
    assert torch.equal(full.tokens[: pack.num_tokens], pack.tokens)
    assert filled(full, full.num_tokens) is full


def test_a_small_steps_floor_is_of_its_own_round_and_packs() -> None:
    floor = time_own_steps.floor_answer([11.0, 22.0, 30.0], [9.0, 18.0, 18.0], [0, 1, 1], [1.0, 2.0])
    assert floor["wall_over_floor"] == pytest.approx(1.1)
    assert (floor["median_ms"], floor["fastest_ms"], floor["bare_ms"]) == (20.0, 10.0, 18.0)
    case = next(case for case in bench_step.CASES.values() if case.is_small)
    figures = bench_step.figures_of(case, {**OURS, "floor": floor}, {"local": REFUSED})
    (row,) = named(figures, f"{case.name}: forward_backward_func wall / floor")
    assert (row.value, row.bar) == (floor["wall_over_floor"], 1.03)
    rows = named(figures, f"{case.name}: step, median")
    assert {row.floor for row in rows} == {20.0}
    assert rows[-1].rival is not None and rows[-1].rival.endswith(": RuntimeError: no")


def test_rivals_on_canonical_packs_stand_beside_ours_on_the_same() -> None:
    ours, eager, theirs = ({"median_ms": ms} for ms in (5.0, 9.0, 7.0))
    packs = bench_megatron_graphs.PACKS[1]
    rows = bench_megatron_graphs.figures_of("job", packs, ours, eager, {"local": theirs})
    assert {row.name for row in rows} == {"job: forward and backward of a step, median, canonical packs"}
    assert [(row.rival, row.rival_value, row.bar) for row in rows] == [
        ("eager, canonical packs", 9.0, 9.0),
        ("Megatron's graphs, local, canonical packs", 7.0, None),
    ]


def loop_of(*, compared: int = 5, replays: int = 3) -> dict[str, Any]:
    """What `compare_megatron_lm.measure()` returns."""
    report = {"calls": 4, "replays": replays}
    return {
        "comparisons": {"graph, eager": {"compared": compared, "only_in_one": 1, "different": {}}},
        "runs": {"graph": {"report": report}, "graph, resumed": {"report": report}, "off": {"report": None}},
    }


def test_megatrons_loop_counts_replays_and_refuses_none() -> None:
    differences, *replays = bench_megatron_loop.figures_of("local", loop_of())
    assert (differences.value, differences.bar, differences.holds) == (1, 0, False)
    assert [row.value for row in replays] == [3, 3]
    for loop in (loop_of(compared=0), loop_of(replays=0)):
        with pytest.raises(RuntimeError):
            bench_megatron_loop.figures_of("local", loop)


def test_capture_has_a_row_with_the_progress_that_users_see() -> None:
    seconds = dict.fromkeys(bench_capture.PHASES, 0.01)
    answer = {"graphs": 48, "capture_seconds": 0.48, "seconds": seconds, "nodes": [1, 2], "all_nodes": 72}
    own = {"1024": {name: {**answer, "own_bytes": 2**20} for name in bench_capture.CAPACITIES}}
    figures = bench_capture.figures_of(own, {"torch": {"seconds": 9.6, "graphs": 48}, "local": REFUSED})
    rows = named(figures, "hidden 1024, 1 capacity, progress shown: capture")
    assert [(row.value, row.bar) for row in rows] == [
        (pytest.approx(10.0), 40.0),
        (pytest.approx(10.0), None),
    ]
    assert rows[0].rival_value == pytest.approx(200.0)


def test_of_eager_memory_only_the_peak_counts() -> None:
    """Two eager parts run side by side: what lies outside of one's allocator is also the other's."""
    case = next(case for case in bench_memory.CASES.values() if not case.has_four)
    mib = bench_memory.MIB
    graphed = {"reserved": 104 * mib, "outside_before": 10 * mib, "outside": 12 * mib}
    graphed |= {"graphs": 48, "pools": 5 * mib}
    figures = bench_memory.figures_of(case, {"eager": {"reserved": 100 * mib}, "graphed": graphed})
    (peak,) = named(figures, f"{case.name}: peak memory reserved")
    assert (peak.value, peak.bar, peak.rival_value) == (104, pytest.approx(105), 100)
    (everything,) = [figure for figure in figures if "in all" in figure.name]
    assert (everything.value, everything.rival_value) == (116, 110)


# -- names -----------------------------------------------------------------------------------------


def test_every_module_that_is_run_in_a_process_is_there() -> None:
    modules = [
        line.partition('"')[2].rpartition('"')[0]
        for path in sorted(Path(ROOT, "benchmarks").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("_MODULE = ")
    ]
    assert len(modules) >= 5
    for module in modules:
        assert Path(ROOT, *module.split(".")).with_suffix(".py").is_file(), module
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.hosts.compare_megatron_lm", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and "--spec" in run.stdout, run.stderr
