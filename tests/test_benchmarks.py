# SPDX-License-Identifier: Apache-2.0
"""What benchmarks measure and how they report it; the measuring itself needs a GPU."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # benchmarks are not installed

from benchmarks import bench_main_job as main_job  # noqa: E402
from benchmarks.hosts.measure_job import JOBS, Job  # noqa: E402
from benchmarks.hosts.run_jobs import comparison_of  # noqa: E402
from benchmarks.packs.cases import CASES, MICRO_BATCHES, Case  # noqa: E402
from megagraph.demo.packers import Pack  # noqa: E402
from megagraph.results import Comparison, Figure, Result  # noqa: E402

command = importlib.import_module("benchmarks.__main__")
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


# -- the packs -----------------------------------------------------------------------------------


def flat(steps: Sequence[Sequence[Pack]]) -> list[Pack]:
    return [pack for step in steps for pack in step]


def same(one: Pack, other: Pack) -> bool:
    return (
        torch.equal(one.tokens, other.tokens)
        and torch.equal(one.cu_seqlens, other.cu_seqlens)
        and one.max_seqlen == other.max_seqlen
    )


@each_case
def test_a_case_makes_the_same_packs_every_time(case: Case) -> None:
    state = torch.get_rng_state()
    one = case.steps(3)
    torch.manual_seed(99)
    try:
        other = case.steps(4)
    finally:
        torch.set_rng_state(state)
    assert [len(step) for step in one] == [MICRO_BATCHES] * 3
    pairs = zip(flat(one), flat(other[:3]), strict=True)
    assert all(same(*pair) for pair in pairs)
    assert torch.equal(torch.get_rng_state(), state)


@each_case
def test_the_documents_of_a_case_last_for_every_step_and_some_packs_are_over_its_capacity(case: Case) -> None:
    steps = case.steps(main_job.COMPARED_STEPS)
    assert [len(step) for step in steps] == [MICRO_BATCHES] * main_job.COMPARED_STEPS
    packs = flat(steps)
    assert max(pack.num_tokens for pack in packs) <= case.model.max_tokens
    assert int(max(pack.tokens.max() for pack in packs)) < case.model.vocab
    over = [pack for pack in packs if pack.num_seqs > max(case.max_packed_seqs)]
    assert 3 <= len(over) < len(packs) / 2


@each_case
def test_every_step_before_the_timed_ones_keeps_a_pack_that_fits(case: Case) -> None:
    for packs in case.steps(main_job.WARMUP_STEPS + 3):
        assert any(pack.num_seqs <= max(case.max_packed_seqs) for pack in packs)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_a_job_has_packs_that_its_ranks_can_share(job: Job) -> None:
    """Bug: one job drew documents that were longer than its packs, and ended before it began."""
    packs = flat(job.packs(2))
    assert len(packs) == 2 * MICRO_BATCHES
    assert all(0 < pack.num_tokens <= job.model.max_tokens for pack in packs)
    assert all(pack.num_tokens % job.tensor_parallel == 0 for pack in packs)


def test_a_case_is_found_by_its_name() -> None:
    assert {name: case.name for name, case in CASES.items()} == {name: name for name in CASES}


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`python -m benchmarks` with some arguments, in this process."""

    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
        code: int = command.main()
        return code

    return main


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was run in place of the benchmarks."""
    done: list[str] = []
    for name in command.NAMES:
        module = importlib.import_module(f"benchmarks.bench_{name}")
        monkeypatch.setattr(module, "run", lambda name=name: done.append(name))
    return done


def test_without_a_gpu_it_says_so_and_ends_with_2(
    call: Callable[..., int],
    runs: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call() == 2
    assert call("main_job") == 2
    message = "benchmarks measure CUDA graphs and need a GPU; none is here\n"
    assert capsys.readouterr() == ("", 2 * message)
    assert runs == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_the_process_ends_with_2_without_a_gpu() -> None:
    run = subprocess.run([sys.executable, "-m", "benchmarks"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "need a GPU; none is here" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("has_gpu", [False, True])
def test_an_unknown_name_ends_with_2_before_any_benchmark_runs(
    call: Callable[..., int],
    runs: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    has_gpu: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with pytest.raises(SystemExit) as ended:
        call("main_job", "fastest")
    assert ended.value.code == 2
    assert f"expected one of {', '.join(command.NAMES)}, got 'fastest'" in capsys.readouterr().err
    assert runs == []


def test_named_benchmarks_run_and_without_names_all(
    call: Callable[..., int], runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert call() == 0
    assert runs == list(command.DEFAULT)
    assert call("main_job") == 0
    assert runs == [*command.DEFAULT, "main_job"]


def test_whatever_a_benchmark_raises_the_others_run(
    call: Callable[..., int],
    runs: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise KeyError("median")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.import_module("benchmarks.bench_rope"), "run", fail)
    assert call("rope", "staging") == 1
    assert runs == ["staging"]
    assert "rope: KeyError: 'median'" in capsys.readouterr().err


# -- the main job's figures ----------------------------------------------------------------------

MIB = 2**20
REPORT: dict[str, Any] = {
    "layers": 24,
    "calls": 1_000,
    "replays": 700,
    "eager": {"WARMING_UP": 200, "TOO_MANY_SEQUENCES": 100},
    "graphs": 10,
    "capture_seconds": 0.3,
    "padding_share": 0.25,
}
BITS: dict[str, Any] = {"differences": [], "steps": 104, "report": REPORT, "over_capacity": 4}
TIMES: dict[str, Any] = {
    "median_ms": 20.0,
    "fastest_ms": 19.0,
    "reserved_bytes": 1_000 * MIB,
    "reserved_with_eager_bytes": 1_100 * MIB,
    "kernel_ms": 10.0,
    "busy_share": 0.5,
    "report": REPORT,
}
GRAPHED = TIMES | {"median_ms": 12.0, "busy_share": 0.9, "reserved_bytes": 1_040 * MIB}
GRAPHED |= {"replays": 4_032, "allocations": 0, "synchronisations": 0}


def figures(
    *, bits: dict[str, Any] = BITS, eager: dict[str, Any] = TIMES, **graphed: Any
) -> dict[str, Figure]:
    """The figures of a case by their names, without its own."""
    found = main_job.figures_of("case", bits, eager, GRAPHED | graphed)
    assert all(figure.name.startswith("case: ") for figure in found)
    assert len({figure.name for figure in found}) == len(found)
    return {figure.name.removeprefix("case: "): figure for figure in found}


def test_the_figures_stand_beside_their_bars_and_rivals() -> None:
    found = figures()
    time = found["forward and backward of a step, median"]
    assert (time.value, time.unit, time.bar, time.floor) == (12.0, "ms", 20.0, None)
    assert (time.rival, time.rival_value, time.holds) == ("eager", 20.0, True)
    busy = found["GPU busy share"]
    assert (busy.value, busy.rival_value) == (0.9, 0.5)
    assert found["kernel time of a step"].bar == pytest.approx(10.1)
    memory = found["peak memory reserved"]
    assert (memory.value, memory.unit, memory.rival_value) == (1_040.0, "MiB", 1_000.0)
    assert memory.bar == pytest.approx(1_050.0)
    assert found["peak memory reserved, with packs over the capacity"].value == 1_100.0
    assert (found["capture"].value, found["capture"].unit) == (pytest.approx(30.0), "ms a graph")
    assert found["padding share"].value == 0.25
    assert found["allocations in 4032 replays"].bar == 0
    assert found["synchronisations in 4032 replays"].bar == 0
    assert all(figure.holds in (True, None) for figure in found.values())


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"median_ms": 20.5}, "forward and backward of a step, median"),
        ({"kernel_ms": 10.2}, "kernel time of a step"),
        ({"reserved_bytes": 1_051 * MIB}, "peak memory reserved"),
        ({"report": REPORT | {"capture_seconds": 0.41}}, "capture"),
        ({"allocations": 1}, "allocations in 4032 replays"),
        ({"synchronisations": 1}, "synchronisations in 4032 replays"),
        ({"bits": BITS | {"over_capacity": 2}}, "packs over the capacity, run eager"),
    ],
)
def test_a_figure_past_its_bar_does_not_hold(changes: dict[str, Any], name: str) -> None:
    assert [figure for figure, value in figures(**changes).items() if value.holds is False] == [name]


def test_the_comparison_adds_up_over_the_jobs_and_their_ranks() -> None:
    other = REPORT | {"calls": 50, "replays": 30, "eager": {"WARMING_UP": 15, "SUSPENDED": 5}}
    one, two = BITS | {"reports": [REPORT]}, BITS | {"steps": 6, "reports": [other, other]}
    assert comparison_of([one, two]) == Comparison(
        bitwise_equal=True,
        steps=110,
        calls=1_100,
        replays=760,
        eager={"WARMING_UP": 230, "TOO_MANY_SEQUENCES": 100, "SUSPENDED": 10},
    )
    assert comparison_of([]) is None


def test_a_difference_in_one_job_is_a_difference_of_all() -> None:
    equal = BITS | {"reports": [REPORT]}
    found = comparison_of([equal, equal | {"differences": ["step 3: gradient of decoder"]}, equal])
    assert found is not None and not found.bitwise_equal


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the main job asked its processes, which answer at once; results go to a folder of the test."""
    answers = {"bits": BITS, "eager": TIMES, "graphed": GRAPHED}
    asked: list[tuple[str, str]] = []

    def answer(module: str, case: str, what: str, *, timeout: float) -> dict[str, Any]:
        assert module == "benchmarks.bench_main_job"
        asked.append((case, what))
        return answers[what]

    monkeypatch.setattr(main_job, "measure_part", answer)
    monkeypatch.setenv("OUT", str(tmp_path))
    return asked


