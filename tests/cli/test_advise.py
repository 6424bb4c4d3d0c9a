# SPDX-License-Identifier: Apache-2.0
"""`megagraph advise`: whether graphs pay, by invented times and by a script's, and what fits its packs."""

import contextlib
import dataclasses
import json
import random
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from run_scripts import MADE, TRAINING, Files, run_python

from megagraph._C import PackShape
from megagraph.cli import main
from megagraph.cli.advice import Advice, Block, Findings, Packs, advice_on, interval_of
from megagraph.cli.scripts import EnoughError, run_steps
from megagraph.cli.trial import Trial
from megagraph.config import GraphConfig
from megagraph.megatron.plugin import is_cuda_graph_skipped
from megagraph.reasons import EagerReason

Pair = tuple[Block, Block]


def pairs_of(eager_ms: float, graphed_ms: float, *, noise: float = 0.0, count: int = 5) -> list[Pair]:
    """Of blocks whose steps take that long, give or take a share of it, on a machine that slows down."""
    draw = random.Random(3)

    def block(ms: float, pair: int) -> Block:
        return Block(1e-3 * ms * (1 + draw.uniform(-noise, noise)) * (1 + pair / 10), 1e-3 * ms / 2)

    return [(block(eager_ms, pair), block(graphed_ms, pair)) for pair in range(count)]


def report_of(replays: int, padding: float | None = None, **eager: int) -> dict[str, Any]:
    calls = replays + sum(eager.values())
    return {"calls": calls, "replays": replays, "eager": eager, "padding_share": padding}


PACKS = Packs(counts={PackShape(60, 3, 9): 1, PackShape(100, 2, 9): 1}, room=(100, 4), multiple=1)
REPLAYED = [report_of(90, 0.2, WARMING_UP=10)]


def advised(pairs: Sequence[Pair], **changes: Any) -> Advice:
    found = {"reports": REPLAYED, "pairs": pairs, "packs": PACKS, **changes}
    return advice_on(Findings(**found), GraphConfig())


def test_graphs_pay_if_the_whole_interval_is_above_one() -> None:
    advice = advised(pairs_of(130, 100, noise=0.02))
    assert advice.pays is True and advice.speed_up is not None
    assert 1.2 < advice.speed_up.low < advice.speed_up.estimate < advice.speed_up.high < 1.4
    assert advice.verdict.startswith("turn it on: graphed steps are 1.29 times as fast (1.")
    assert "mode" not in advice.toml


def test_they_are_better_left_off_if_it_includes_one_or_lies_below() -> None:
    for eager_ms, noise, said in (
        (100, 0.001, ", 95 %), which is no gain; more --steps may tell more"),
        (110, 0.3, ", 95 %), which is no gain; more --steps may tell more"),  # too noisy
        (90, 0.001, "leave it off: graphed steps are 0.90 times as fast (0.90 to 0.90, 95 %)"),
    ):
        advice = advised(pairs_of(eager_ms, 100, noise=noise), reports=[report_of(90, 0.0)])
        assert advice.pays is False and said in advice.verdict and advice.verdict.startswith("leave it off: ")
        assert advice.toml == '[megagraph]\nmode = "off"\ncapacities = ["60:3", "100:4"]'


def test_padding_that_eats_the_gain_is_told_with_the_capacities_that_leave_less() -> None:
    """20 % of the rows are padding, of which the best capacities leave none."""
    advice = advised(pairs_of(98, 100, noise=0.001))
    assert advice.pays is False and advice.padding_share == 0.2
    remedy = "try the capacities of the table, which leave 0%"
    assert f"padding eats the gain, 20% of the rows: {remedy}" in advice.verdict
    assert advice.toml == '[megagraph]\ncapacities = ["60:3", "100:4"]'  # to be tried, so not off
    assert "padding" not in advised(pairs_of(70, 100, noise=0.001)).verdict  # less of it would not do


def test_what_is_not_known_is_not_advised() -> None:
    on_cpu = advised([], is_timed=False)
    assert on_cpu.pays is None and on_cpu.verdict.endswith("without a GPU there are no times")
    short = advised(pairs_of(130, 100, count=2))
    assert short.pays is None and "expected 3 pairs of eager and graphed blocks, got 2" in short.verdict
    for advice in (on_cpu, short):
        assert advice.choices and advice.speed_up is None and "mode" not in advice.toml


