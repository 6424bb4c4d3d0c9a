# SPDX-License-Identifier: Apache-2.0
"""What training around replayed layers costs: a step's last micro-batch, autograd's own call, other threads
while the launch queue is full.

Reads no more of the plugin than `inside.py` does, so that a copy of this file also measures an older tree.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import host_seconds, phases_us
from benchmarks.subjects.hosts import install_for
from benchmarks.subjects.inside import Replays, bare_loops
from benchmarks.subjects.layers import captured, end_reductions
from benchmarks.subjects.packs import a_pack, hidden_states
from megagraph.demo.trainer import ModelOptions

ROUNDS, LAST_ROUNDS = 40, 200  # reductions take turns with the host, so that a last micro-batch varies most
DOCUMENTS = 8  # of the capacity
IDLE_SECONDS = 0.002
SLEEP_CYCLES = 4_000_000_000  # some two seconds on the GPU
LAUNCHES = 8000  # more than any launch queue holds


def measure_last(options: ModelOptions) -> Answer:
    """The backward of a last micro-batch, us for each layer, and what of it is whose.

    On the calling thread, as in a schedule.
    `megatron` registers every gradient one by one with DDP, which reduces full buckets; `engine` is a
    backward pass of a single node that does nothing, and `bare` the same graphs launched by a loop in C.
    """
    trainer = captured(options, ddp={"overlap_grad_reduce": True})
    ddp, replays = trainer.model, Replays(trainer)
    bank, hidden, grad = replays.bank, replays.hidden, replays.grad
    _forward, bare = bare_loops(bank, replays.key)
    layers = list(trainer.chunk.decoder.layers)
    params = [param for layer in reversed(layers) for param in reversed(list(layer.parameters()))]
    group_of = ddp.param_to_bucket_group

    def register() -> None:
        for param in params:
            group_of[param].register_grad_ready(param, ddp.force_all_reduce)

    def sample() -> dict[str, float]:
        end_reductions(ddp)
        with replays.micro_batch():
            out = bank(hidden)
        nothing = hidden.view_as(hidden)
        with torch.autograd.set_multithreading_enabled(False):
            backward = host_seconds(lambda: torch.autograd.grad(out, hidden, grad))
            engine = host_seconds(lambda: torch.autograd.grad(nothing, hidden, grad))
        end_reductions(ddp)
        registered, launched = host_seconds(register), host_seconds(bare)
        return {
            **{"backward": backward, "engine": engine, "megatron": registered, "bare": launched},
            "own": backward - engine - registered - launched,
        }

    try:
        return dict(phases_us(sample, repeats=LAST_ROUNDS, divisor=len(layers)))
    finally:
        end_reductions(ddp)


def measure_engine(options: ModelOptions) -> Answer:
    """A backward pass through one node that does nothing, us: inside of a schedule's, and outside of any.

    `hot` right after another one, `idle` after the host has slept.
    """
    trainer = captured(options)
    hidden = hidden_states(options.max_tokens, options.hidden)
    grad = torch.randn_like(hidden)
    times: dict[str, list[float]] = {}

    def take(where: str) -> None:
        nothing = [hidden.view_as(hidden) for _ in range(3)]
        for how in ("warm", "hot", "idle"):
            if how == "idle":
                time.sleep(IDLE_SECONDS)
            seconds = host_seconds(partial(torch.autograd.grad, nothing.pop(), hidden, grad))
            times.setdefault(f"{where}, {how}", []).append(seconds * 1e6)

    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> None:
        if torch.is_grad_enabled():  # it is not the body of a graph on the host
            take("inside")
        original(*args, **kwargs)

    for _ in range(ROUNDS):
        with mock.patch.object(torch.autograd, "backward", backward):  # as the schedule calls it
            trainer.forward_backward([a_pack(options.max_tokens)])
        take("outside")
    return dict(times)


class _Counting(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count, self.is_over = 0, False

    def run(self) -> None:
        while not self.is_over:
            self.count += 1


def measure_thread(options: ModelOptions) -> Answer:
    """The pace of a Python thread while a forward waits for the launch queue, as a share of its free one.

    `waited`: how long that forward took, in seconds.
    """
    replays = Replays(captured(options))
    loader = _Counting()

    def counted(call: Callable[[], object]) -> tuple[float, float]:
        start, before = time.perf_counter(), loader.count
        call()
        seconds = time.perf_counter() - start
        return seconds, (loader.count - before) / seconds

    loader.start()
    try:
        torch.cuda.synchronize()
        _, free = counted(lambda: time.sleep(0.2))
        torch.cuda._sleep(SLEEP_CYCLES)
        forwards = []
        for _ in range(LAUNCHES // len(replays.bank.sites)):
            with replays.micro_batch():
                forwards.append(counted(lambda: replays.bank(replays.hidden)))
        torch.cuda.synchronize()
    finally:
        loader.is_over = True
        loader.join()
    waited, pace = max(forwards)
    return {"share": pace / free, "waited": waited}


def measure_costs(options: ModelOptions) -> Answer:
    """All of them, of a stack like that of `layers.py`."""
    install_for(options.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1)
    measured = {"last": measure_last, "engine": measure_engine, "thread": measure_thread}
    return {name: measure(options) for name, measure in measured.items()}
