# SPDX-License-Identifier: Apache-2.0
"""Pipelines of real ranks: the chunks of a stage in Megatron's own schedule, and their training."""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import wall_ms
from benchmarks.subjects.hosts import be_deterministic, check_replays, install_for
from benchmarks.subjects.stages import DOCUMENTS, LAYERS, BlockSpec, chunks_of, differing, drawn_packs
from benchmarks.subjects.steps import Batch, batch_of, mean_loss, rows_of
from megagraph import megatron
from megagraph.cli.demo import quiet_megatron
from megagraph.decide.dispatch import StageSchedule
from megagraph.demo.trainer import (
    ModelOptions,
    packed_seq_params,
    transformer_config,
)
from megagraph.megatron.parallel.model_parallel import schedule_of
from megagraph.megatron.specs import get_gpt_block_varlen_spec

# Calls a chunk on a micro-batch, with its device. Returns what its last layer leaves, and what reduces it.
Forward = Callable[[Any, Any, torch.device], tuple[Tensor, Any]]
LEARNING_RATE = 0.05
MOST_MICRO_BATCHES = 12
STEPS, SETTLED = 100, 10  # the first ones warm up, capture, and fill the allocator's cache
ALONE = 5  # graphed steps at the end, whose slots the report shows without the eager ones between


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a model is cut into stages and chunks, and how many ranks share layers, packs and experts."""

    stages: int = 2
    chunks: int = 1  # of each stage
    group_size: int | None = None  # of interleaved schedules, if not Megatron's own default
    tensor_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1

    @property
    def name(self) -> str:
        """For figures."""
        return f"PP={self.stages}" + (f", {self.chunks} chunks a stage" if self.chunks > 1 else "")

    def start(self) -> None:
        """Makes Megatron's groups."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tensor_parallel,
            context_parallel_size=self.context_parallel,
            expert_model_parallel_size=self.expert_parallel,
            pipeline_model_parallel_size=self.stages,
            virtual_pipeline_model_parallel_size=self.chunks if self.chunks > 1 else None,
        )

    def config(self) -> dict[str, Any]:
        """Fields of Megatron's config. Packs differ in their rows, which stages tell each other."""
        fields: dict[str, Any] = {
            "tensor_model_parallel_size": self.tensor_parallel,
            "context_parallel_size": self.context_parallel,
            "expert_model_parallel_size": self.expert_parallel,
            "pipeline_model_parallel_size": self.stages,
            "variable_seq_lengths": True,
            "moe_token_dispatcher_type": "alltoall",  # asked for beside those
            "batch_p2p_sync": False,
        }
        if self.chunks > 1:
            # Without overlap two stages of several chunks mistake each other's messages.
            fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
            fields |= {"virtual_pipeline_model_parallel_size": self.chunks}
            fields |= {"microbatch_group_size_per_vp_stage": self.group_size or self.stages}
        return fields


