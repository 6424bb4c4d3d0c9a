# SPDX-License-Identifier: Apache-2.0
"""What training around replayed layers costs: a step's last micro-batch, autograd's own call, calls outside
of any schedule, other threads while the launch queue is full.

Reads no more of the plugin than `inside.py` does, so that a copy of this file also measures an older tree.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import host_seconds, phases_us
from benchmarks.subjects.hosts import check_replays, install_for
from benchmarks.subjects.inside import Replays, bare_loops, graphs_of
from benchmarks.subjects.layers import made_quickly
from benchmarks.subjects.packs import a_pack, hidden_states, model_options
from megagraph import megatron
from megagraph.demo.trainer import ModelOptions, Trainer, packed_seq_params

ROUNDS, LAST_ROUNDS = 40, 200  # reductions take turns with the host, so that a last micro-batch varies most
DOCUMENTS = 8  # of the capacity
CALL_HIDDEN, CALL_ROUNDS, CALLS = 256, 5, 100  # calls of each sample, three samples a round
IDLE_SECONDS = 0.002
SLEEP_CYCLES = 4_000_000_000  # some two seconds on the GPU
LAUNCHES = 8000  # more than any launch queue holds
BARE_CALLS = ("no pack", "a pack that fits no capacity")


def _captured(options: ModelOptions, **further: Any) -> Trainer:
    """A trainer whose layers replay."""
    trainer = made_quickly(Trainer, options, **further)
    for _ in range(3):  # one to warm up; before the second is the capture
        trainer.forward_backward([a_pack(options.max_tokens)] * 2)
    check_replays(graphs_of(trainer).report())
    return trainer


# -- the last micro-batch --------------------------------------------------------------------------


def _begin_step(ddp: Any) -> None:
    """Ends the reductions of a DDP's last micro-batch, and begins to count anew."""
    for group in ddp.bucket_groups:
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None
        group.reset()


def measure_last(options: ModelOptions) -> Answer:
    """The backward of a last micro-batch, us for each layer, and what of it is whose.

    On the calling thread, as in a schedule.
    `megatron` registers every gradient one by one with DDP, which reduces full buckets; `engine` is a
    backward pass of a single node that does nothing, and `bare` the same graphs launched by a loop in C.
    """
    trainer = _captured(options, ddp={"overlap_grad_reduce": True})
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
        _begin_step(ddp)
        with replays.micro_batch():
            out = bank(hidden)
        nothing = hidden.view_as(hidden)
        with torch.autograd.set_multithreading_enabled(False):
            backward = host_seconds(lambda: torch.autograd.grad(out, hidden, grad))
            engine = host_seconds(lambda: torch.autograd.grad(nothing, hidden, grad))
        _begin_step(ddp)
        registered, launched = host_seconds(register), host_seconds(bare)
        return {
            **{"backward": backward, "engine": engine, "megatron": registered, "bare": launched},
            "own": backward - engine - registered - launched,
        }

    try:
        return dict(phases_us(sample, repeats=LAST_ROUNDS, divisor=len(layers)))
    finally:
        _begin_step(ddp)


# -- autograd's own call ---------------------------------------------------------------------------


def measure_engine(options: ModelOptions) -> Answer:
    """A backward pass through one node that does nothing, us: inside of a schedule's, and outside of any.

    `hot` right after another one, `idle` after the host has slept.
    """
    trainer = _captured(options)
    hidden = hidden_states(options.max_tokens, options.hidden)
    grad = torch.randn_like(hidden)
    times: dict[str, list[float]] = {}

    def take(where: str) -> None:
        nothing = [hidden.view_as(hidden) for _ in range(3)]
        for how in ("warm", "hot", "idle"):
            if how == "idle":
                time.sleep(IDLE_SECONDS)
            out = nothing.pop()
            seconds = host_seconds(functools.partial(torch.autograd.grad, out, hidden, grad))
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


# -- calls outside of any schedule -----------------------------------------------------------------


class _Models:
    """Models that do nothing while `are_idle`: the block is called, and returns its input.

    What is given as positions are the hidden states then.
    """

    def __init__(self) -> None:
        self.are_idle = False

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Under whatever wraps the forwards."""
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_block import TransformerBlock

        model_forward, block_forward = GPTModel.forward, TransformerBlock.forward

        @functools.wraps(model_forward)
        def call_block(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.are_idle:
                return model_forward(model, *args, **kwargs)
            params = kwargs["packed_seq_params"]
            return model.decoder(
                hidden_states=kwargs["position_ids"], attention_mask=None, packed_seq_params=params
            )

        @functools.wraps(block_forward)
        def return_input(block: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return hidden_states if self.are_idle else block_forward(block, hidden_states, *args, **kwargs)

        block = mock.patch.object(TransformerBlock, "forward", return_input)
        with mock.patch.object(GPTModel, "forward", call_block), block:
            yield


def _samples(models: _Models, trainer: Trainer, case: str) -> list[float]:
    """Microseconds of a call of an idle model."""
    tokens = trainer.options.max_tokens
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=trainer.device)
    hidden = torch.zeros(tokens, 1, CALL_HIDDEN, dtype=torch.bfloat16, device=trainer.device)
    offsets = torch.arange(0, tokens + 1, tokens // (2 * DOCUMENTS), dtype=torch.int32, device=trainer.device)
    params = None if case == "no pack" else packed_seq_params(offsets, tokens // DOCUMENTS)

    def calls() -> None:
        for _ in range(CALLS):
            trainer.chunk(
                input_ids=ids, position_ids=hidden, attention_mask=None, labels=ids, packed_seq_params=params
            )

    models.are_idle = True
    try:
        with torch.no_grad():
            return [host_seconds(calls) * 1e6 / CALLS for _ in range(4)][1:]
    finally:
        models.are_idle = False


def measure_bare_calls(options: ModelOptions) -> Answer:
    """By case the samples `patched`, while there are graphs of each layer, and `unpatched`, in us."""
    times: Answer = {case: {"patched": [], "unpatched": []} for case in BARE_CALLS}
    models = _Models()
    with models.patched():
        for _ in range(CALL_ROUNDS):
            install_for(options.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1)
            try:
                trainer = _captured(options)
                before = graphs_of(trainer).report()["replays"]
                for case in BARE_CALLS:
                    times[case]["patched"] += _samples(models, trainer, case)
                if graphs_of(trainer).report()["replays"] != before:
                    raise RuntimeError("expected eager calls only, got replays")
            finally:
                megatron.uninstall()
            for case in BARE_CALLS:
                times[case]["unpatched"] += _samples(models, trainer, case)
    return times


# -- other threads ---------------------------------------------------------------------------------


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
    replays = Replays(_captured(options))
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
    calls = measure_bare_calls(model_options(CALL_HIDDEN, layers=options.layers, tokens=options.max_tokens))
    install_for(options.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1)
    try:
        return {
            **{"last": measure_last(options), "engine": measure_engine(options), "calls": calls},
            "thread": measure_thread(options),
        }
    finally:
        megatron.uninstall()
