# SPDX-License-Identifier: Apache-2.0
"""What the stages of a pipeline run: chunks trained eager and graphed over the same packs, and compared."""

import contextlib
import dataclasses
import logging
import random
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import megatron_rig as rig
import moe_rig
import torch
from context_jobs import OwnMicro, SharedMicro
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from parallel_jobs import ShardedSGD
from same_bits import assert_same_bits
from streams import seed_streams
from torch import Tensor, distributed, nn

import megagraph
from megagraph.decide.in_flight import StageSchedule
from megagraph.demo.trainer import ModelOptions, gpt_model, in_half_precision, transformer_config
from megagraph.megatron.parallel.pipeline import schedule_of
from megagraph.megatron.specs import get_gpt_block_varlen_spec

FULL = rig.CAPACITY.tokens
# Some fill their capacity, most do not, and one kind fits none.
SHAPES: list[tuple[int, ...]] = [
    (9, 20),
    (FULL,),
    (3, 30, 8),
    (24, FULL - 24),
    (12,),
    (5, 5, 5),
    (10, FULL - 14, 4),
]
MISFIT = (5,) * (rig.CAPACITY.num_seqs + 1)
MOST_MICRO_BATCHES = 12
LEARNING_RATE = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """How a model is cut into stages and chunks.

    Args:
        stages: ranks of the pipeline.
        chunks: of each stage.
        group_size: of interleaved schedules; None for Megatron's own default.
        tensor_parallel: ranks that share each layer.
        context_parallel: ranks that share every pack.
        cp_sizes: ranks that share packs which say so, in turns; none where none says it.
    """

    stages: int = 2
    chunks: int = 1
    group_size: int | None = None
    tensor_parallel: int = 1
    context_parallel: int = 1
    cp_sizes: tuple[int, ...] = ()

    def start(self) -> None:
        """Makes Megatron's groups."""
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tensor_parallel,
            context_parallel_size=self.context_parallel,
            pipeline_model_parallel_size=self.stages,
            virtual_pipeline_model_parallel_size=self.chunks if self.chunks > 1 else None,
        )

    def config(self) -> dict[str, Any]:
        """Fields of Megatron's config. Packs differ in their rows, which stages tell each other."""
        fields: dict[str, Any] = {
            "tensor_model_parallel_size": self.tensor_parallel,
            "context_parallel_size": self.context_parallel,
            "calculate_per_token_loss": bool(self.cp_sizes),
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

    Args:
        cut: how the model is cut.
        options: of the whole model.
        transformer: further fields of Megatron's config.
        ddp: further fields of its DDP config.
        shared_embeddings: the output layer has the embedding's weight.
        aligned: chunks reduce gradients, and gather parameters, when the schedule says so on all stages.
    """

    def __init__(
        self,
        cut: Cut,
        options: ModelOptions,
        transformer: dict[str, Any],
        ddp: dict[str, Any],
        *,
        shared_embeddings: bool = False,
        aligned: bool = False,
    ) -> None:
        torch.manual_seed(options.seed)
        seed_streams()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config = transformer_config(options, **{**cut.config(), **transformer})
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp)
        make = partial(_chunk, options, self.config, cut, shared_embeddings)
        self.models = [make(chunk).to(self.device) for chunk in range(cut.chunks)]
        self.chunks = [
            DistributedDataParallel(
                config=self.config, ddp_config=ddp_config, module=in_half_precision(model)
            )
            for model in self.models
        ]
        self.config.finalize_model_grads_func = finalize_model_grads
        no_sync = [chunk.no_sync for chunk in self.chunks]
        self.config.no_sync_func = no_sync if cut.chunks > 1 else no_sync[0]
        if aligned:
            starts = [chunk.start_grad_sync for chunk in self.chunks]
            self.config.grad_sync_func = starts if cut.chunks > 1 else starts[0]
            if ddp_config.overlap_param_gather:
                starts = [chunk.start_param_sync for chunk in self.chunks]
                self.config.param_sync_func = starts if cut.chunks > 1 else starts[0]
        self._sharded = (
            [ShardedSGD(chunk) for chunk in self.chunks] if ddp_config.overlap_param_gather else []
        )

    def step(self, micros: Sequence[rig.Micro], *, eager: bool, forward_only: bool = False) -> rig.Step:
        """Runs Megatron's schedule, and updates the weights after a training step."""
        for chunk in self.chunks:
            chunk.train(not forward_only)
            chunk.zero_grad_buffer()
        several = len(self.chunks) > 1
        with contextlib.ExitStack() as stack:
            if eager:
                stack.enter_context(megagraph.disable_cuda_graphs_this_step())
            if forward_only:
                stack.enter_context(torch.no_grad())
            results = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=[iter(micros) for _ in self.chunks] if several else iter(micros),
                model=self.chunks if several else self.chunks[0],
                num_microbatches=len(micros),
                seq_length=FULL,
                micro_batch_size=1,
                forward_only=forward_only,
            )
        left = rig.Step(losses=[result["losses"] for result in results], grads=self._grads())
        for sharded in () if forward_only else self._sharded:
            sharded.step()
        if not forward_only and not self._sharded:
            with torch.no_grad():
                for model in self.models:
                    for param in model.parameters():
                        param.sub_(LEARNING_RATE * param.main_grad.to(param.dtype))
        return left

    def _grads(self) -> dict[str, Tensor]:
        found = [(f"chunk {index}", rig.grads(model)) for index, model in enumerate(self.models)]
        return {f"{chunk}.{name}": grad for chunk, grads in found for name, grad in grads.items()}

    def _forward_step(self, micros: Iterator[rig.Micro], chunk: Any) -> tuple[Tensor, Any]:
        return rig.forward(chunk, next(micros), self.device)