class PipelineTrainer:
    """The chunks of one stage, and steps of plain gradient descent.

    `forward` calls a chunk on a micro-batch. With `aligned` chunks reduce gradients, and gather parameters,
    when the schedule says so on all stages.
    """

    def __init__(
        self,
        cut: Cut,
        options: ModelOptions,
        forward: Forward,
        *,
        transformer: dict[str, Any] | None = None,
        ddp: dict[str, Any] | None = None,
        spec: BlockSpec = get_gpt_block_varlen_spec,
        shared_embeddings: bool = False,
        aligned: bool = False,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.options, self._forward = options, forward
        self.config = transformer_config(options, **{**cut.config(), **(transformer or {})})
        stage = parallel_state.get_pipeline_model_parallel_rank()
        place = StageSchedule(stages=cut.stages, stage=stage, chunks=cut.chunks)
        shared = {"share_embeddings_and_output_weights": shared_embeddings}
        self.models, self.chunks = chunks_of(options, self.config, spec, place, ddp=ddp, **shared)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.no_sync_func = self._each("no_sync")
        if aligned:
            self.config.grad_sync_func = self._each("start_grad_sync")
            if self.chunks[0].ddp_config.overlap_param_gather:
                self.config.param_sync_func = self._each("start_param_sync")

    def _each(self, name: str) -> Any:
        """A method of every chunk, as Megatron's config takes it."""
        methods = [getattr(chunk, name) for chunk in self.chunks]
        return methods if len(methods) > 1 else methods[0]

    def step(self, micros: Sequence[Any], *, eager: bool, forward_only: bool = False) -> list[dict[str, Any]]:
        """Runs Megatron's schedule. Returns what `forward` reduced, on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.train(not forward_only)
            chunk.zero_grad_buffer()
        several = len(self.chunks) > 1
        with ExitStack() as stack:
            if eager:
                stack.enter_context(megatron.disable_cuda_graphs_this_step())
            if forward_only:
                stack.enter_context(torch.no_grad())
            results: list[dict[str, Any]] = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=[iter(micros) for _ in self.chunks] if several else iter(micros),
                model=self.chunks if several else self.chunks[0],
                num_microbatches=len(micros),
                seq_length=self.options.max_tokens,
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return results

    def update(self) -> None:
        """Descends."""
        with torch.no_grad():
            for _name, param in self.named_parameters():
                param.sub_(LEARNING_RATE * param.main_grad.to(param.dtype))

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Of all chunks, by chunk and name."""
        for index, model in enumerate(self.models):
            for name, param in model.named_parameters():
                yield f"chunk {index}.{name}", param

    def _forward_step(self, micros: Iterator[Any], chunk: Any) -> tuple[Tensor, Any]:
        return self._forward(chunk, next(micros), self.device)


def _forward(chunk: Any, batch: Batch, _device: torch.device) -> tuple[Tensor, Any]:
    params = packed_seq_params(batch["offsets"], batch["longest"])
    out: Tensor = chunk(**rows_of(batch), packed_seq_params=params)
    return out, partial(mean_loss, mask=batch["mask"])


class _Shapes:
    """Host time that Megatron spends on exchanging shapes, with which it waits for the device."""

    ms = 0.0

    def timed(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """The exchange, timed."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return exchange(*args, **kwargs)
            finally:
                self.ms += (time.perf_counter() - start) * 1e3

        return call


class _Timed:
    """One of two trainers of the same weights, and what its settled steps took."""

    def __init__(self, trainer: PipelineTrainer, shapes: _Shapes, *, eager: bool) -> None:
        self.trainer, self._shapes, self._eager = trainer, shapes, eager
        self.walls: list[float] = []
        self.waits: list[float] = []

    def step(self, batches: Sequence[Batch], *, counts: bool) -> list[Tensor]:
        """A step that all ranks begin at once. Returns losses and gradients."""
        distributed.all_reduce(torch.zeros(1, device=self.trainer.device))
        self._shapes.ms = 0.0
        results: list[dict[str, Any]] = []
        wall = wall_ms(lambda: results.extend(self.trainer.step(batches, eager=self._eager)))
        if counts:
            self.walls.append(wall)
            self.waits.append(self._shapes.ms)
        gradients = [param.main_grad for _name, param in self.trainer.named_parameters()]
        return [*(result["loss"] for result in results), *gradients]


def train(model: ModelOptions, cut: Cut, layers: str) -> Answer:
    """Trains eager and graphed on the same packs, another number in each step; this rank's part.

    Leaves the report that `MEGAGRAPH_REPORT` names. Answers `graphed` and `eager`, walls in ms of the settled
    steps, and the part of them in which the host exchanged shapes, `graphed waits` and `eager waits`; how
    many values of losses and gradients were `differing` in all steps.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    quiet_megatron()
    be_deterministic()
    cut.start()
    path = os.environ.get("MEGAGRAPH_REPORT")
    target = None if path is None else Path(path)
    install_for(model.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1, report=target)
    shapes, exchange = _Shapes(), P2PCommunicator._communicate_shapes
    eager, graphed = (
        _Timed(PipelineTrainer(cut, model, _forward, spec=LAYERS[layers]), shapes, eager=is_eager)
        for is_eager in (True, False)
    )
    schedule = schedule_of(eager.trainer.models[0])
    numbers = [number for number in range(1, MOST_MICRO_BATCHES + 1) if schedule.is_legal(number)]
    draw, num_differing = random.Random(5), 0
    with mock.patch.object(P2PCommunicator, "_communicate_shapes", shapes.timed(exchange)):
        for step in range(STEPS):
            count = max(numbers) if step < SETTLED // 2 else draw.choice(numbers)
            packs = drawn_packs(model.max_tokens, count, seed=step)
            batches = [batch_of(pack, eager.trainer.device) for pack in packs]
            left = (it.step(batches, counts=step >= SETTLED) for it in (eager, graphed))
            num_differing += differing(*left)
            for it in (eager, graphed):
                it.trainer.update()
        for _ in range(ALONE):
            graphed.step(batches, counts=False)
    for report in megatron.reports()[cut.chunks :]:
        check_replays(report)
    megatron.uninstall()
    distributed.barrier()  # a stage that is done must not close what another still sends over
    return {
        **{"graphed": graphed.walls, "graphed waits": graphed.waits},
        **{"eager": eager.walls, "eager waits": eager.waits, "differing": num_differing},
    }
