# SPDX-License-Identifier: Apache-2.0
"""`megagraph doctor`: what is installed and whether it fits, what a report means, what a script would get."""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

import megagraph
from megagraph import _C, _build_info
from megagraph.cli.demo import quiet_megatron
from megagraph.cli.ends import ExitCode, add_json, check_json, folded, show, write_json
from megagraph.cli.options import config_of
from megagraph.cli.reports import describe, read_report
from megagraph.cli.scripts import add_script, check_script
from megagraph.config import GraphConfig
from megagraph.log import rank
from megagraph.megatron import seams
from megagraph.reasons import remedy_of, verdict

__all__ = ["add_parser"]


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation, explain a report, or say what of a script's models would be graphed",
        description="Without SCRIPT: versions and whether they fit. With it: runs it to the end of its first "
        "training step, and says which layers would be graphed, why others not, and what memory graphs take.",
        epilog="Exit codes: 0 all fits; 1 something does not, or no layer would be graphed; 2 bad input.",
    )
    add_json(parser)
    parser.add_argument("--report", type=Path, metavar="FILE", help="explain the report that a run left")
    add_script(parser, is_optional=True)
    parser.set_defaults(prepare=_prepare)


def _prepare(options: argparse.Namespace) -> Callable[[], int]:
    options.json = check_json(options.json)
    if options.report is not None:
        if options.script is not None:
            raise ValueError(f"--report: expected this or a script, got both: {options.script}")
        if not options.report.is_file():
            raise ValueError(f"--report: expected the file of a report, {options.report} is no file")
        check_json(options.json, options.report)
        return partial(_explain, options.json, read_report(options.report))
    if options.script is None:
        if options.is_module:
            raise ValueError("-m: expected a module")
        return partial(_check, options, config_of(options))
    check_script(options)
    return partial(_rehearse, options, config_of(options))


# -- the installation ------------------------------------------------------------------------------


class _Finding(NamedTuple):
    """What was found; a remedy if it does not fit."""

    what: str
    found: str
    remedy: str = ""


def _check(options: argparse.Namespace, config: GraphConfig) -> int:
    quiet_megatron()
    findings = [*_versions(), *_machine(), *_in_force(config)]
    wrong = [it for it in findings if it.remedy]
    said = f"does not fit: {'; '.join(f'{it.what}: {it.remedy}' for it in wrong)}" if wrong else "all fits"
    code = ExitCode.WRONG if wrong else ExitCode.FINE
    if options.json is not None:
        as_dicts = [it._asdict() for it in findings]
        return write_json("doctor", options.json, [], verdict=said, findings=as_dicts) or code
    table = Table("", "found", "what to do")
    for row in findings:
        table.add_row(*map(folded, row))
    show(said, table)
    return code


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _versions() -> Iterator[_Finding]:
    kernels = f"kernels for CUDA {_build_info.CUDA_VERSION}" if _C.WITH_CUDA else "without kernels"
    yield _Finding("megagraph", f"{megagraph.__version__}, {kernels}")
    yield _Finding("Python", platform.python_version())
    # Any other torch would have been an error when megagraph was imported.
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield _Finding("torch", f"{torch.__version__}, {cuda}")
    core, supported = _version("megatron-core"), " or ".join(seams.SUPPORTED)
    try:
        core = seams.check_core()
    except RuntimeError as error:
        yield _Finding("megatron-core", core or "none", str(error) if core else f"install {supported}")
    else:
        tested = "tested" if core.split("+")[0] in seams.SUPPORTED else f"untested (tested: {supported})"
        yield _Finding("megatron-core", f"{core}, {tested}")
        yield _Finding("its seams", "; ".join(seams.misfits()) or "all as expected")
    yield _Finding("Transformer Engine", _version("transformer-engine") or "none, and not needed")