@pytest.mark.parametrize("is_timed", [True, False])
def test_nothing_replayed_is_a_reason_to_leave_it_off(is_timed: bool) -> None:
    none = advised([], reports=[report_of(0, NESTING=9)], is_timed=is_timed)
    said = "leave it off: nothing replayed: 100 % eager, NESTING: call each layer once, in order"
    assert (none.pays, none.verdict) == (False, said)
    # Bug: so was a script that had ended before its capture.
    assert advised([], reports=[report_of(0, WARMING_UP=9)], is_timed=is_timed).pays is None
    without = advised([], reports=[], packs=None, is_timed=is_timed)
    assert without.pays is False and without.verdict.startswith("leave it off: nothing replayed: no GPTModel")
    assert without.choices == [] and without.toml == '[megagraph]\nmode = "off"'


def test_the_interval_is_students_of_ratios_and_drift_is_in_both_of_a_pair() -> None:
    """As computed by hand of the logarithms 0.1, 0.2, 0.3: 0.2 and 4.303 deviations of 0.1 over root 3."""
    ratios = [2.718281828459045 ** (number / 10) for number in (1, 2, 3)]
    found = interval_of([(Block(ratio, 0), Block(1, 0)) for ratio in ratios])
    assert found is not None
    assert found.estimate == pytest.approx(2.718281828459045**0.2)
    assert found.low == pytest.approx(2.718281828459045 ** (0.2 - 0.2484), rel=0.005)
    assert found.high == pytest.approx(2.718281828459045 ** (0.2 + 0.2484), rel=0.005)
    drifting = interval_of(pairs_of(130, 100, count=40))
    assert drifting is not None and drifting.low == pytest.approx(drifting.high) == pytest.approx(1.3)


