# SPDX-License-Identifier: Apache-2.0
"""`megagraph demo`: trains a GPTModel on real packed documents twice, eager and graphed."""

import argparse
import itertools
import logging
import math
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import megagraph
from megagraph.cli.ends import ExitCode, Screen, check_json, write_json
from megagraph.cli.reports import report_table
from megagraph.config import GraphConfig
from megagraph.demo.compare import Agreement, StepTimes, compare_steps, time_steps
from megagraph.demo.documents import load_documents
from megagraph.demo.packs import Pack, stream_packs
from megagraph.demo.trainer import ModelOptions, Trainer, process_groups
from megagraph.log import rank
from megagraph.megatron import seams
from megagraph.reasons import EagerReason, verdict
from megagraph.report import STANDARD_OUTPUT, versions

__all__ = ["add_parser", "quiet_megatron"]


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "demo",
        help="train on real packed documents, eager and graphed, and compare every bit",
        description="Needs megatron-core. Without a GPU the host backend stands in for graphs.",
        epilog="Exit codes: 0 bit-equal; 1 bits differ; 2 bad input; 3 nothing was replayed; 70 a crash; "
        "74 the JSON could not be written; 130 interrupted.",
    )
    data = parser.add_argument_group("documents")
    data.add_argument(
        "--data", type=Path, help=".jsonl with a column text, tokens or length; default: Python's own files"
    )
    data.add_argument("--max-document", type=int, help="longest document in tokens; default: a pack")
    shape = parser.add_argument_group("model and packs")
    shape.add_argument("--layers", type=int, default=4)
    shape.add_argument("--hidden", type=int, default=64)
    shape.add_argument("--heads", type=int, default=4)
    shape.add_argument("--query-groups", type=int, help="key and value heads; default: as many as heads")
    shape.add_argument("--pack-tokens", type=int, default=512, help="capacity of a pack")
    shape.add_argument(
        "--max-packed-seqs",
        type=int,
        nargs="+",
        help="documents of a pack, one capacity for each number; default: learned in the warm-up",
    )
    shape.add_argument("--micro-batches", type=int, default=4, help="packs of a step")
    shape.add_argument("--steps", type=int, default=30)
    shape.add_argument("--warmup-steps", type=int, default=3)
    shape.add_argument("--timed-steps", type=int, default=10, help="further steps, timed on a GPU only")
    shape.add_argument("--seed", type=int, default=1234)
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the report and the comparison as JSON; - for standard output, with nothing else there",
    )
    parser.set_defaults(prepare=_prepare)


def _prepare(options: argparse.Namespace) -> Callable[[], int]:
    """Reads and checks everything before any of it is used."""
    _check_numbers(options)
    counts = tuple(options.max_packed_seqs or ())
    config = GraphConfig(
        cuda_graph_max_packed_seqs=counts,
        max_seqlen_per_dp_cp_rank=options.pack_tokens if counts else None,
        cuda_graph_warmup_steps=options.warmup_steps,
    )
    check_json(options.json)
    work = partial(_execute, options, config, _packs(options))
    quiet_megatron()
    seams.check_core()
    return work


# The least and the most of each option that is a number.
_BOUNDS = {
    "pack_tokens": (2, 2**20),
    "max_document": (2, 2**20),
    "layers": (1, 1_000),
    "hidden": (1, 2**16),
    "heads": (1, 2**16),
    "query_groups": (1, 2**16),
    "max_packed_seqs": (1, 2**20),
    "micro_batches": (1, 10_000),
    "steps": (1, 100_000),
    "warmup_steps": (1, 100_000),
    "timed_steps": (0, 100_000),
    "seed": (0, 2**32 - 1),
}


def _check_numbers(options: argparse.Namespace) -> None:
    for name, (least, most) in _BOUNDS.items():
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not least <= value <= most:
                expected = f"at least {least}" if value < least else f"at most {most}"
                raise ValueError(f"--{name.replace('_', '-')}: expected {expected}, got {value}")
    hidden, heads, groups = options.hidden, options.heads, options.query_groups
    if hidden % heads:
        raise ValueError(f"--heads: expected a divisor of --hidden ({hidden}), got {heads}")
    size, multiple = hidden // heads, 8 if torch.cuda.is_available() else 2  # of FlashAttention, of RoPE
    if size % multiple or size > 256:
        raise ValueError(
            f"--hidden: expected for each head a multiple of {multiple}, at most 256, got {hidden} / {heads}"
        )
    if groups is not None and heads % groups:
        raise ValueError(f"--query-groups: expected a divisor of --heads ({heads}), got {groups}")
    if options.max_document is not None and options.max_document > options.pack_tokens:
        pack = f"--pack-tokens ({options.pack_tokens})"
        raise ValueError(f"--max-document: expected at most {pack}, got {options.max_document}")


def _execute(options: argparse.Namespace, config: GraphConfig, packs: Sequence[Sequence[Pack]]) -> int:
    from megagraph.demo.cpu import megatron_on_cpu

    console = Screen(quiet=rank() != 0, stderr=options.json == STANDARD_OUTPUT)
    # Read by cuBLAS when it starts; deterministic algorithms need it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with megatron_on_cpu(), process_groups():
        outer = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return _run(options, config, packs, console)
        finally:
            torch.use_deterministic_algorithms(outer)