def test_a_run_writes_every_case_in_the_common_format(
    tmp_path: Path, asked: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    main_job.run()
    assert asked == [(name, what) for name in CASES for what in ("bits", "eager", "graphed")]
    result = Result.read(tmp_path / "main_job.json")
    assert len(result.figures) == len(CASES) * len(figures())
    assert result.comparison == comparison_of([BITS | {"reports": [REPORT]}] * len(CASES))
    assert f"wrote {tmp_path / 'main_job.json'}; bit-equal: True" in capsys.readouterr().out


def test_a_case_that_fails_is_named_and_the_others_stay(
    tmp_path: Path, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = main_job.measure_part

    def failing(module: str, case: str, what: str, *, timeout: float) -> dict[str, Any]:
        if (case, what) == ("documents", "eager"):
            raise RuntimeError("out of memory")
        found: dict[str, Any] = answer(module, case, what, timeout=timeout)
        return found

    monkeypatch.setattr(main_job, "measure_part", failing)
    with pytest.raises(RuntimeError, match="documents: RuntimeError: out of memory"):
        main_job.run()
    result = Result.read(tmp_path / "main_job.json")
    assert len(result.figures) == (len(CASES) - 1) * len(figures())
    # Its bits were compared nevertheless.
    assert result.comparison == comparison_of([BITS | {"reports": [REPORT]}] * len(CASES))
