# SPDX-License-Identifier: Apache-2.0
"""`megagraph demo`: trains a GPTModel on real packed documents twice, eager and graphed."""

import argparse
import itertools
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megagraph.config import GraphConfig
from megagraph.demo.compare import Agreement, StepTimes, compare_steps, time_steps
from megagraph.demo.documents import Document, DocumentError, load_documents
from megagraph.demo.packers import PACKERS, Pack
from megagraph.demo.paragraphs import split_at_blank_lines
from megagraph.demo.trainer import ModelOptions, Trainer, process_groups
from megagraph.report import report_table

__all__ = ["add_parser", "quiet_megatron"]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "demo",
        help="train on real packed documents, eager and graphed, and compare every bit",
        description="Needs megatron-core. Without a GPU the host backend stands in for graphs.",
    )
    data = parser.add_argument_group("documents")
    data.add_argument("--data", type=Path, help="folder, .jsonl or .parquet; default: Python's own files")
    data.add_argument("--column", choices=("text", "tokens", "length"), help="column of .jsonl and .parquet")
    data.add_argument("--packer", choices=sorted(PACKERS), default="streaming")
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
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
    if options.json is not None:
        _check_target(options.json)
    return partial(_execute, options, config, _packs(options))


def _check_numbers(options: argparse.Namespace) -> None:
    minima = dict.fromkeys(("pack_tokens", "micro_batches", "steps", "layers", "hidden", "heads"), 1)
    for name, least in {**minima, "max_document": 2, "timed_steps": 0}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')}: expected at least {least}, got {value}")
    if options.heads > options.hidden:
        raise ValueError(f"--heads: expected at most --hidden ({options.hidden}), got {options.heads}")
    groups = options.query_groups
    if groups is not None and (groups < 1 or options.heads % groups):
        raise ValueError(f"--query-groups: expected a divisor of --heads ({options.heads}), got {groups}")


def _check_target(path: Path) -> None:
    """The figures come last: finds out first whether they can be written."""
    if path.is_dir():
        raise ValueError(f"--json: expected a file, {path} is a folder")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--json: expected a file that can be written, got {path}: check {folder}")


def _execute(options: argparse.Namespace, config: GraphConfig, packs: Sequence[Sequence[Pack]]) -> int:
    from megagraph.demo.cpu import megatron_on_cpu

    console = Console()
    quiet_megatron()
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
    documents = _documents(options, options.max_document or options.pack_tokens)
    if not documents:
        raise DocumentError(f"{options.data}: expected at least one document of 2 tokens or more, found none")
    # Documents one after another, again from the start where they run out.
    packs: Iterator[Pack] = PACKERS[options.packer](itertools.cycle(documents), options.pack_tokens)
    steps = options.steps + (options.timed_steps if torch.cuda.is_available() else 0)
    return [list(itertools.islice(packs, options.micro_batches)) for _ in range(steps)]


def _documents(options: argparse.Namespace, limit: int) -> list[Document]:
    """Rows of a table are documents as they are; text files are cut at their blank lines."""
    if options.data is not None and options.data.is_file():
        return load_documents(options.data, column=options.column, min_length=2, max_length=limit)
    files = load_documents(options.data, column=options.column)
    return list(split_at_blank_lines(files, min_length=2, max_length=limit))


def quiet_megatron() -> None:
    """Megatron's advice on what is not installed would drown the demo's own lines."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def _run(
    options: argparse.Namespace, config: GraphConfig, steps: Sequence[Sequence[Pack]], console: Console
) -> int:
    from megagraph import megatron

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
    megatron.install(config)
    try:
        eager, graphed = Trainer(shape), Trainer(shape)
        if not on_gpu:
            console.print("No GPU: the host backend stands in for graphs. It shows the bits, not the speed.")
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("training twice", total=options.steps)
            agreement = compare_steps(eager, graphed, steps[: options.steps], lambda: progress.advance(task))
        report = megatron.reports()[-1]
        times = _times(eager, graphed, steps[options.steps :]) if on_gpu else None
    finally:
        megatron.uninstall()
    _show(console, agreement, report, times)
    if options.json is not None:
        text = json.dumps(_result(agreement, report, times), indent=2)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0 if agreement.bitwise_equal else 1


def _times(
    eager: Trainer, graphed: Trainer, steps: Sequence[Sequence[Pack]]
) -> tuple[StepTimes, StepTimes] | None:
    if not steps:
        return None
    return time_steps(eager, steps, graphs=False), time_steps(graphed, steps, graphs=True)


def _show(
    console: Console, agreement: Agreement, report: dict[str, Any], times: tuple[StepTimes, StepTimes] | None
) -> None:
    console.print(report_table([report]))
    console.print(
        f"loss {agreement.losses[0]:.4f} -> {agreement.losses[-1]:.4f} over {agreement.steps} steps"
    )
    if times is not None:
        console.print(_time_table(times, report))
    if agreement.bitwise_equal:
        console.print(f"bit-equal: every loss and every parameter's gradient, {agreement.steps} steps")
    else:
        console.print("NOT bit-equal:", style="bold red")
        for difference in agreement.differences:
            console.print(f"  {difference}", markup=False)


def _time_table(times: tuple[StepTimes, StepTimes], report: dict[str, Any]) -> Table:
    table = Table(title="forward and backward of one step")
    for column in ("", "eager", "graphed"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("median", *(f"{t.median_ms:.2f} ms" for t in times))
    table.add_row("fastest", *(f"{t.fastest_ms:.2f} ms" for t in times))
    table.add_row("peak memory of a step", *(f"{t.peak_bytes / 2**20:.0f} MiB" for t in times))
    table.add_row("graph pools", "-", f"{report['pool_bytes'] / 2**20:.0f} MiB")
    table.add_row(
        "padding share", "-", f"{report['padding_share']:.1%}" if report["padding_share"] is not None else "-"
    )
    return table


def _result(
    agreement: Agreement, report: dict[str, Any], times: tuple[StepTimes, StepTimes] | None
) -> dict[str, Any]:
    """Figures and comparison, with the keys of the benchmarks' results."""
    figures: list[dict[str, Any]] = [
        {"name": "capture", "value": report["capture_seconds"], "unit": "s"},
        {"name": "loss of the last step", "value": agreement.losses[-1], "unit": "nats"},
    ]
    if report["padding_share"] is not None:
        figures.append({"name": "padding share", "value": report["padding_share"], "unit": "1"})
    if times is not None:
        eager, graphed = times
        name = "forward and backward of a step, median"
        rival = {"rival": "eager", "rival_value": eager.median_ms}
        figures.append({"name": name, "value": graphed.median_ms, "unit": "ms", **rival})
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": str(torch.__version__),
        "figures": figures,
        "bitwise_equal": agreement.bitwise_equal,
        "steps": agreement.steps,
        **{key: report[key] for key in ("calls", "replays", "eager")},
    }
