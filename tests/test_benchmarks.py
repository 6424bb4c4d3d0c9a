# SPDX-License-Identifier: Apache-2.0
"""What benchmarks measure and how they report it; the measuring itself needs a GPU."""

import importlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from pytest import MonkeyPatch
from run_scripts import ROOT

from benchmarks import plot
from benchmarks.measuring import children, results
from benchmarks.measuring.clocks import MIB, PART, STEP, read_timeline
from benchmarks.measuring.results import RESULTS, Figure, measure, read_figures, write_result
from benchmarks.subjects import inside, layers, overlap, packs
from benchmarks.subjects.packs import CASES, MICRO_BATCHES, Case
from benchmarks.subjects.steps import ROUNDS, StepCase, StepTrainer, walls_in_turns
from megagraph.demo.packs import Pack
from megagraph.reasons import EagerReason

command = importlib.import_module("benchmarks.__main__")
BENCHMARKS: dict[str, Any] = {it: importlib.import_module(f"benchmarks.bench_{it}") for it in command.NAMES}
REFUSED = {"error": "RuntimeError: no"}
FIGURE = Figure(name="f", value=2, unit="us", bar=3)

# Of `training`; a soak test measures these.
_COSTS = ("allocations in 4032 replays", "synchronisations in 4032 replays")
SOAKED = ("packs over the capacity, run eager", *_COSTS)

TIMES = [3.0, 4.0, 5.0, 6.0]
PHASES = ("forward", "backward", "backward without engine", "engine", "around", "decided", "in a row")
LAYER = dict.fromkeys((*PHASES, "bare forward", "bare backward"), TIMES)
REPORT: dict[str, Any] = {"layers": 24, "calls": 100, "replays": 70, "graphs": 48, "pool_bytes": MIB}
# Every reason, so that whatever a run has found is a name here too.
REPORT |= {"eager": {reason.name: 1 for reason in EagerReason}, "capture_seconds": 0.3}
STEPS: dict[str, Any] = dict.fromkeys(("graphed", "eager", "walls", "walls_ms", "bare", "outside_ms"), TIMES)
STEPS |= {"report": REPORT, "kernels_ms": 6.0, "fitting": MIB, "all": 2 * MIB}
STEPS |= {"unpatched": {"walls": TIMES, "kernels_ms": 5.0}, "differing": 0}
STEPS |= {"reserved": 104 * MIB, "slots": 4, "pool": 3 * MIB, "routed": MIB}
STEPS |= {fill: {"alone": TIMES, "beside": TIMES} for fill in BENCHMARKS["paged_stash"].FILLS}
SAME = {"losses": 0, "gradients": 0, "report": REPORT}
OVERLAP = dict.fromkeys(("walls", "host_us"), [TIMES] * 4) | {"launches": [9.0] * 4, "share": [0.5] * 4}
OVERLAP |= {"products": [60] * 4, "memory": dict.fromkeys(overlap.MEMORY, MIB)}
_NODES = itertools.product(("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine"), overlap.PASSES)
OVERLAP |= {"nodes": {" ".join(names): (0.0, 9.0) for names in _NODES}}
# What processes of ours answer: the same for all parts of a benchmark, unless it is another one.
ANSWERS: dict[str, dict[str, Any]] = dict.fromkeys(command.NAMES, STEPS) | {
    **dict.fromkeys(("ep_overlap", "delayed_weights"), OVERLAP),
    "bits": {"losses": 2, "gradients": 9, "eager": SAME, "graph": SAME},
    "soak": {"replays": 10, "differing": 0, "steps": 3, "seconds": 2.0, "grown": {"device": 0, "process": 9}},
}
PARTS: dict[tuple[str, str], dict[str, Any]] = {
    ("replay", "own"): {"graphed": LAYER, "eager": LAYER},
    ("replay", "banks"): dict.fromkeys(layers.BANKS, LAYER),
    ("replay", "calls"): {case: {"patched": TIMES, "unpatched": TIMES} for case in layers.CASES},
    ("replay", "last"): dict.fromkeys(("backward", "megatron", "bare", "own"), TIMES),
    ("paged_stash", "upstream"): {
        **dict.fromkeys(("NCCL-EP, as megatron-core starts it", "NCCL-EP on one rank", "HybridEP"), ""),
        "experts of the op fuser that mark what they save": REFUSED["error"],
    },
    ("capture", "own"): {
        f"hidden {hidden}, {name}": 10.0
        for hidden, name in itertools.product(BENCHMARKS["capture"].HIDDEN, BENCHMARKS["capture"].CAPACITIES)
    },
}
Measured = Callable[[str], tuple[Figure, ...]]


