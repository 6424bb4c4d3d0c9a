# SPDX-License-Identifier: Apache-2.0
"""Runs modules in processes of their own, and reads the JSON that they print."""

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring.compare import Answer, caught, first_error
from benchmarks.measuring.fork_children import can_fork, run_forked


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended.

    Args:
        code: its exit code; None where it had to be killed.
        out: what it wrote to its standard output.
        log: what it wrote to its standard error, where that was kept.
    """

    code: int | None
    out: str
    log: str

    @property
    def answers(self) -> list[Answer]:
        """The objects that it printed, one a line."""
        found = []
        for line in self.out.splitlines():
            with contextlib.suppress(ValueError):  # others print, too
                found.append(json.loads(line))
        return [answer for answer in found if isinstance(answer, dict)]

    @property
    def why(self) -> str:
        """How it ended, in words: its first error where the log has one."""
        how = "was killed: out of time" if self.code is None else f"ended with {self.code}"
        return first_error(self.log) or how


def run_module(
    module: str,
    *arguments: str,
    timeout: float,
    launcher: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Runs `python -m MODULE ARGUMENTS` to its end; out of time, it is killed with all that it started.

    In a fork of a process that has imported torch and Megatron, where neither a launcher nor variables are
    asked for and forks work; else in a fresh interpreter.

    Args:
        module: its full name.
        arguments: of its command line.
        timeout: seconds until it is killed.
        launcher: module and options of a launcher, e.g. of `torch.distributed.run`, before it.
        environment: variables beside this process's own.
    """
    command = ["-m", *([*launcher, "-m"] if launcher else []), module, *arguments]
    print("$", " ".join(command), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "out"), Path(folder, "log")
        for file in (out, log):
            file.touch()
        files = str(out), str(log)
        if launcher or environment or not can_fork():
            code = _run_afresh(command, {**os.environ, **(environment or {})}, *files, timeout)
        else:
            code = run_forked(module, arguments, *files, timeout)
        said, logged = (path.read_text(errors="replace") for path in (out, log))
        return Ended(code=code, out=said, log=logged)


def _run_afresh(
    command: Sequence[str], environment: Mapping[str, str], out: str, log: str, timeout: float
) -> int | None:
    """Runs a fresh interpreter to its end; its exit code, or None where it had to be killed."""
    with open(out, "a") as to_out, open(log, "a") as to_log:
        # A session of its own, so that whatever it starts can be ended with it.
        process = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=to_out, stderr=to_log, start_new_session=True
        )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measure_part(module: str, *arguments: str, timeout: float = 240, **how: Any) -> Answer:
    """As `run_module()`; the last object that it printed.

    Raises:
        RuntimeError: if it fails or answers nothing, with the first error of its log.
    """
    answer = try_part(module, *arguments, timeout=timeout, **how)
    if "error" in answer:
        raise RuntimeError(f"{' '.join([module, *arguments])}: {answer['error']}")
    return answer


def try_part(module: str, *arguments: str, timeout: float = 240, **how: Any) -> Answer:
    """As `measure_part()`, of a rival: its answer, or `{"error": ...}`."""
    ended = run_module(module, *arguments, timeout=timeout, **how)
    what = " ".join([module, *arguments])
    if ended.code == 0 and ended.answers:
        print(f"{what}: {str(ended.answers[-1])[:250]}", flush=True)
        return ended.answers[-1]
    print(f"{what}: {ended.why}\n{ended.log[-6000:]}", file=sys.stderr, flush=True)
    return {"error": ended.why if ended.code != 0 else "RuntimeError: printed no answer"}


def tell(key: str, measurement: Callable[[], float]) -> None:
    """In a rivals' process: measures, and prints the microseconds, or the error, at once."""
    print(json.dumps({key: caught(lambda: {"us": measurement()})}), flush=True)


def collect(module: str, *arguments: str, timeout: float) -> collections.defaultdict[str, Answer]:
    """As `run_module()`, of a process that tells as it goes; what it told, by key.

    Returns:
        `{"us": ...}` or `{"error": ...}` for each key; the error says how the process ended for a key
        that it did not tell.
    """
    ended = run_module(module, *arguments, timeout=timeout)
    answers: collections.defaultdict[str, Answer] = collections.defaultdict(
        lambda: {"error": f"not measured: {ended.why}"}
    )
    for answer in ended.answers:
        answers.update(answer)
    return answers
