# SPDX-License-Identifier: Apache-2.0
"""Processes that stand for the ranks of a job and run one function after another, over gloo on the CPU, over
NCCL on GPUs, which ranks share where there are fewer. Each file of tests has its own, for each number of
ranks, and each function has groups of its own. They are forks of a server that has imported what takes
seconds, and has not asked for CUDA, which survives no fork. Nothing is compiled in them: what Megatron fuses
has the bits of its parts. Ranks that wait for ever are a failure that says where; how they end, the last
test of each file."""

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import logging
import os
import reprlib
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from run_scripts import patience
from streams import make_groups
from torch import distributed, multiprocessing
from watched import every_graph_is_compared_or_named, free_models, models_in_memory

START_SECONDS = 240  # imports
TIMEOUT_SECONDS = 200  # of one function, which takes ten
GRACE_SECONDS = 5  # for the others, once a rank has failed: they may wait for it
END_SECONDS = 60
SHORT = reprlib.Repr()  # of values that are told of
SHORT.maxdict, SHORT.maxother = 50, 500
IMPORTED = ["torch", "megatron.core.models.gpt", "megagraph.megatron", "megagraph.demo.trainer"]


@functools.cache
def _device() -> Any:
    return distributed.ProcessGroupGloo.create_device(interface="lo")


class OnOneDevice(distributed.ProcessGroupGloo):
    """A group on the device of all: for the end of one of its own, each group would wait 10 ms. It has one
    thread: two write the name of what has ended last without a lock, and may free it twice (torch 2.11)."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_further: Any) -> None:
        # Releases that pass further options pass their defaults.
        options = self._Options()
        options._devices, options._timeout, options._threads = [_device()], timeout, 1
        super().__init__(store, rank, size, options)


def _processes() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    # There, whether there is a GPU is asked without CUDA, which no process may be forked with.
    with mock.patch.dict(os.environ, PYTORCH_NVML_BASED_CUDA_CHECK="1", TORCHDYNAMO_DISABLE="1"):
        forkserver.ensure_running()
    return context


def _serve(rank: int, size: int, port: int, stderr: str, pipe: Connection) -> None:
    stacks = open(_stacks_of(stderr), "w", encoding="utf-8")  # noqa: SIM115  # as long as the process
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # read when an attention module is made
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron asks for it with sequence parallelism
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.enable()  # there, where a rank that dies was
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    distributed.distributed_c10d.ProcessGroupGloo = OnOneDevice
    # Or a rank that makes Megatron's groups and closes them breaks another that still connects to it.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    backend = "gloo"
    if torch.cuda.is_available():
        take_gpu(rank, size)
        backend = "nccl"
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)
    from moe_rig import experts_on_cpu

    from megagraph.demo.cpu import megatron_on_cpu

    importlib.import_module("megatron.core.models.gpt")
    gc.freeze()  # or each collection, before a capture, would go over all modules
    gc.set_threshold(10_000, 20, 20)  # as in tests/conftest.py
    with megatron_on_cpu(), experts_on_cpu(), every_graph_is_compared_or_named():
        pipe.send((True, "ready"))
        for index in itertools.count():
            job = pipe.recv()
            # Not before: a rank that still waits for this one is to be named.
            if distributed.is_initialized():
                distributed.destroy_process_group()
            if job is None:
                break
            groups = distributed.PrefixStore(f"function {index}", store)
            distributed.init_process_group(backend, store=groups, rank=rank, world_size=size)
            try:
                answer = True, _run(*job)
            except BaseException as error:
                answer = False, _told(error)
            free_models()  # which would keep the threads of their groups
            if answer[0] and (models := models_in_memory()):
                answer = False, f"models that stay in memory: {', '.join(models)}"
            pipe.send(answer)


def _told(error: BaseException) -> str:
    """Its traceback, and what was known where it was raised: nobody rewrites assertions here."""
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    known = (f"  {name} = {SHORT.repr(value)}" for name, value in frame.f_locals.items())
    return "\n".join([traceback.format_exc(), *known])


def take_gpu(rank: int, size: int) -> None:
    """A GPU of this rank's own; where there are too few, one that ranks share. NCCL refuses two ranks on a
    GPU of one host, so each is told that it is a host: they send over sockets, in the same collectives.
    Buffers of a quarter of the size leave room for the ranks of other files."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < size:
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket")
        os.environ["NCCL_BUFFSIZE"] = str(2**20)
    torch.cuda.set_device(rank % num_gpus)


def _run(module: str, name: str, tensor_parallel: int, arguments: dict[str, Any]) -> Any:
    from megatron.core import parallel_state

    import megagraph

    job = getattr(importlib.import_module(module), name)
    if not hasattr(job, "makes_groups"):
        make_groups(tensor_model_parallel_size=tensor_parallel)
    try:
        return getattr(job, "of_each_rank", job)(**arguments)
    finally:
        megagraph.uninstall()
        parallel_state.destroy_model_parallel()


def _stacks_of(log: str) -> str:
    return f"{log}.stacks"


