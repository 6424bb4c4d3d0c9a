# SPDX-License-Identifier: Apache-2.0
"""Host time of our replays of a Megatron stack, beside the same layers eager and the bare launches."""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import host_seconds, phases_us
from benchmarks.subjects.hosts import install
from benchmarks.subjects.inside import Replays, bare_loops, graphs_of
from benchmarks.subjects.packs import a_pack
from benchmarks.subjects.rival_layers import eager_times, made_quickly
from megagraph import megatron
from megagraph.demo.trainer import ModelOptions, Trainer
from megagraph.megatron import disable_cuda_graphs_this_step

ROUNDS = 60
_NUM_SEQS = 8


def _capture(trainer: Trainer) -> None:
    """Trains until every layer replays. Raises `RuntimeError` where one was not captured."""
    packs = [a_pack(trainer.options.max_tokens)] * 2
    for _ in range(3):  # one to warm up; before the second is the capture
        trainer.forward_backward(packs)
    report = graphs_of(trainer).report()
    if report["failures"] or report["graphs"] != 2 * report["layers"] or not report["replays"]:
        raise RuntimeError(f"the stack does not replay: {report}")


def _let_reduce_again(ddp: Any) -> None:
    """Ends the reductions of a last micro-batch, so that the next one is a last one again."""
    for group in ddp.bucket_groups:
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None
        group.reset()


def _time_replays(trainer: Trainer, before: Callable[[], None]) -> Answer:
    """Host times of each phase of a micro-batch for each layer; of `around` and `engine` for all together.

    Phases: `forward` and `backward` of all layers; `bare forward` and `bare backward`, the same graphs
    launched by a loop in C; `around`, the micro-batch's begin and end; `engine`, a backward pass
    of a single node that does nothing; `backward without engine`, of each backward less the engine's
    time beside it.
    """
    replays = Replays(trainer)
    chain, hidden, grad = replays.chain, replays.hidden, replays.grad
    layers = len(chain.sites)
    bare_forward, bare_backward = bare_loops(chain, replays.key)
    trainer.model.zero_grad_buffer()

    def sample() -> dict[str, float]:
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        with replays.micro_batch():
            begun = time.perf_counter()
            out = chain(hidden)
            done = time.perf_counter()
        ended = time.perf_counter()
        nothing = hidden.view_as(hidden)
        backward = host_seconds(lambda: torch.autograd.grad(out, hidden, grad)) / layers
        engine = host_seconds(lambda: torch.autograd.grad(nothing, hidden, grad))
        return {
            "forward": (done - begun) / layers,
            "around": begun - start + ended - done,
            "backward": backward,
            "backward without engine": backward - engine / layers,
            "engine": engine,
            "bare forward": host_seconds(bare_forward) / layers,
            "bare backward": host_seconds(bare_backward) / layers,
        }

    report = graphs_of(trainer).report
    counted = report()["replays"]
    answer: Answer = phases_us(sample, repeats=ROUNDS)
    counted = report()["replays"] - counted
    if counted < ROUNDS * layers:
        raise RuntimeError(f"expected at least {ROUNDS * layers} replays, got {counted}")
    return answer


def _measure_stack(options: ModelOptions, ddp: dict[str, Any] | None) -> Answer:
    trainer = made_quickly(Trainer, options, ddp=ddp)
    _capture(trainer)

    def before() -> None:
        if ddp is not None:
            _let_reduce_again(trainer.model)

    graphed = _time_replays(trainer, before)
    before()  # whole steps follow
    with disable_cuda_graphs_this_step():
        eager = eager_times(trainer, [a_pack(options.max_tokens)] * 2, before=before)
    return {"graphed": graphed, "eager": eager}


def measure_stacks(options: ModelOptions) -> dict[str, Answer]:
    """A stack in micro-batches that are not a step's last (`stack`) and in those that are (`last`).

    The latter with `overlap_grad_reduce`: DDP hears of each gradient, and reduces each full bucket.
    """
    install(
        cuda_graph_max_packed_seqs=(_NUM_SEQS,),
        max_seqlen_per_dp_cp_rank=options.max_tokens,
        cuda_graph_warmup_steps=1,
    )
    try:
        return {
            "stack": _measure_stack(options, None),
            "last": _measure_stack(options, {"overlap_grad_reduce": True}),
        }
    finally:
        megatron.uninstall()
