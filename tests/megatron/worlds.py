# SPDX-License-Identifier: Apache-2.0
"""Processes that stand for the ranks of a job: started once, they run one function after another.

Over gloo on the CPU, over NCCL on as many GPUs. Core's imports take seconds, hence one set of processes for
each number of ranks and session.
"""

import contextlib
import importlib
import logging
import os
import socket
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed, multiprocessing

TIMEOUT_SECONDS = 240


def _serve(rank: int, size: int, port: int, stderr: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # read when an attention module is made
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron asks for it with sequence parallelism
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "nccl"
    distributed.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    from megagraph.demo.cpu import megatron_on_cpu

    with megatron_on_cpu():
        while (job := pipe.recv()) is not None:
            module, name, tensor_parallel, arguments = job
            try:
                pipe.send((True, _run(module, name, tensor_parallel, arguments)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
    distributed.destroy_process_group()


def _run(module: str, name: str, tensor_parallel: int, arguments: dict[str, Any]) -> Any:
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as random_streams

    import megagraph

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    random_streams.model_parallel_cuda_manual_seed(7)
    try:
        return getattr(importlib.import_module(module), name)(**arguments)
    finally:
        megagraph.uninstall()
        parallel_state.destroy_model_parallel()


class World:
    """Some ranks.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        size = self.size
        self._is_broken = False
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._logs = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._ranks = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            log = os.path.join(self._logs.name, str(rank))
            process = context.Process(target=_serve, args=(rank, size, port, log, theirs), daemon=True)
            process.start()
            self._ranks.append((process, ours, log))

    def run(self, function: Callable[..., Any], *, tensor_parallel: int = 1, **arguments: Any) -> list[Any]:
        """Calls a function of a module of this folder on every rank; returns what each answers.

        Raises:
            AssertionError: with the traceback and the log of each rank that failed.
        """
        if self._is_broken:
            self.close()
            self._start()
        for _, pipe, _ in self._ranks:
            pipe.send((function.__module__, function.__name__, tensor_parallel, arguments))
        answers, failures = [], []
        for rank, (_, pipe, log) in enumerate(self._ranks):
            succeeded, answer = False, "no answer"
            with contextlib.suppress(EOFError):  # it died
                if pipe.poll(0 if self._is_broken else TIMEOUT_SECONDS):
                    succeeded, answer = pipe.recv()
            answers.append(answer)
            if not succeeded:
                self._is_broken = True
                with open(log, encoding="utf-8") as written:
                    failures.append(f"rank {rank}: {answer}\n{written.read()[-2000:]}")
        assert not failures, "\n".join(failures)
        return answers

    def close(self) -> list[int | None]:
        """Ends every rank. Returns their exit codes, None for one that had to be killed."""
        codes: list[int | None] = []
        for _, pipe, _ in self._ranks:
            with contextlib.suppress(OSError):  # it is gone already
                pipe.send(None)
        for process, _, _ in self._ranks:
            process.join(1 if self._is_broken else 60)
            codes.append(process.exitcode)
            if process.exitcode is None:
                process.kill()
        self._logs.cleanup()
        return codes
