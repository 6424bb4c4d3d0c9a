# SPDX-License-Identifier: Apache-2.0
"""Host time of our replays of a Megatron stack, beside the same layers eager and the bare launches."""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measuring.compare import Answer, spreads
from benchmarks.measuring.launch_bare import BareLoop
from benchmarks.replay.time_rival_layers import a_pack, eager_times, made_quickly
from megagraph import megatron
from megagraph.config import GraphConfig
from megagraph.demo.trainer import ModelOptions, Trainer
from megagraph.megatron import disable_cuda_graphs_this_step
from megagraph.megatron.patch.installation import installed_plugin

ROUNDS = 60
_NUM_SEQS = 8


def _graphs_of(trainer: Trainer) -> Any:
    """The trainer's captured graphs. Raises `RuntimeError` where a layer was not captured."""
    packs = [a_pack(trainer.options.max_tokens)] * 2
    for _ in range(3):  # one to warm up; before the second is the capture
        trainer.forward_backward(packs)
    plugin = installed_plugin()
    assert plugin is not None
    graphs = plugin.graphs_of_model(trainer.chunk)
    report = graphs.report()
    if report["failures"] or report["graphs"] != 2 * report["layers"] or not report["replays"]:
        raise RuntimeError(f"the stack does not replay: {report}")
    return graphs


def _let_reduce_again(ddp: Any) -> None:
    """Ends the reductions of a last micro-batch, so that the next one is a last one again."""
    for group in ddp.bucket_groups:
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None
        group.reset()


def _time_replays(trainer: Trainer, graphs: Any, before: Callable[[], None]) -> Answer:
    """Host time of each phase of a micro-batch for each layer; of `around` and `engine` for all together.

    Phases: `forward` and `backward` of all layers; `bare forward` and `bare backward`, the same graphs
    launched by a loop in C; `around`, the micro-batch's begin and end; `engine`, a backward pass
    of a single node that does nothing; `backward without engine`, of each backward less the engine's
    time beside it.
    """
    chain = graphs.block.chain
    key = next(key for key in chain.variants if key[1].grad)
    capacity = key[0]
    layers = len(chain.sites)
    device = trainer.device
    shape = (capacity.tokens, 1, trainer.options.hidden)
    leaf = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    hidden = leaf.clone()  # the gradient of a leaf would be cloned
    grad = torch.randn_like(leaf) * 1e-3
    offsets = torch.tensor([0, capacity.tokens], dtype=torch.int32, device=device)
    bare_forward, bare_backward = map(BareLoop, chain.core.raw_graph_execs(chain.variants[key], 0))
    trainer.model.zero_grad_buffer()

    def timed(call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) / layers

    def sample() -> dict[str, float]:
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        with chain.micro_batch(key, [offsets]) as reason:
            begun = time.perf_counter()
            if reason is not None:
                raise RuntimeError(f"a micro-batch ran eager: {reason.name}")
            out = chain(hidden)
            done = time.perf_counter()
        ended = time.perf_counter()
        nothing = hidden.view_as(hidden)
        backward = timed(lambda: torch.autograd.grad(out, hidden, grad))
        engine = timed(lambda: torch.autograd.grad(nothing, hidden, grad))
        return {
            "forward": (done - begun) / layers,
            "around": begun - start + ended - done,
            "backward": backward,
            "backward without engine": backward - engine,
            "engine": engine * layers,
            "bare forward": timed(bare_forward),
            "bare backward": timed(bare_backward),
        }

    counted = graphs.report()["replays"]
    answer: Answer = spreads(sample, repeats=ROUNDS)
    replays = graphs.report()["replays"] - counted
    if replays < ROUNDS * layers:
        raise RuntimeError(f"expected at least {ROUNDS * layers} replays, got {replays}")
    return answer


def _measure_stack(options: ModelOptions, ddp: dict[str, Any] | None) -> Answer:
    trainer = made_quickly(Trainer, options, ddp=ddp)
    graphs = _graphs_of(trainer)

    def before() -> None:
        if ddp is not None:
            _let_reduce_again(trainer.model)

    graphed = _time_replays(trainer, graphs, before)
    before()  # whole steps follow
    with disable_cuda_graphs_this_step():
        eager = eager_times(trainer, [a_pack(options.max_tokens)] * 2, before=before)
    return {"graphed": graphed, "eager": eager}


def measure_stacks(options: ModelOptions) -> dict[str, Answer]:
    """A stack in micro-batches that are not a step's last (`stack`) and in those that are (`last`).

    The latter with `overlap_grad_reduce`: DDP hears of each gradient, and reduces each full bucket.
    """
    megatron.install(
        GraphConfig(
            cuda_graph_max_packed_seqs=(_NUM_SEQS,),
            max_seqlen_per_dp_cp_rank=options.max_tokens,
            cuda_graph_warmup_steps=1,
            progress=False,
        )
    )
    try:
        return {
            "stack": _measure_stack(options, None),
            "last": _measure_stack(options, {"overlap_grad_reduce": True}),
        }
    finally:
        megatron.uninstall()