@pytest.fixture
def measured(monkeypatch: MonkeyPatch, tmp_path: Path) -> Iterator[Measured]:
    """Runs a benchmark whose processes and clocks answer at once; rivals refuse."""

    def answer(module: str, part: str, **how: Any) -> Any:
        name = module.removeprefix("benchmarks.bench_")
        assert part in BENCHMARKS[name].PARTS
        return PARTS.get((name, part), ANSWERS[name])

    def refuse(module: str, part: str, **how: Any) -> Any:
        assert part in importlib.import_module(module).PARTS
        return REFUSED

    def run(name: str) -> tuple[Figure, ...]:
        module = BENCHMARKS[name]
        monkeypatch.setattr(module, "measure_part", answer, raising=False)
        monkeypatch.setattr(module, "try_part", refuse, raising=False)
        measure(tmp_path / f"{name}.json", module.FIGURES)
        return read_figures(tmp_path / f"{name}.json")

    calls = {"forward": lambda: None, "backward": lambda: None}
    on_cpu = {"DEVICE": "cpu", "device_us": lambda calls, **how: [[2.0, 3.0] for _ in calls]}
    ways = dict.fromkeys(("ours", "atens"), lambda *arguments: calls)
    ways |= {"recorded": lambda call: call, "Captured": lambda *arguments: SimpleNamespace(calls=calls)}
    attention, rope = BENCHMARKS["attention"], BENCHMARKS["rope"]
    with (
        mock.patch.object(torch.cuda, "device_count", lambda: BENCHMARKS["pipeline"].RANKS),
        mock.patch.multiple(rope, **on_cpu, _random=mock.Mock(), copy_of=mock.Mock()),
        mock.patch.multiple(attention, **on_cpu, **ways),
        mock.patch.object(attention.Shape, "inputs", lambda self: []),
    ):
        yield run


@pytest.mark.parametrize("name", command.NAMES)
def test_every_committed_figure_is_still_measured(measured: Measured, name: str) -> None:
    figures = measured(name)
    published = RESULTS / f"{name}.json"  # once it was measured
    committed = {f.name for f in read_figures(published)} if published.exists() else set()
    assert {of for of in committed if not of.endswith(SOAKED)} <= {f.name for f in figures}
    wall_clock = [f for f in figures if re.search(r", median|host time|GPU time|bandwidth", f.name)]
    assert all(f.p10 is not None for f in wall_clock)
    bars = Counter(f.name for f in figures if f.bar is not None)
    assert set(bars.values()) <= {1}, "of several rivals' rows one carries the bar"


def test_figures_of_soak_tests_are_there() -> None:
    jobs = (ROOT / "tests" / "megatron" / "test_real_hosts.py").read_text(encoding="utf-8")
    assert all(soaked.partition(" in ")[0] in jobs for soaked in SOAKED)
    for figure in read_figures(RESULTS / "real_hosts.json"):
        assert f'"{figure.name.partition(": ")[0]}"' in jobs or "NCCL in their graphs" in figure.name


def test_the_drawings_find_their_figures(measured: Measured, tmp_path: Path) -> None:
    rows = plot.rows_of(read_figures(RESULTS / "step.json"))
    assert len(rows) >= 5 and all(plot.OURS in row and len(row) > 1 for row in rows.values())
    nodes = plot.nodes_of(measured("delayed_weights"))
    assert nodes == {name: {"begins": 0.0, "ends": 9e-3} for name in OVERLAP["nodes"]}
    drawn, gains = tmp_path / "nodes.svg", plot.gains_of(measured("gain"))
    plot.draw_nodes(nodes, drawn)
    text = drawn.read_text()
    assert all(name in text for name in (*nodes, "compute stream", "communication stream"))
    plot.draw_gains(gains, drawn)
    assert {*itertools.chain(*gains)} == {1.0} and drawn.read_text().count("1.00") == 4 * 3


