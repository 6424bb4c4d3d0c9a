# SPDX-License-Identifier: Apache-2.0
"""Measures rivals in one process of their own, within a time: what was measured until it failed counts."""

import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable

from benchmarks.parts import Answer, caught

__all__ = ["collect", "tell"]


def tell(key: str, measurement: Callable[[], float]) -> None:
    """In the rivals' process: measures, and prints the microseconds, or the error, at once."""
    print(json.dumps({key: caught(lambda: {"us": measurement()})}), flush=True)


def collect(module: str, part: str, *, timeout: float) -> collections.defaultdict[str, Answer]:
    """Runs `python -m MODULE PART` for up to `timeout` seconds; what it told, by key.

    Returns:
        `{"us": ...}` or `{"error": ...}` for each key; the error says how the process ended for a key
        that it did not tell.
    """
    command = [sys.executable, "-m", module, part]
    print("$", " ".join(command[1:]), flush=True)
    with tempfile.TemporaryFile("w+") as out:
        # A session of its own, so that whatever it starts can be ended with it.
        process = subprocess.Popen(command, stdout=out, start_new_session=True)
        try:
            end = f"RuntimeError: not measured, the process ended with {process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            end = f"TimeoutError: not measured within {timeout:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith("{") and line.endswith("}")]
    answers: collections.defaultdict[str, Answer] = collections.defaultdict(lambda: {"error": end})
    for line in lines:
        answers.update(json.loads(line))
    return answers