def test_blocks_take_turns_and_the_first_step_of_each_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager steps take 10 ms and graphed ones 4; 1 is spent outside of the schedule, a change costs 500."""
    clock, kinds, graphs = mock.Mock(now=0.0), [False], mock.Mock(refusal=None, replays=0)
    monkeypatch.setattr("megagraph.cli.trial.time.perf_counter", lambda: clock.now)
    graphs.dispatcher = mock.Mock(observed=dict(PACKS.counts), needs_equal_rows=False, warm_up_steps=2)
    graphs.dispatcher.needs.return_value = [110, 2, 8]
    graphs.tensor.row_shares = graphs.dispatcher.multiple = 1
    graphs.captures.bank.counters = lambda: {"replays": graphs.replays}
    plugin = mock.Mock(all_graphs=lambda: [graphs], reports=lambda: [report_of(9, 0.1, DISABLED=8)])

    def step() -> None:
        kinds.append(is_cuda_graph_skipped())
        graphs.replays += not kinds[-1]
        clock.now += (0.5 if kinds[-1] is not kinds[-2] else 0) + (0.010 if kinds[-1] else 0.004)

    progress = mock.Mock()
    trial = Trial(39, progress, is_timed=True)
    with contextlib.closing(trial), pytest.raises(EnoughError):
        while True:
            trial(plugin, step)
            clock.now += 0.001
    eager, graphed = [True] * 4, [False] * 4
    assert kinds[1:] == [*graphed, *(eager + graphed + graphed + eager) * 2]  # after warm-up and capture
    assert progress.call_args_list == [mock.call(done, 36) for done in (*range(1, 5), *range(5, 36, 4))]
    assert [it.args[0] for it in graphs.dispatcher.refuse.call_args_list] == [EagerReason.DISABLED, None] * 4
    # Once the script has let go of its groups, graphs that ranks shared are gone.
    found = trial.findings(GraphConfig(), [report_of(0)])
    assert found.reports == [report_of(9, 0.1)] and len(found.pairs) == 4
    for pair in found.pairs:
        for block, expected in zip(pair, ((0.011, 0.010), (0.005, 0.004)), strict=True):
            assert block == pytest.approx(expected)
    assert found.packs == dataclasses.replace(PACKS, room=(110, 8))


@pytest.mark.parametrize(
    "config",
    [
        GraphConfig(),
        GraphConfig(
            cuda_graph_modules=("attn", "mlp"), verify=7, tail="empty-dummy", cp_sizes=(1, 2), poison=True
        ),
        GraphConfig(mode="eager", report='ünïcode "quoted".json', log_interval=0, progress=False),
        GraphConfig(cuda_graph_max_packed_seqs=9, max_seqlen_per_dp_cp_rank=200, max_seqlen=70),
        # Bug: the table kept the limit, though longer documents had come.
        GraphConfig(cuda_graph_max_packed_seqs=9, max_seqlen_per_dp_cp_rank=200, max_seqlen=5),
        # Bug: where packs were larger than the capacity of then, the table took its tokens for such a limit.
        GraphConfig(capacities=("50:9:20", "90:9")),
    ],
)
def test_the_table_has_the_options_of_the_run_and_is_accepted(config: GraphConfig, tmp_path: Path) -> None:
    found = Findings(reports=REPLAYED, pairs=pairs_of(130, 100), packs=PACKS)
    path = tmp_path / "advised.toml"
    path.write_text(advice_on(found, config).toml, encoding="utf-8")
    read = GraphConfig.from_toml(path)
    limits = {None: (60, 100), 70: (60, 70), 5: (9, 9)}[config.max_seqlen]
    expected = zip((60, 100), (3, 4), limits, strict=True)
    assert [(it.tokens, it.num_seqs, it.max_seqlen) for it in read.capacities] == [*expected]
    for name in ("cuda_graph_modules", "verify", "tail", "cp_sizes", "poison", "log_interval"):
        assert getattr(read, name) == getattr(config, name)
    assert read.mode == "graph" and read.report is None


ON_GPU = torch.cuda.is_available()
ENDLESS = TRAINING.replace("import sys", "import itertools, sys")
ENDLESS = ENDLESS.replace("(documents, 64, 6)", "(itertools.cycle(documents), 64, 6)")


def run(files: Files, code: int, script: str, *words: str, steps: str = "60") -> dict[str, Any]:
    out, path = files.folder / "out.json", files.script(script)
    command = ["advise", "--steps", "27", "--json", str(out), "--config", str(files.toml()), *words]
    assert main([*command, str(path), steps, "open(__file__ + '.end', 'w').close()"]) == code
    return json.loads(out.read_text())


@pytest.mark.megatron
def test_a_script_runs_so_many_steps_and_its_packs_are_counted(files: Files, capsys: Any) -> None:
    document = run(files, 0, ENDLESS)
    assert not files.folder.joinpath("scripts", "script.py.end").exists()
    # One of warm-up and two for the capture; three pairs of blocks of four.
    assert len(capsys.readouterr().out.splitlines()) == 3 + 24
    packs = document["packs"]
    # Of the first step no capacity was to be learned.
    assert sum(it["count"] for it in packs) == 2 + 24
    assert len(packs) > 2 and max(it["tokens"] for it in packs) <= 64
    assert document["pays"] in ([True, False] if ON_GPU else [None]) and document["format"] == 2
    assert (document["times"] is not None) is (document["speed_up"] is not None) is ON_GPU
    (model,) = document["models"]
    assert model["replays"] > 0 and "DISABLED" not in model["eager"]
    shares = [it["padding_share"] for it in document["choices"]]
    assert len(shares) == 4 and shares == sorted(shares, reverse=True) and shares[0] > shares[-1]
    path = files.folder / "advised.toml"
    path.write_text(document["toml"])
    assert GraphConfig.from_toml(path).all_capacities()


@pytest.mark.megatron
def test_people_read_a_table_to_paste_and_a_verdict_last(files: Files, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(files.script(ENDLESS, "a_job.py").parent)
    assert main(["advise", "--steps", "24", "--config", str(files.toml()), "-m", "a_job", "60", "pass"]) == 0
    lines = capsys.readouterr().out.splitlines()
    path = files.folder / "advised.toml"
    path.write_text("\n".join(lines[lines.index("[megagraph]") : -2]))
    read = GraphConfig.from_toml(path)
    assert read.cuda_graph_warmup_steps == 1 and read.capacities
    assert lines[-1].startswith("megagraph: ") and any("padding now" in line for line in lines)


@pytest.mark.megatron
def test_a_script_that_ends_gets_what_is_known_and_without_graphs_to_leave_them_off(files: Files) -> None:
    document = run(files, 3, "pass")
    assert document["pays"] is False and document["choices"] == []
    assert document["verdict"].startswith("leave it off: nothing replayed: no GPTModel or HybridModel")
    document = run(files, 3, ENDLESS.replace("Trainer(tiny)", "Trainer(tiny, config={'qk_clip': True})"))
    assert document["pays"] is False and "SCOPE_UNSUPPORTED" in document["verdict"]
    document = run(files, 0, ENDLESS, steps="5")
    assert document["pays"] is None and document["times"] is None
    assert sum(it["count"] for it in document["packs"]) == 4


# The rows that the last norm sees, in each step.
ROWS = """        trainer.chunk.decoder.final_layernorm.register_forward_hook(
            lambda module, given, out: print("rows", out.shape[0])
        )