def test_named_benchmarks_are_written_whatever_another_raises_and_without_names_those_of_one_gpu(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Any
) -> None:
    """On a machine with a GPU; each benchmark has one figure."""

    def call(*names: str) -> int:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *names])
        return int(command.main())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("benchmarks.measuring.results.describe_environment", lambda: {})
    for module in BENCHMARKS.values():
        monkeypatch.setattr(module, "FIGURES", {"all": lambda: [FIGURE]})
    monkeypatch.setattr(command, "FOLDER", tmp_path / "all")
    assert call() == 0
    assert {path.stem for path in (tmp_path / "all").iterdir()} == set(command.DEFAULT)

    path = tmp_path / "some" / "rope.json"
    # A part is written before the next one begins.
    parts = {"first": lambda: [FIGURE], "second": lambda: [*read_figures(path), {}["median"]]}
    monkeypatch.setattr(BENCHMARKS["rope"], "FIGURES", parts)
    monkeypatch.setattr(command, "FOLDER", path.parent)
    assert call("rope", "training") == 1
    assert "rope: RuntimeError: second: KeyError: 'median'" in capsys.readouterr().err
    assert {it.stem for it in path.parent.iterdir()} == {"rope", "training"}
    assert read_figures(path) == (FIGURE,), "what was measured stays"


