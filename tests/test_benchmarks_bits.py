# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks `bits` and `guards` count and time, on models that need no GPU."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # benchmarks are not installed

from benchmarks import table
from benchmarks.measuring.results import Figure
from benchmarks.measuring.timeline import Timeline, Work
from benchmarks.subjects import bits, costs, guards, halves
from benchmarks.subjects.hosts import install_for
from megagraph import megatron
from megagraph.demo.cpu import megatron_on_cpu
from megagraph.demo.trainer import ModelOptions, process_groups

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark itself runs on a GPU"),
]
OPTIONS = ModelOptions(layers=2, hidden=32, heads=2, max_tokens=64)
STEPS = 5  # of which three warm up


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with megatron_on_cpu(), process_groups():
        yield


def test_a_training_is_compared_with_one_that_knows_nothing_of_the_plugin() -> None:
    case = bits.BitsCase(share=0.5, transformer_engine=False)
    answer = bits.measure_bits(case, OPTIONS, STEPS)
    assert answer["losses"] == STEPS * 4 and answer["gradients"] > STEPS * 12
    for mode in bits.MODES:
        assert answer[mode]["losses"] == answer[mode]["gradients"] == 0
        assert answer[mode]["report"]["calls"] == STEPS * 4 * OPTIONS.layers
    assert answer["eager"]["report"]["replays"] == 0 < answer["graph"]["report"]["replays"]


@pytest.mark.parametrize("modules", halves.SCOPES.values())
def test_halves_of_layers_are_compared_with_it_too(modules: tuple[str, ...]) -> None:
    case = bits.BitsCase(share=0.5, transformer_engine=False, modules=modules)
    answer = bits.measure_bits(case, OPTIONS, STEPS)
    assert answer["graph"]["losses"] == answer["graph"]["gradients"] == 0
    report = answer["graph"]["report"]
    graphs = 2 * OPTIONS.layers  # forwards and backwards
    assert (report["replays"], report["graphs"]) == ((STEPS - 3) * 4 * OPTIONS.layers, graphs)


def test_kernels_are_counted_inside_of_graphs_and_outside() -> None:
    names = (("flash_fwd", 1), ("flash_bwd", None), ("GeluCUDAKernel", None), ("gemm", 1))
    work = [Work(0.0, 1.0, 0.0, 0.5, graph, name) for name, graph in names]
    timeline = Timeline(start=0.0, end=1.0, work=work, phases=[])
    counts = halves.count_kernels(timeline, halves.KERNELS)
    assert counts == {"attention": {"inside": 1, "outside": 1}, "MLP": {"inside": 0, "outside": 1}}


def test_what_differs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    packs, seeds = bits.canonical_packs, itertools.count()
    monkeypatch.setattr(bits, "canonical_packs", lambda *args: packs(*args, seed=next(seeds)))
    case = bits.BitsCase(share=0.5, transformer_engine=False)
    answer = bits.measure_bits(case, OPTIONS, 2)
    for mode in bits.MODES:
        assert answer[mode]["losses"] == answer["losses"]
        assert answer[mode]["gradients"] >= answer["gradients"] / 2


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_canonical_packs_have_the_rows_and_documents_of_their_capacity(share: float) -> None:
    tokens = OPTIONS.max_tokens
    for pack in bits.canonical_packs(tokens, int(share * tokens), 20):
        assert (pack.num_tokens, pack.num_seqs, pack.max_seqlen) == (tokens, bits.DOCUMENTS, share * tokens)
        lengths = pack.cu_seqlens.diff()
        assert int(lengths.min()) > 0 and int(lengths.max()) <= share * tokens


@pytest.mark.parametrize("name", bits.HOSTS)
def test_calls_of_hosts_are_accounted_for(name: str) -> None:
    report = bits.measure_host(bits.HOSTS[name], OPTIONS, STEPS)
    assert report["calls"] == report["replays"] + sum(report["eager"].values())
    phases = len(range(0, STEPS, bits.HOSTS[name].every))
    assert report["calls"] == (STEPS + phases) * 4 * OPTIONS.layers
    assert report["replays"] > 0


def test_costs_that_need_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROUNDS", "CALL_ROUNDS", "CALLS"):
        monkeypatch.setattr(costs, name, 2)
    options = ModelOptions(layers=2, hidden=costs.CALL_HIDDEN, heads=4, max_tokens=64)
    calls = costs.measure_bare_calls(options)
    assert set(calls) == set(costs.BARE_CALLS)
    assert all(len(times) == 2 * 3 for case in calls.values() for times in case.values())
    install_for(OPTIONS.max_tokens, costs.DOCUMENTS, cuda_graph_warmup_steps=1)
    try:
        engine: dict[str, Any] = costs.measure_engine(OPTIONS)
    finally:
        megatron.uninstall()
    assert {key.partition(",")[0] for key in engine} == {"inside", "outside"} and len(engine) == 6


def test_guards_and_a_verification_have_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "ROUNDS", 3)
    answer = guards.measure_guards(OPTIONS, transformer_engine=False)
    assert {len(times) for times in answer["times"].values()} == {3} and len(answer["times"]) == 4
    assert answer["verification"]["verified"] == 1 and answer["eager"] > 0


@pytest.mark.parametrize("name", [name for name, of in guards.ALARMS.items() if not of.transformer_engine])
def test_hosts_that_change_nothing_raise_no_alarm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "VERIFY_ONE_IN", 7)
    report = guards.measure_alarms(guards.ALARMS[name], OPTIONS, 20)
    assert not {"STATE_CHANGED", "VERIFY_FAILED"} & report["eager"].keys()
    assert report["verification"]["verified"] > 4 and report["failures"] == []


def test_a_table_has_a_row_for_each_figure() -> None:
    figures = [
        Figure(name="losses", value=0, unit="of 240", bar=0),
        Figure(name="a call", value=1234.5, unit="us", rival="eager", rival_value=20.0, p10=1.0, p90=2000.0),
    ]
    head, line, *rows = table.rows_of(figures)
    assert head.count("|") == line.count("|")
    assert rows == [
        "| losses | 0 of 240 |  |  | 0, holds |",
        "| a call | 1,234 us | 1 - 2e+03 | eager: 20 |  |",
    ]