"""


def tried(files: Files, text: str, steps: int, config: GraphConfig) -> Findings:
    """A timed trial, on whatever there is."""
    options = Namespace(script=str(files.script(text)), arguments=["99", "pass"], is_module=False, cpu=False)
    trial = Trial(steps, lambda done, total: None, is_timed=True)
    with contextlib.closing(trial):
        reports = run_steps(options, config, trial)
    return trial.findings(config, reports)


@pytest.mark.megatron
def test_eager_blocks_run_packs_as_they_were_given_and_graphed_ones_padded(files: Files, capsys: Any) -> None:
    """With graphs merely disabled they would run padded, which hides what padding costs."""
    found = tried(files, ENDLESS.replace(MADE, MADE + ROWS), 24, GraphConfig.from_toml(files.toml()))
    rows = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("rows")]
    assert len(rows) == 27 and found.packs is not None
    blocks = [rows[3:][4 * block : 4 * block + 4] for block in range(6)]
    eager = [row for block in (0, 3, 4) for row in blocks[block]]
    assert [row for block in (1, 2, 5) for row in blocks[block]] == [64] * 12
    assert min(eager) < 64 and {*eager} <= {shape.tokens for shape in found.packs.counts}
    assert len(found.pairs) == 3 and all(eager.step > 0 < graphed.host for eager, graphed in found.pairs)
    (report,) = found.reports
    # Two layers; the warm-up alone was eager but for the blocks.
    assert report["eager"] == {"WARMING_UP": 2} and report["replays"] == 2 * (2 + 12)
    assert sum(found.packs.counts.values()) == 26


@pytest.mark.megatron
def test_a_block_that_did_not_replay_is_left_out_and_one_that_raises_leaves_graphs_on(files: Files) -> None:
    """The script wants none in steps 7 to 10, the first graphed block; packs run out in an eager one."""
    loop, step = "        for _ in range(steps):\n", '            print("loss"'
    assert loop in ENDLESS and step in ENDLESS
    script = ENDLESS.replace(loop, "        import contextlib, megagraph\n" + loop.replace("_", "at"))
    skips = "megagraph.disable_cuda_graphs_this_step() if 7 <= at < 11 else contextlib.nullcontext()"
    script = script.replace(step, f"            with {skips}:\n    {step}")
    assert len(tried(files, script, 24, GraphConfig.from_toml(files.toml())).pairs) == 2
    raising = ENDLESS.replace("itertools.cycle(documents)", "iter(documents)")
    with pytest.raises(StopIteration):
        tried(files, raising, 24, GraphConfig.from_toml(files.toml()))


@pytest.mark.megatron
@pytest.mark.ranks
@pytest.mark.skipif(0 < torch.cuda.device_count() < 2, reason="a GPU for each rank")
def test_ranks_end_together_and_one_of_them_speaks(files: Files) -> None:
    launch = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "megagraph", "advise", "--steps", "24", "--config", str(files.toml())]
    lines = run_python(*launch, *command, files.script(ENDLESS), "60", "pass").stdout.splitlines()
    assert sum(line.startswith("megagraph: ") for line in lines) == lines.count("[megagraph]") == 1
