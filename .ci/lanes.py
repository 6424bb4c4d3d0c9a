# SPDX-License-Identifier: Apache-2.0
"""Lanes: runs of pytest in processes of their own, each of which leaves a log and a JUnit file.

What `.ci/tests` and `.ci/gpu` share.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LOOK_SECONDS, TELL_SECONDS = 0.2, 20
STOP_SECONDS = 30  # of pytest, to write down what it knows; it gives its workers ten
_CLOSING = re.compile(r"^=+ .*(?:passed|failed|skipped|deselected|error|no tests ran).* in [0-9.]+s.* =+$")


class Result(NamedTuple):
    """What became of one test: its outcome is passed, failed or skipped."""

    test: str
    outcome: str
    why: str
    text: str


class Lane:
    """One run of pytest, in the background.

    Args:
        name: of its files.
        out: folder of its log and its JUnit file.
        arguments: what pytest is called with.
        environment: all variables of its process, but for what keeps bytecode from being written.
    """

    def __init__(
        self, name: str, out: Path, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.name, self.log, self._xml = name, out / f"{name}.log", out / f"{name}.xml"
        out.mkdir(parents=True, exist_ok=True)
        self._xml.unlink(missing_ok=True)  # of an earlier run
        command = [sys.executable, "-m", "pytest", *arguments]
        print(f"{name}: {' '.join(command[1:])}", flush=True)
        command += [f"--junitxml={self._xml}", "-o", "junit_family=xunit1"]
        self._start, self.seconds = time.monotonic(), 0.0
        # Ranks, children and the next lane read what one process has compiled, the other release among it.
        variables = {k: v for k, v in environment.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with self.log.open("w", encoding="utf-8") as log:
            # A session of its own, so that the processes of ranks end with it.
            how: dict[str, Any] = {"stdout": log, "stderr": log, "start_new_session": True}
            how["preexec_fn"] = _heed_interrupts
            self._process = subprocess.Popen(command, cwd=ROOT, env=variables, **how)

    @property
    def code(self) -> int | None:
        """Pytest's exit code; None while it runs."""
        code = self._process.poll()
        if code is not None and not self.seconds:
            self.seconds = time.monotonic() - self._start
        return code

    @property
    def is_broken(self) -> bool:
        """Whether it did not run to its end, or ran nothing. Asked of one that has ended."""
        return self.code not in (0, 1) or not self.results()

    def progress(self) -> str:
        """How much of it is done."""
        done = re.findall(r"\[ *(\d+%)\]", self._said())
        return "done" if self.code is not None else done[-1] if done else "starts"

    def closing_line(self) -> str:
        """Pytest's last word."""
        lines = [line for line in self._said().splitlines() if _CLOSING.match(line)]
        return lines[-1] if lines else f"{self.name}: pytest ended with {self.code}"

    def stop(self) -> None:
        """Ends it, if it still runs, with all that it has started. What has run until then is written."""
        if self.code is None:
            self._process.send_signal(signal.SIGINT)  # pytest alone: what it has started is to end later
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self.seconds = time.monotonic() - self._start

    def results(self) -> list[Result]:
        """Of every test that has ended."""
        try:
            cases = ElementTree.parse(self._xml).iter("testcase")
        except (OSError, ElementTree.ParseError):
            return []
        found = []
        for case in cases:
            said = {kind: case.find(kind) for kind in ("failure", "error", "skipped")}
            kind, element = next(((k, e) for k, e in said.items() if e is not None), ("passed", None))
            outcome = {"failure": "failed", "error": "failed"}.get(kind, kind)
            why, text = ("", "") if element is None else (first_line(element), element.text or "")
            found.append(Result(f"{file_of(case)}::{case.get('name')}", outcome, why, text))
        return found

    def counts(self) -> Counter[str]:
        """How many tests there are of each outcome."""
        return Counter(result.outcome for result in self.results())

    def _said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def _heed_interrupts() -> None:
    """Undoes what a shell does to jobs in the background, and they to all that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def file_of(case: ElementTree.Element) -> str:
    """The file that a test was collected from; pytest's own attribute says where its function was written."""
    collected = (case.get("classname") or "").replace(".", "/") + ".py"
    return collected if (ROOT / collected).exists() else case.get("file", "?")


def first_line(element: ElementTree.Element) -> str:
    """What pytest says of a test, in short."""
    message = element.get("message") or element.text or "?"
    return re.sub(r"\s+", " ", message.strip().split("\n")[0])[:200]


def follow(
    lanes: Sequence[Lane],
    limit: float = float("inf"),
    say: Callable[..., None] = print,
    begin: Callable[[], bool] = lambda: False,
) -> None:
    """Waits for all lanes and tells how far they are.

    Args:
        lanes: that have begun; `begin` may add some.
        limit: seconds at most.
        say: prints.
        begin: begins what can begin by now; returns whether something still waits.
    """
    start = told = time.monotonic()
    while (begin() or any(lane.code is None for lane in lanes)) and time.monotonic() - start < limit:
        time.sleep(LOOK_SECONDS)
        if time.monotonic() - told >= TELL_SECONDS:
            told = time.monotonic()
            words = ", ".join(f"{lane.name} {lane.progress()}" for lane in lanes)
            say(f"{told - start:5.0f} s: {words}", flush=True)


def print_all(title: str, lines: Sequence[str]) -> None:
    """A list under its title, or that there is nothing."""
    print(f"\n{title}{'' if lines else ' nothing'}")
    for line in lines:
        print(f"  {line}")


def print_table(lanes: Sequence[Lane]) -> None:
    """What came out of each, and how long it took."""
    print(f"\n{'lane':14s} {'passed':>7s} {'failed':>7s} {'skipped':>8s} {'seconds':>8s}")
    for lane in lanes:
        counts = lane.counts()
        figures = f"{counts['passed']:7d} {counts['failed']:7d} {counts['skipped']:8d} {lane.seconds:8.0f}"
        print(f"{lane.name:14s} {figures}")


def arguments_for_pytest(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands in front of `--`, and what follows it."""
    given = list(given)
    if "--" not in given:
        return given, []
    place = given.index("--")
    return given[:place], given[place + 1 :]