def _chunk(options: ModelOptions, config: Any, cut: Cut, shared_embeddings: bool, chunk: int) -> nn.Module:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    vp_stage = {"vp_stage": chunk} if cut.chunks > 1 else {}
    return gpt_model(
        options,
        config,
        get_gpt_block_varlen_spec(
            config, num_experts=config.num_moe_experts, moe_grouped_gemm=False, **vp_stage
        ),
        pre_process=stage == 0 and chunk == 0,
        post_process=stage == cut.stages - 1 and chunk == cut.chunks - 1,
        share_embeddings_and_output_weights=shared_embeddings,
        **vp_stage,
    )


def steps_of(schedule: StageSchedule, count: int, *, misfits: bool, even: bool) -> list[list[rig.Micro]]:
    """Steps of as many packs as the schedule takes, another number in each; the same on all ranks."""
    draw = random.Random(3)
    numbers = [number for number in range(1, MOST_MICRO_BATCHES + 1) if schedule.is_legal(number)]
    some = [shape for shape in SHAPES if sum(shape) % 2 == 0 or not even]
    steps = []
    for index in range(count):
        shapes = [draw.choice(some) for _ in range(draw.choice(numbers))]
        if misfits and index % 3 == 2:
            shapes[-1] = MISFIT
        steps.append(
            [rig.Micro(lengths=shape, seed=100 * index + place) for place, shape in enumerate(shapes)]
        )
    # One of them has as many as are ever in flight.
    steps[count // 2] = [
        rig.Micro(lengths=some[place % len(some)], seed=place) for place in range(max(numbers))
    ]
    return steps


def _shared(micro: rig.Micro, ranks: int) -> SharedMicro:
    """A pack of as many documents, of which each rank may have its share; full where this one is."""
    if sum(micro.lengths) == FULL:
        rows = FULL * ranks
        return SharedMicro(lengths=(rows - 1,), padded=(rows,), seed=micro.seed)
    documents = len(micro.lengths) if len(micro.lengths) <= rig.CAPACITY.num_seqs else 1
    unit = 2 * ranks
    padded = tuple(unit * (1 + (micro.seed + place) % 3) for place in range(documents))
    return SharedMicro(lengths=tuple(each - 1 for each in padded), padded=padded, seed=micro.seed)


def _in_turns(groups: Any, place: int, micro: rig.Micro) -> OwnMicro:
    """The same for another number of ranks in each micro-batch; one rank alone has a pack of its own."""
    size = groups.cp_sizes[(place + micro.seed) % len(groups.cp_sizes)]
    own = 1000 * distributed.get_rank(parallel_state.get_data_parallel_group()) if size == 1 else 0
    shared = _shared(dataclasses.replace(micro, seed=micro.seed + own), size)
    return OwnMicro(
        lengths=shared.lengths, padded=shared.padded, seed=shared.seed, group=groups.of_size(size)
    )


def _filled_up(micro: rig.Micro) -> rig.Micro:
    return dataclasses.replace(micro, tail=FULL - sum(micro.lengths))


