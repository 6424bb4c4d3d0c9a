# SPDX-License-Identifier: Apache-2.0
"""Runs a part of a benchmark in a process of its own, and reads the JSON that it prints.

`python -m benchmarks.measuring.children MODULE PART` is such a process.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

# What a measurement answers, as JSON; with `error`, in one short line, where it failed.
Answer = dict[str, Any]
# What runs in processes of their own, by name.
Parts = Mapping[str, Callable[[], Answer]]


def parts_of(measure: Callable[..., Answer], cases: Mapping[str, Any], ways: Iterable[str]) -> Parts:
    """Each of the cases in each of several ways, by both names."""
    return {f"{name}: {way}": partial(measure, case, way) for name, case in cases.items() for way in ways}


def described(error: BaseException) -> str:
    """The first error of a chain in one short line: what followed it says less."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def caught(measure: Callable[[], Answer]) -> Answer:
    """What a measurement answers; if it raises, `{"error": ...}`, and the traceback in the log."""
    try:
        return measure()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"error": described(error)}
    finally:
        gc.collect()


def try_part(
    module: str, part: str, timeout: float = 400, environment: Mapping[str, str] = {}, ranks: int = 1
) -> Answer:
    """Calls `MODULE.PARTS[PART]` elsewhere; out of time, it is killed with all that it started.

    `environment` are variables beside this process's own; `timeout` counts the imports, too. Answers the
    last object that the process, or one of several `ranks`, printed; with `error` where it failed or printed
    none.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [*launch, "-m", "benchmarks.measuring.children", module, part]
    variables = {**os.environ, **environment}
    print("$ python", shlex.join(command), flush=True)
    a_file = partial(tempfile.TemporaryFile, "w+", errors="replace")
    with a_file() as out, a_file() as log:
        # A session of its own, so that whatever it starts can be ended with it.
        process = subprocess.Popen(
            [sys.executable, *command], env=variables, stdout=out, stderr=log, start_new_session=True
        )
        how = f"was killed: took over {timeout} s"
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                how = f"ended with {process.wait(timeout)}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        log.seek(0)
        printed = [line for line in out.read().splitlines() if line.startswith("{")]
        logged = log.read()
    if process.returncode != 0:
        last = " ".join([line for line in logged.splitlines() if line.strip()][-1:])
        answer = {"error": f"{how}: {last}"[:200]}
    else:
        answer = json.loads(printed[-1]) if printed else {"error": "printed no answer"}
    print(f"{module} {part}: {str(answer)[:250]}", flush=True)
    if "error" in answer:
        print(logged[-6000:], file=sys.stderr, flush=True)
    return answer


def measure_part(module: str, part: str, **how: Any) -> Answer:
    """As `try_part()`, of ours. Raises `RuntimeError` if it fails, with the first error of its log."""
    answer = try_part(module, part, **how)
    if "error" in answer:
        raise RuntimeError(f"{module} {part}: {answer['error']}")
    return answer


def _answer(module: str, part: str) -> None:
    """Measures a part among Megatron's groups, prints what it answers, and ends this process.

    Ranks share the GPUs that there are; where they are too few, NCCL takes each rank for a host, and what
    they send goes over sockets.
    """
    from benchmarks.subjects.hosts import seed_streams
    from megagraph.cli.demo import quiet_megatron
    from megagraph.demo.trainer import process_groups

    measure = importlib.import_module(module).PARTS[part]
    rank, num_gpus = os.environ.get("RANK"), torch.cuda.device_count()
    if rank is not None:
        # PR_SET_PDEATHSIG: what launches ranks gives each a session of its own, and may be killed.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if rank is not None and 0 < num_gpus < int(os.environ["WORLD_SIZE"]):
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket")
        os.environ["LOCAL_RANK"] = str(int(rank) % num_gpus)
    quiet_megatron()
    with process_groups():
        if torch.cuda.is_available():  # else a test
            seed_streams()
        status = 1
        try:
            answer = caught(measure)
            print(json.dumps(answer), flush=True)
            status = int(rank is not None and "error" in answer)  # other ranks would wait for this one
        except BaseException as end:
            print(described(end), file=sys.stderr, flush=True)
        finally:
            os._exit(status)  # the group may wait for ever for what a rival's graph holds of it


if __name__ == "__main__":
    _answer(*sys.argv[1:])