def _machine() -> Iterator[_Finding]:
    has_gpu = torch.cuda.is_available()
    driver = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    yield _Finding("driver", driver or "none")
    if has_gpu:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found = f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory >> 30} GiB"
        remedy = "" if _C.WITH_CUDA else "megagraph has no kernels: reinstall it with nvcc in CUDA_HOME"
        yield _Finding("GPU", found, remedy)
    else:
        yield _Finding("GPU", "none: the host backend shows the bits of graphs, and no speed")
    yield _Finding("compiler", _first_line(os.environ.get("CXX", "c++"), "--version") or "none")
    nvcc = shutil.which("nvcc") or str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc"))
    yield _Finding("nvcc", nvcc if Path(nvcc).is_file() else "none")


def _first_line(*command: str) -> str:
    """What a command prints; nothing if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.partition("\n")[0].strip()


def _in_force(config: GraphConfig) -> Iterator[_Finding]:
    names = sorted(name for name, value in os.environ.items() if name.startswith("MEGAGRAPH_") and value)
    yield _Finding("variables", "\n".join(f"{name}={os.environ[name]}" for name in names) or "none")
    default = GraphConfig().spelled()
    changed = [f"{name} = {value}" for name, value in config.spelled().items() if value != default.get(name)]
    yield _Finding("options", "\n".join(changed) or "as by default")


# -- a report --------------------------------------------------------------------------------------


def _explain(json: Path | None, reports: Sequence[Mapping[str, Any]]) -> int:
    rows = [
        {
            "model": report["model"],
            "reason": reason,
            "calls": count,
            "share": count / max(report["calls"], count, 1),
            "remedy": remedy_of(reason, [report]),
        }
        for report in reports
        for reason, count in sorted(report["eager"].items(), key=lambda item: -item[1])
    ]
    if json is not None:
        return write_json("doctor", json, reports, verdict=verdict(reports), explained=rows)
    table = Table("model", "ran eager", "calls", "what to do (docs/reasons.md says why)")
    for row in rows:
        calls = f"{row['calls']:,} ({row['share']:.1%})"
        table.add_row(*map(folded, (str(row["model"]), str(row["reason"]), calls, str(row["remedy"]))))
    for report in reports:
        for sentence in report.get("failures", ()):
            table.add_row(*map(folded, (str(report["model"]), "stays eager", "", sentence)))
    show(verdict(reports), table)
    return ExitCode.FINE


# -- a script --------------------------------------------------------------------------------------


_PROFILE = "nsys profile --cuda-graph-trace=node --trace=cuda,nvtx python -m megagraph run"


def _rehearse(options: argparse.Namespace, config: GraphConfig) -> int:
    from megagraph.cli.rehearsal import rehearse

    models = rehearse(options, config)
    if rank() != 0:
        return ExitCode.FINE
    graphed, layers = sum(len(it["graphed"]) for it in models), sum(it["layers"] for it in models)
    said = f"{graphed} of {layers} layers would be graphed"
    if not models:
        said = "nothing would be graphed: no model trained a step through get_forward_backward_func()"
    code = ExitCode.FINE if graphed else ExitCode.WRONG
    if options.json is not None:
        return write_json("doctor", options.json, [], verdict=said, rehearsed=models) or code
    table = Table("model", "graphed", "stays eager", "capacities", "memory of the pools")
    for it in models:
        capacities = "\n".join(map(describe, it["capacities"]))
        row = it["model"], f"{len(it['graphed'])} of {it['layers']}", "\n".join(it["stays_eager"]) or "-"
        table.add_row(*map(folded, (*row, capacities or "-", _memory(*it["pool_bytes"]))))
    show(said, table)
    given = ["--config", str(options.config)] if options.config is not None else []
    given += [word for each in (*options.set, "cuda_graph_nvtx=true") for word in ("--set", each)]
    words = shlex.join([*given, *["-m"] * options.is_module, options.script, *options.arguments])
    if graphed:
        print(f"to profile it (not run by doctor): {_PROFILE} {words}")
    return code


def _memory(kept: int, most: int) -> str:
    if not most:
        return "-"
    least = f"{kept / 2**20:.0f} MiB"
    told = f"{least} to {most / 2**20:.0f} MiB"
    return told if most > kept else f"at least {least} (a GPU tells how much more)"