def _packs(options: argparse.Namespace) -> list[list[Pack]]:
    """The packs of each step."""
    limit = options.max_document or options.pack_tokens
    documents = load_documents(options.data, min_length=2, max_length=limit)
    # One after another, again from the start where they run out.
    packs = stream_packs(itertools.cycle(documents), options.pack_tokens)
    steps = options.steps + (options.timed_steps if torch.cuda.is_available() else 0)
    return [list(itertools.islice(packs, options.micro_batches)) for _ in range(steps)]


def quiet_megatron() -> None:
    """Megatron's advice on what is not installed would drown the demo's own lines."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def _run(
    options: argparse.Namespace, config: GraphConfig, steps: Sequence[Sequence[Pack]], console: Console
) -> int:
    on_gpu = torch.cuda.is_available()
    shape = ModelOptions(
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        query_groups=options.query_groups,
        max_tokens=options.pack_tokens,
        bf16=on_gpu,
        seed=options.seed,
    )
    megagraph.install(config)
    try:
        eager, graphed = Trainer(shape), Trainer(shape)
        if not on_gpu:
            console.print("No GPU: the host backend stands in for graphs. It shows the bits, not the speed.")
        with Progress(console=Console(stderr=True), transient=True, disable=rank() != 0) as progress:
            task = progress.add_task("training twice", total=options.steps)
            agreement = compare_steps(eager, graphed, steps[: options.steps], lambda: progress.advance(task))
        report = {**megagraph.reports()[-1], "model": "GPTModel"}  # the second, the graphed one
        timed, times = steps[options.steps :], None
        if on_gpu and timed:
            times = time_steps(eager, timed, graphs=False), time_steps(graphed, timed, graphs=True)
    finally:
        megagraph.uninstall()
    _show(console, agreement, report, times)
    if options.json is not None and rank() == 0:
        more = {"verdict": verdict([report]), **_comparison(agreement, times), **_facts()}
        if code := write_json("demo", options.json, [report], **more):
            return code
    if not agreement.bitwise_equal:
        return ExitCode.WRONG
    if report["replays"] == 0:
        why = _why_nothing_replayed(report, options.warmup_steps, agreement.steps)
        console.print(f"Nothing was replayed: {why}", style="bold red", markup=False)
        return ExitCode.NOTHING_REPLAYED
    console.print(f"bit-equal: every loss and every parameter's gradient, {agreement.steps} steps")
    return ExitCode.FINE


def _show(
    console: Console, agreement: Agreement, report: dict[str, Any], times: tuple[StepTimes, StepTimes] | None
) -> None:
    console.print(report_table([report]))
    remedy = EagerReason.TOO_MANY_SEQUENCES.remedy
    said = verdict([report]).replace(remedy, "raise --max-packed-seqs")  # as typed here
    console.print(said, markup=False, highlight=False, soft_wrap=True)
    losses = agreement.losses
    console.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} over {agreement.steps} steps")
    if times is not None:
        console.print(_time_table(times, report))
    if not agreement.bitwise_equal:
        every_rank = Screen(stderr=console.stderr)
        every_rank.print(f"{f'rank {rank()}: ' if rank() else ''}NOT bit-equal:", style="bold red")
        for difference in agreement.differences:
            every_rank.print(f"  {difference}", markup=False)


def _why_nothing_replayed(report: dict[str, Any], warm_up: int, steps: int) -> str:
    """What kept most calls eager, and what to change."""
    if steps <= warm_up:
        return f"the run ended in its warm-up. Give more --steps ({steps}) than --warmup-steps ({warm_up})."
    counts = {reason: count for reason, count in report["eager"].items() if reason != "WARMING_UP"}
    reason = max(counts, key=lambda name: counts[name], default="WARMING_UP")
    if reason == "TOO_MANY_SEQUENCES":
        return "packs hold more documents than --max-packed-seqs. Raise it, or leave it out."
    return f"{reason}. The verdict above says what to do, docs/reasons.md why."


def _time_table(times: tuple[StepTimes, StepTimes], report: dict[str, Any]) -> Table:
    table = Table(title="forward and backward of one step")
    for column in ("", "eager", "graphed"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("median", *(f"{t.median_ms:.2f} ms" for t in times))
    table.add_row("fastest", *(f"{t.fastest_ms:.2f} ms" for t in times))
    table.add_row("peak memory of a step", *(f"{t.peak_bytes / 2**20:.0f} MiB" for t in times))
    table.add_row("graph pools", "-", f"{report['pool_bytes'] / 2**20:.0f} MiB")
    padding = report["padding_share"]
    table.add_row("padding share", "-", "-" if padding is None else f"{padding:.1%}")
    return table


def _comparison(agreement: Agreement, times: tuple[StepTimes, StepTimes] | None) -> dict[str, Any]:
    """What the file holds beside the report. A loss that is not finite is null: JSON has no word for it."""
    return {
        "bitwise_equal": agreement.bitwise_equal,
        "differences": agreement.differences,
        "steps": agreement.steps,
        "losses": [loss if math.isfinite(loss) else None for loss in agreement.losses],
        "times": None if times is None else dict(zip(("eager", "graphed"), map(asdict, times), strict=True)),
    }


def _facts() -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    return {
        "versions": versions(),
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "command": shlex.join(["megagraph", *sys.argv[1:]]),
    }
