# SPDX-License-Identifier: Apache-2.0
"""Describes the code, the machine and the command that a result comes from."""

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


_FOLDER = "--out"  # takes a path of the machine


def describe_environment() -> dict[str, str | None]:
    """Describes the running process, in the order of the file's keys.

    The commit ends in `-dirty` where files other than results differ from it; without a checkout it is that
    of `MEGAGRAPH_COMMIT`. Imports neither megatron-core nor Transformer Engine.
    """
    on_gpu = torch.cuda.is_available()
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    drivers = (_output(*query) or "").splitlines() if on_gpu else []
    return {
        "commit": _git_commit() or os.environ.get("MEGAGRAPH_COMMIT") or None,
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "driver": drivers[0].strip() if drivers else None,
        "torch": str(torch.__version__),
        "megatron_core": _version("megatron.core", "megatron-core"),
        "transformer_engine": _version("transformer_engine", "transformer-engine-torch"),
        "command": _command(),
    }


def _output(*command: str) -> str | None:
    """The standard output of a command; None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _git_commit() -> str | None:
    git = ("git", "-C", str(ROOT))
    top = _output(*git, "rev-parse", "--show-toplevel")
    # A copy may lie inside the checkout of another project.
    if top is None or Path(top).resolve() != ROOT:
        return None
    commit = _output(*git, "rev-parse", "--verify", "HEAD")
    # The first result that a run writes must not taint the second.
    changes = _output(*git, "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return f"{commit}-dirty" if commit and changes else commit


def _version(module: str, distribution: str) -> str | None:
    """Of the module where it is imported, else of what is installed."""
    imported = getattr(sys.modules.get(module), "__version__", None)
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution) if imported is None else str(imported)
    return None


def _command() -> str:
    """What reproduces the result, wherever this run has put it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = None if spec is None else str(spec.name).removesuffix(".__main__")
    program = ["python", "-m", module] if module else [Path(sys.argv[0]).name]
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith(f"{_FOLDER}=")]
    if _FOLDER in arguments:
        place = arguments.index(_FOLDER)
        del arguments[place : place + 2]
    return shlex.join([*program, *arguments])
