# SPDX-License-Identifier: Apache-2.0
"""Runs modules in forks of a process that imported what they need: `multiprocessing`'s fork server.

A fork is to the module what a fresh interpreter is, but for seconds of imports: environment, path, output,
exit. It does not say what a process printed.
"""

import atexit
import functools
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_PROBE_SECONDS = 60
# Starting a process polls all others, and only one thread may read how a process ended.
_LOCK = threading.Lock()


def _start(target: Callable[..., None], *arguments: object) -> Any:
    with _LOCK:
        # Imports go on in the server while this waits.
        _CONTEXT.set_forkserver_preload(["benchmarks.measuring.preload"])
        process = _CONTEXT.Process(target=target, args=arguments)
        process.start()
        return process


def _end(process: Any, timeout: float) -> int | None:
    """Waits for a process; its exit code, or None where it had to be killed, and its group with it."""
    try:
        in_time = bool(connection.wait([process.sentinel], timeout))
    except BaseException:
        _kill(process)
        raise
    if not in_time:
        _kill(process)
    with _LOCK:
        code: int = process.exitcode
        process.close()
    return code if in_time else None


def _kill(process: Any) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it does not lead its group yet, or is gone
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    connection.wait([process.sentinel])


def _probe(needs_gpu: bool) -> None:
    """In a fork: raises where CUDA does not work, since an import has initialised it."""
    if needs_gpu:
        torch.empty(1, device="cuda")


@functools.lru_cache(maxsize=1)
def can_fork() -> bool:
    """Whether forks work here, CUDA included; the first call starts the server, and tries."""
    try:
        if _end(_start(_probe, torch.cuda.is_available()), _PROBE_SECONDS) == 0:
            return True
    except (OSError, EOFError, ValueError) as error:  # ValueError: there is no such method here
        print(f"no fork server: {type(error).__name__}: {error}", file=sys.stderr)
    print("every process imports what it needs itself", file=sys.stderr, flush=True)
    return False


def run_forked(module: str, arguments: Sequence[str], out: str, log: str, timeout: float) -> int | None:
    """Runs `python -m MODULE ARGUMENTS` to its end, in a fork that leads a session of its own.

    Args:
        module: its full name.
        arguments: of its command line.
        out: file to which its standard output is appended.
        log: file to which its standard error is appended.
        timeout: seconds until it is killed, with whatever it started.

    Returns:
        Its exit code; None where it had to be killed.

    Raises:
        OSError, EOFError: if the server is not there any more.
    """
    return _end(_start(_run, module, list(arguments), dict(os.environ), out, log), timeout)


def _run(module: str, arguments: list[str], environment: dict[str, str], out: str, log: str) -> None:
    """In a fork: is `python -m MODULE ARGUMENTS`."""
    os.setsid()
    for descriptor, name in ((1, out), (2, log)):
        file = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    from benchmarks.measuring.preload import STARTED_WITH

    _take_over(environment, STARTED_WITH)
    path = [os.getcwd(), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def _take_over(environment: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Sets the environment to that of the caller; what imports have set, they would set again."""
    for name in before.keys() - environment.keys():
        os.environ.pop(name, None)
    changed = {name: value for name, value in environment.items() if before.get(name) != value}
    os.environ.update(changed)