@pytest.mark.megatron
def test_a_process_answers_what_its_part_does_or_why_not(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # where others use it, each takes half a minute to begin
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # nobody need import the compiler
    program = "from functools import partial\ndef measure(how):\n"
    program += "    print('{not json}')\n    print('{\"a\": 1}', flush=True)\n"
    program += "    if how == 'exit': raise SystemExit('gone')\n    return {'b': 2}\n"
    program += "PARTS = {how: partial(measure, how) for how in ('well', 'exit')}\n"
    Path(tmp_path, "program.py").write_text(program)
    assert children.measure_part("program", "well") == {"b": 2}
    with pytest.raises(RuntimeError, match=r"^program exit: ended with 1: SystemExit: gone$"):
        children.measure_part("program", "exit")
    start = time.monotonic()
    assert "took over 0.5 s" in children.try_part("program", "well", timeout=0.5)["error"]
    assert time.monotonic() - start < 30


def test_a_rivals_error_is_the_first_of_its_chain_in_one_short_line() -> None:
    def fail() -> dict[str, Any]:
        try:
            raise ValueError("operation not permitted\nwhile capturing")
        except ValueError as error:
            raise OSError("cannot end") from error

    assert children.caught(fail) == {"error": "ValueError: operation not permitted"}
    rows = results.beside_each(FIGURE, {"a": {"us": 4}, "b": REFUSED}, "us")
    assert [(row.rival, row.rival_value) for row in rows] == [("a", 4), ("b: RuntimeError: no", None)]
    assert [row.bar for row in rows] == [3, None]


def test_pairs_are_compared_before_their_median_is_taken_and_other_packs_have_another_one() -> None:
    assert results.timed("f", results.differences([1.0, 5.0, 9.0], [0.0, 5.5, 5.0]), "us").value == 1.0
    figure = results.timed("f", results.ratios([2.0, 10.0, 6.0], [1.0, 10.0, 2.0]), "ratio")
    assert (figure.value, figure.p10, figure.p90) == (2.0, pytest.approx(1.2), pytest.approx(2.8))
    with pytest.raises(ValueError):
        results.ratios([1.0], [1.0, 2.0])
    assert BENCHMARKS["step"].by_step([10.0, 30.0, 12.0, 32.0, 14.0, 34.0], 2) == [12.0, 32.0]


def flat(steps: Sequence[Sequence[Pack]]) -> list[Pack]:
    return [pack for step in steps for pack in step]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_packs_of_a_case_are_the_same_and_some_over_capacity(case: Case) -> None:
    steps = case.steps(104)
    assert [len(step) for step in steps] == [MICRO_BATCHES] * 104
    for one, other in zip(flat(case.steps(3)), flat(steps[:3]), strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.cu_seqlens, other.cu_seqlens)
    assert max(pack.num_tokens for pack in flat(steps)) <= case.model.max_tokens
    over = [pack for pack in flat(steps) if pack.num_seqs > max(case.max_packed_seqs)]
    assert 3 <= len(over) < len(flat(steps)) / 2


def test_the_mean_of_lengths_is_that_of_the_lognormal_itself() -> None:
    """Not its median: taking mu as ln(mean) would be off by exp(sigma**2 / 2), 65% at sigma 1."""
    drawn = packs.lognormal_lengths(200_000, mean=1000, sigma=1.0, minimum=1, maximum=2**40, seed=7).double()
    assert drawn.mean().item() == pytest.approx(1000, rel=0.02)
    assert drawn.log().std().item() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("case", BENCHMARKS["step"].CASES, ids=lambda case: case.name)
def test_every_way_to_run_a_step_has_each_distinct_step_as_often(case: StepCase) -> None:
    """Bug: eager was timed on two of four steps."""
    steps, ran = case.packs(), Counter[tuple[bool, int]]()
    distinct: Any = range(case.distinct_steps)
    trainer: Any = SimpleNamespace(wall_ms=lambda step, graphs: ran.update([(graphs, step)]))
    walls_in_turns(trainer, distinct, ROUNDS, ("graphed", "eager"))
    assert ran == dict.fromkeys(itertools.product((True, False), distinct), ROUNDS)
    StepTrainer.walls_ms(trainer, distinct, ROUNDS * len(steps))
    assert all(ran[True, step] == 2 * ROUNDS for step in distinct)
    assert {len({id(pack) for pack in step}) for step in steps} == ({1} if case.is_small else {4})
    assert {pack.num_tokens for pack in flat(steps)} == {case.model.max_tokens}  # full
    batches = flat(case.batches(torch.device("cpu"), canonical=True))
    assert len({(b["tokens"].shape, b["offsets"].shape, b["longest"]) for b in batches}) == 1


def test_every_bank_runs_as_many_micro_batches_of_each_variant() -> None:
    measured = range(layers.BANK_WARM_UP, layers.BANK_WARM_UP + layers.BANK_ROUNDS)
    for variants, slots in layers.BANKS.values():
        rounds = [layers.keys_of_round(index, variants=variants, slots=slots) for index in measured]
        assert {len(keys) * slots for keys in rounds} == {layers.IN_A_ROUND}
        counts = Counter(key for keys in rounds for key in keys)
        assert len(counts) == variants and len(set(counts.values())) == 1


def test_rows_whose_gradient_ends_take_it_in_each_pass() -> None:
    """Bug: the second backward raised, and the benchmark measured nothing of layers."""
    leaf = torch.ones(3, requires_grad=True)
    rows = inside.Ends.apply(leaf)  # type: ignore[no-untyped-call]
    for _ in range(2):
        rows.backward(torch.ones(3))
    assert leaf.grad is None


def test_a_timeline_tells_graphs_from_the_rest_of_the_last_step() -> None:
    def event(cat: str, name: str, start: float, end: float, number: int = 0) -> dict[str, Any]:
        times = {"ts": start, "dur": end - start, "args": {"correlation": number}}
        return {"ph": "X", "cat": cat, "name": name, **times}

    events = [event("user_annotation", STEP, *span) for span in ((-9, -1), (0, 30))]
    events += [event("user_annotation", f"{PART}one", 0, 10), event("user_annotation", f"{PART}two", 12, 21)]
    events += [event("cuda_runtime", "cudaGraphLaunch", 1, 2, 1), event("cuda_runtime", "launch", 20, 21, 2)]
    events += [event("cuda_runtime", "cudaGraphLaunch", -3, -2, 3), event("kernel", "of the first", 3, 4, 3)]
    events += [event("kernel", "a", 5000, 9000, 1), event("kernel", "b", 14000, 16000, 1)]
    events += [event("kernel", "beside b", 15000, 17000, 1), event("kernel", "c", 24000, 25000, 2)]
    timeline = read_timeline({"traceEvents": events})
    assert [work.is_graphed for work in timeline.work] == [True, True, True, False]
    assert [work.part for work in timeline.work] == ["one", "one", "one", "two"]
    assert (timeline.kernels_ms(), timeline.busy_ms(), timeline.eager_ms()) == (9, 8, 1)
    assert (timeline.launches, timeline.share_beside("beside")) == (2, 0.5)
    with pytest.raises(ValueError, match="found none"):
        read_timeline({"traceEvents": events[2:]})


STORED = {"name": "forward", "value": 3.5, "unit": "us", "bar": 4.0, "holds": True}
STORED |= {"rival": "eager", "rival_value": 25.0, "floor": 1.1, "p10": 3.0, "p90": 5.0}
RECORD: dict[str, Any] = {
    **{"commit": "0123abc", "device": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0"},
    **{"megatron_core": "0.19.2", "transformer_engine": None, "command": "python -m benchmarks replay"},
    "figures": [STORED],
}


def test_a_file_is_read_and_written_key_for_key(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    one, other = tmp_path / "one.json", tmp_path / "new" / "other.json"
    one.write_text(json.dumps(RECORD))
    environment = {key: value for key, value in RECORD.items() if key != "figures"}
    monkeypatch.setattr(results, "describe_environment", lambda: environment)
    write_result(other, read_figures(one))
    written = json.loads(other.read_text())
    assert written == RECORD and [*written] == [*RECORD] and [*written["figures"][0]] == [*STORED]
    assert [path.name for path in other.parent.iterdir()] == ["other.json"]


def test_every_committed_file_is_a_result_also_where_it_is_older_than_some_keys() -> None:
    paths = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert len(paths) >= 12
    for path in paths:
        figures, record = read_figures(path), json.loads(path.read_text())
        assert figures and not (record["commit"] or "").endswith("-dirty"), path
        assert {*record, "transformer_engine"} == {*RECORD}, path
        assert all((figure.holds is None) == (figure.bar is None) for figure in figures), path


def test_a_figure_holds_on_the_better_side_of_its_bar() -> None:
    figure = partial(Figure, name="f", unit="us")
    for value, holds in ((4, True), (5, False)):
        assert figure(value=value, bar=4, better="lower").holds is holds
        assert figure(value=-value, bar=-4, better="higher").holds is holds
        assert figure(value=value).holds is None


def test_nonsense_is_refused_by_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for change, message in (
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
        ({"value": math.nan}, "key 'value': expected a finite number, got nan"),
        ({"rival": None}, "expected who measured 25.0, got no rival"),
    ):
        path.write_text(json.dumps(RECORD | {"figures": [STORED | change]}))
        with pytest.raises(ValueError, match=f"r.json: .*{message}"):
            read_figures(path)


def test_the_commit_says_if_more_than_results_differed(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    root = tmp_path.resolve() / "checkout"
    (root / "benchmarks" / "results").mkdir(parents=True)
    (root / "code").write_text("1")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(root), *identity, *command], check=True, capture_output=True)
    monkeypatch.setattr(results, "ROOT", root)
    monkeypatch.setenv("MEGAGRAPH_COMMIT", "exported")
    clean = results.describe_environment()["commit"]
    assert clean is not None and len(clean) == 40
    (root / "benchmarks" / "results" / "r.json").write_text("{}")
    assert results.describe_environment()["commit"] == clean
    (root / "code").write_text("2")
    assert results.describe_environment()["commit"] == f"{clean}-dirty"
    monkeypatch.setattr(results, "ROOT", root / "benchmarks")  # no checkout of its own
    assert results.describe_environment()["commit"] == "exported"


def test_the_environment_names_device_versions_and_the_command(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/pytest", "--name", "two words"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    described = results.describe_environment()
    assert list(described) == list(RECORD)[:7]
    assert described["torch"] == torch.__version__ and described["device"]
    assert (described["driver"] is None) == (not torch.cuda.is_available())
    assert described["command"] == "pytest --name 'two words'"