@moe_rig.experts_on_cpu()
def train_pair(
    *,
    cut: Cut,
    num_steps: int = 6,
    evaluate_at: Collection[int] = (2, 4),
    layers: int = 1,
    misfits: bool = False,
    even: bool = False,
    shared_embeddings: bool = False,
    aligned: bool = False,
    transformer: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    plugin: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Trains eager and graphed and compares what every step and evaluation leaves on this rank.

    Args:
        cut: of the model.
        num_steps: to train.
        evaluate_at: the steps before which both evaluate, over another number of packs.
        layers: of each chunk.
        misfits: let some packs fit no capacity.
        even: take packs with even numbers of rows alone.
        shared_embeddings, aligned: as `PipelineTrainer` takes them.
        transformer: further fields of Megatron's config.
        ddp: further fields of its DDP config.
        plugin: further options of the plugin.

    Returns:
        The reports of the graphed chunks, with the most that each may have in flight as `schedule`, and the
        micro-batches of the first training step and of the first evaluation as `first`.
    """
    cut.start()
    moe_rig.forget_metrics()  # which are of as many layers as an earlier model had
    options = dataclasses.replace(rig.OPTIONS, layers=layers * cut.stages * cut.chunks, heads=4)
    if cut.cp_sizes:
        capacity = {"cuda_graph_max_packed_seqs": (rig.CAPACITY.num_seqs,), "max_seqlen_per_dp_cp_rank": FULL}
        plugin = {"cp_sizes": cut.cp_sizes, "capacities": (), **capacity, **(plugin or {})}
    megagraph.install(rig.graph_config(**(plugin or {})))
    make = partial(PipelineTrainer, cut, options, transformer or {}, ddp or {})
    pair = [make(shared_embeddings=shared_embeddings, aligned=aligned) for _ in range(2)]
    schedule = schedule_of(pair[0].models[0])
    steps = steps_of(schedule, num_steps, misfits=misfits, even=even)
    if cut.context_parallel > 1:
        steps = [[_shared(micro, cut.context_parallel) for micro in micros] for micros in steps]
    if cut.cp_sizes:
        groups = megagraph.context_groups(cut.cp_sizes)
        steps = [[_in_turns(groups, *each) for each in enumerate(micros)] for micros in steps]
    if not pair[0].config.variable_seq_lengths:
        steps = [[_filled_up(micro) for micro in micros] for micros in steps]
    for index, micros in enumerate(steps):
        if index in evaluate_at:
            some = steps[index - 1]
            one, other = (it.step(some, eager=it is pair[0], forward_only=True) for it in pair)
            assert_same_bits(one, other, f"evaluation {index}")
        one, other = (it.step(micros, eager=it is pair[0]) for it in pair)
        assert_same_bits(one, other, f"step {index}")
    reports = megagraph.reports()[cut.chunks :]
    for report, most in zip(reports, schedule.most_in_flight, strict=bool(reports)):
        assert report["calls"] == report["replays"] + sum(report["eager"].values())
        report["schedule"] = most
        report["first"] = len(steps[0]) + sum(len(steps[index - 1]) for index in sorted(evaluate_at)[:1])
    megagraph.uninstall()
    distributed.barrier()  # a stage that is done must not close what another still sends over
    return reports


def without_us(*, cut: Cut) -> None:
    """A step on full packs that no plugin touches, beside one in mode `eager`, of the same weights."""
    cut.start()
    options = dataclasses.replace(rig.OPTIONS, layers=cut.stages * cut.chunks, heads=4)
    micros = [rig.Micro(lengths=(20 + place, FULL - 20 - place), seed=place) for place in range(6)]
    plain = PipelineTrainer(cut, options, {}, {}).step(micros, eager=False)
    megagraph.install(rig.graph_config(mode="eager"))
    ours = PipelineTrainer(cut, options, {}, {}).step(micros, eager=False)
    torch.testing.assert_close([plain.losses, plain.grads], [ours.losses, ours.grads])
    distributed.barrier()


def speak(*, cut: Cut, report: str) -> list[str]:
    """Trains a few steps, and leaves a report. Returns what this rank says of its steps in the log."""

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    said: list[str] = []
    lines, logger = Lines(), logging.getLogger("megagraph")
    logger.addHandler(lines)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        train_pair(cut=cut, num_steps=2, evaluate_at=(), plugin={"log_interval": 2, "report": report})
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
    return [line for line in said if "replayed" in line]