class _Rank(NamedTuple):
    process: BaseProcess
    pipe: Connection
    log: str

    def stacks(self) -> str:
        """Where its threads stay, as the rank itself writes it until it says the same twice: it is slow."""
        path, pid, said = _stacks_of(self.log), self.process.pid, [""]
        if pid is None or not os.path.exists(path):
            return "it has not even started"
        slower = patience()
        deadline = time.monotonic() + GRACE_SECONDS * slower
        with open(path, encoding="utf-8") as written, contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.2 * slower)
                said.append(written.read())
                if said[-1] and said[-1] == said[-2]:
                    return said[-1]
        return "".join(said)[-20_000:]


class World:
    """Some ranks, which start when they are first given something to run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.codes: list[int | None] = []  # of all that were told to end, while nothing had broken them
        self.is_broken = False  # since the last function; the next one gets other processes
        self._ranks: list[_Rank] = []

    def _start(self) -> None:
        size = self.size
        self.is_broken = False
        # Listens from here on, at a port that nobody else on this machine can be given meanwhile.
        self._store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._logs = tempfile.TemporaryDirectory()
        context = _processes()
        for rank in range(size):
            ours, theirs = context.Pipe()
            log = os.path.join(self._logs.name, str(rank))
            given = rank, size, self._store.port, log, theirs
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self._ranks.append(_Rank(process, ours, log))
        self._answers(START_SECONDS)

    def run(
        self,
        function: Callable[..., Any],
        *,
        tensor_parallel: int = 1,  # size of the tensor-parallel groups
        timeout_seconds: float = TIMEOUT_SECONDS,  # on a machine that does nothing else
        late_seconds: float | None = None,  # for the others once the first has answered or failed
        **arguments: Any,
    ) -> list[Any]:
        """Calls a function of a module of this folder on every rank; returns what each answers. Raises with
        the traceback and the log of each that failed or died, and the stacks of each that is late."""
        if self.is_broken or not self._ranks:
            self.close()
            self._start()
        for rank in self._ranks:
            rank.pipe.send((function.__module__, function.__name__, tensor_parallel, arguments))
        return self._answers(timeout_seconds, late_seconds)

    def _answers(self, seconds: float, late_seconds: float | None = None) -> list[Any]:
        start, slower = time.monotonic(), patience()
        deadline = start + seconds * slower
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {rank.pipe: index for index, rank in enumerate(self._ranks)}
        # What is there is taken, however late this process comes to it.
        while waiting and (ready := wait([*waiting], timeout=max(0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                index = waiting.pop(pipe)
                try:
                    succeeded, answer = pipe.recv()
                except EOFError:
                    self._ranks[index].process.join(GRACE_SECONDS)
                    succeeded, answer = False, f"died, exit code {self._ranks[index].process.exitcode}"
                if succeeded:
                    answers[index] = answer
                else:
                    log = Path(self._ranks[index].log).read_text(encoding="utf-8", errors="replace")
                    failures[index] = f"rank {index}: {answer}\n{log[-8000:]}"
                left = late_seconds if late_seconds or succeeded else GRACE_SECONDS
                if left is not None:
                    deadline = min(deadline, time.monotonic() + left * slower)
        waited = time.monotonic() - start
        for index in waiting.values():
            stacks = self._ranks[index].stacks()
            failures[index] = f"rank {index}: no answer after {waited:.0f} s. It is at:\n{stacks}"
        if failures:
            self.is_broken = True
            late = sorted(waiting.values())
            summary = f"answered: ranks {sorted(answers)}; did not answer in time: ranks {late}"
            raise AssertionError("\n".join([summary, *(failures[index] for index in sorted(failures))]))
        return [answers[index] for index in range(self.size)]

    def close(self) -> list[int | None]:
        """Ends every rank. Returns their exit codes, None for one that had to be killed."""
        codes: list[int | None] = []
        for rank in self._ranks:
            if self.is_broken:
                rank.process.kill()
            with contextlib.suppress(OSError):  # it is gone already
                rank.pipe.send(None)
        for rank in self._ranks:
            rank.process.join(END_SECONDS * patience())
            codes.append(rank.process.exitcode)
            if rank.process.exitcode is None:
                rank.process.kill()
                rank.process.join(GRACE_SECONDS)
        if self._ranks:
            self._logs.cleanup()
        if not self.is_broken:
            self.codes += codes
        self._ranks = []
        return codes


class Worlds:
    """The ranks that the tests of one file share, by their number."""

    def __init__(self) -> None:
        self._made: dict[int, World] = {}

    def of(self, size: int) -> World:
        return self._made.setdefault(size, World(size))

    def close(self) -> list[int | None]:
        """Ends all of them. Returns the exit codes of all that it had, None for one that was killed."""
        made, self._made = self._made, {}
        for world in made.values():
            world.close()
        return [code for world in made.values() for code in world.codes]


def on_ranks(
    size: int, *, tensor_parallel: int = 1, timeout_seconds: float = TIMEOUT_SECONDS
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of what each of some ranks does, given what the test is parametrized with."""
    how: dict[str, Any] = {"tensor_parallel": tensor_parallel, "timeout_seconds": timeout_seconds}

    def decorate(of_each_rank: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(of_each_rank)
        def test(worlds: Worlds, **arguments: Any) -> None:
            worlds.of(size).run(test, **how, **arguments)

        worlds, *_ = inspect.signature(test, follow_wrapped=False).parameters.values()
        given = inspect.signature(of_each_rank)
        vars(test)["__signature__"] = given.replace(parameters=[worlds, *given.parameters.values()])
        vars(test)["of_each_rank"] = of_each_rank
        return test

    return decorate
