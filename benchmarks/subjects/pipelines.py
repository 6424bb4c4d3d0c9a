# SPDX-License-Identifier: Apache-2.0
"""Stages of pipelines in Megatron's own schedule: those of real ranks, and one alone in its process.

What a stage does depends on its order of forwards and backwards alone, since no graph holds what stages send
each other. So random activations and gradients stand for what would be received, the same in each step, and
any stage of any pipeline runs alone; nothing is sent, and nobody waits for another stage.
"""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn

import megagraph
from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import wall_ms
from benchmarks.subjects.hosts import check_replays, install_for, seed_streams
from benchmarks.subjects.packs import a_pack, filled, lognormal_lengths, random_documents
from benchmarks.subjects.steps import Batch, arguments_of, batch_of
from megagraph._C import StageSchedule
from megagraph.demo.packs import Pack, stream_packs
from megagraph.demo.trainer import ModelOptions, gpt_model, in_half_precision, mean_loss, transformer_config
from megagraph.megatron.parallel.model_parallel import schedule_of
from megagraph.megatron.specs import get_gpt_block_varlen_spec

# The spec of a chunk's layers, from Megatron's config; its keywords say which chunk of which stage it is.
BlockSpec = Callable[..., Any]
DOCUMENTS = 8  # of a pack, at most
MANY = 48  # micro-batches of a step whose memory is measured
LEARNING_RATE = 0.05
MOST_MICRO_BATCHES = 12
STEPS, SETTLED = 100, 10  # the first ones warm up, capture, and fill the allocator's cache
ALONE = 5  # graphed steps at the end, whose slots the report shows without the eager ones between


def engines_block_spec(config: Any, **place: Any) -> Any:
    """A `BlockSpec` of Transformer Engine's modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, **place)


LAYERS: dict[str, BlockSpec] = {"core": get_gpt_block_varlen_spec, "Transformer Engine": engines_block_spec}


def drawn_packs(tokens: int, count: int, *, seed: int) -> list[Pack]:
    """Packs of lognormal documents, of other rows each; one in three is full. The same at every call."""
    lengths = lognormal_lengths(
        DOCUMENTS * count, mean=tokens // 4, sigma=1.0, minimum=2, maximum=tokens, seed=seed
    )
    documents = random_documents(lengths.tolist(), seed=seed)
    packs = itertools.islice(stream_packs(documents, tokens, DOCUMENTS - 1), count)
    return [filled(pack, tokens) if place % 3 == 0 else pack for place, pack in enumerate(packs)]


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
    def _sizes(self) -> dict[str, int | None]:
        """As Megatron's groups and its config call them."""
        return {
            "tensor_model_parallel_size": self.tensor_parallel,
            "context_parallel_size": self.context_parallel,
            "expert_model_parallel_size": self.expert_parallel,
            "pipeline_model_parallel_size": self.stages,
            "virtual_pipeline_model_parallel_size": self.chunks if self.chunks > 1 else None,
        }

    def start(self) -> None:
        """Makes Megatron's groups."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**self._sizes)

    def config(self) -> dict[str, Any]:
        """Fields of Megatron's config. Packs differ in their rows, which stages tell each other."""
        fields: dict[str, Any] = {**self._sizes, "variable_seq_lengths": True, "batch_p2p_sync": False}
        fields["moe_token_dispatcher_type"] = "alltoall"  # asked for beside variable lengths
        if self.chunks > 1:
            # Without overlap two stages of several chunks mistake each other's messages.
            fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
            fields |= {"microbatch_group_size_per_vp_stage": self.group_size or self.stages}
        return fields


class PipelineTrainer:
    """The chunks of one stage, and steps of plain gradient descent.

    With `aligned` chunks reduce gradients, and gather parameters, when the schedule says so on all stages.
    """

    def __init__(
        self,
        cut: Cut,
        options: ModelOptions,
        *,
        transformer: dict[str, Any] | None = None,
        ddp: dict[str, Any] | None = None,
        spec: BlockSpec = get_gpt_block_varlen_spec,
        shared_embeddings: bool = False,
        aligned: bool = False,
    ) -> None:
        from megatron.core import distributed as core

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.options = options
        self.config = transformer_config(options, **{**cut.config(), **(transformer or {})})
        torch.manual_seed(options.seed)
        seed_streams()
        shared = {"share_embeddings_and_output_weights": shared_embeddings}
        self.models = [self._model(cut, index, spec, **shared) for index in range(cut.chunks)]
        ddp_config = core.DistributedDataParallelConfig(grad_reduce_in_fp32=True, **(ddp or {}))
        made = partial(core.DistributedDataParallel, config=self.config, ddp_config=ddp_config)
        self.chunks: list[Any] = [made(module=in_half_precision(model)) for model in self.models]
        self.config.finalize_model_grads_func = core.finalize_model_grads
        self.config.no_sync_func = _each_or_the_one([it.no_sync for it in self.chunks])
        if aligned:
            self.config.grad_sync_func = _each_or_the_one([it.start_grad_sync for it in self.chunks])
            if self.chunks[0].ddp_config.overlap_param_gather:
                self.config.param_sync_func = _each_or_the_one([it.start_param_sync for it in self.chunks])

    def _model(self, cut: Cut, index: int, spec: BlockSpec, **further: Any) -> nn.Module:
        from megatron.core import parallel_state

        stage = parallel_state.get_pipeline_model_parallel_rank()
        vp_stage = {"vp_stage": index} if cut.chunks > 1 else {}
        model = gpt_model(
            self.options,
            self.config,
            spec(self.config, pp_rank=stage, **vp_stage),
            pre_process=stage == 0 and index == 0,
            post_process=stage == cut.stages - 1 and index == cut.chunks - 1,
            **vp_stage,
            **further,
        )
        return model.to(self.device)

    def step(self, micros: Sequence[Any], *, eager: bool, forward_only: bool = False) -> list[dict[str, Any]]:
        """Runs Megatron's schedule. Returns what `forward` reduced, on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.train(not forward_only)
            chunk.zero_grad_buffer()
        graphs = megagraph.disable_cuda_graphs_this_step() if eager else contextlib.nullcontext()
        with graphs, torch.set_grad_enabled(not forward_only):
            results: list[dict[str, Any]] = get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=_each_or_the_one([iter(micros) for _ in self.chunks]),
                model=_each_or_the_one(self.chunks),
                num_microbatches=len(micros),
                seq_length=self.options.max_tokens,
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return results

    def update(self) -> None:
        with torch.no_grad():
            for _name, param in self.named_parameters():
                param.sub_(LEARNING_RATE * param.main_grad.to(param.dtype))

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Of all chunks, by chunk and name."""
        for index, model in enumerate(self.models):
            for name, param in model.named_parameters():
                yield f"chunk {index}.{name}", param

    def _forward_step(
        self, micros: Iterator[Any], chunk: Any, return_schedule_plan: bool = False
    ) -> tuple[Tensor, Any]:
        return self.forward(chunk.build_schedule_plan if return_schedule_plan else chunk, next(micros))

    def forward(self, run: Callable[..., Any], batch: Any) -> tuple[Tensor, Any]:
        """Runs a micro-batch. Returns what the last layer leaves, and what reduces it."""
        return run(**arguments_of(batch)), partial(mean_loss, mask=batch["mask"])


def _each_or_the_one(of_chunks: list[Any]) -> Any:
    """As Megatron takes what there is one of for each chunk."""
    return of_chunks if len(of_chunks) > 1 else of_chunks[0]


def train(model: ModelOptions, cut: Cut, layers: str, report: Path) -> Answer:
    """Trains eager and graphed on the same packs, another number in each step; this rank's part.

    Leaves the plugin's `report`. Answers `graphed` and `eager`, walls in ms of the settled steps on the
    slowest rank; how many values of losses and gradients were `differing` in all steps on any, of which NaN
    is never equal.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    cut.start()
    install_for(model.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1, report=report)
    trainers = {it: PipelineTrainer(cut, model, spec=LAYERS[layers]) for it in ("eager", "graphed")}
    walls: dict[str, list[float]] = {how: [] for how in trainers}

    def step(how: str, batches: Sequence[Batch]) -> list[Tensor]:
        """One that all ranks begin at once. Returns losses and gradients."""
        trainer, results = trainers[how], list[dict[str, Any]]()
        distributed.all_reduce(torch.zeros(1, device=trainer.device))
        wall = wall_ms(lambda: results.extend(trainer.step(batches, eager=how == "eager")))
        walls[how].append(wall)
        gradients = [param.main_grad for _name, param in trainer.named_parameters()]
        return [*(result["loss"] for result in results), *gradients]

    schedule = schedule_of(trainers["eager"].models[0])
    numbers = [number for number in range(1, MOST_MICRO_BATCHES + 1) if schedule.is_legal(number)]
    draw, differing = random.Random(5), 0
    for index in range(STEPS):
        count = max(numbers) if index < SETTLED // 2 else draw.choice(numbers)
        packs = drawn_packs(model.max_tokens, count, seed=index)
        batches = [batch_of(pack, trainers["eager"].device) for pack in packs]
        pairs = zip(step("eager", batches), step("graphed", batches), strict=True)
        differing += sum(int((one != other).sum()) for one, other in pairs)
        for trainer in trainers.values():
            trainer.update()
    device = trainers["eager"].device
    settled = torch.tensor([times[SETTLED:] for times in walls.values()], dtype=torch.float64, device=device)
    for _ in range(ALONE):
        step("graphed", batches)
    for of_chunk in megagraph.reports()[cut.chunks :]:
        check_replays(of_chunk)
    megagraph.uninstall()
    total = torch.tensor(differing, device=device)
    distributed.all_reduce(settled, op=distributed.ReduceOp.MAX)
    distributed.all_reduce(total)
    distributed.barrier()  # a stage that is done must not close what another still sends over
    return {**dict(zip(walls, settled.tolist(), strict=True)), "differing": int(total)}


# -- a stage alone ----------------------------------------------------------------------------------


class Others:
    """The other stages of one that is alone: what they send it is the same in each step."""

    def __init__(self) -> None:
        self.at_message: Callable[[int], None] = lambda number: None  # called before each one; may raise

    def begin(
        self, schedule: StageSchedule, rows: Sequence[int], *, forward_only: bool = False, keeps: bool = True
    ) -> None:
        """Before a step of micro-batches of so many rows; unless it `keeps` what is sent, that is dropped."""
        self._keeps, self._numbers, self._seeds = keeps, itertools.count(), itertools.count()
        self.taken: list[Tensor] = []  # by them, copied
        self._given: list[Tensor] = []  # alive, since another stream may read what was made on this one
        passes = schedule.passes(len(rows), forward_only=forward_only)

        def received(is_forward: bool, *end: int) -> Iterator[int]:
            """Of all passes but those of a chunk at an end of the model."""
            its = (it for it in passes if it[0] == is_forward and (schedule.stage, it[1]) != end)
            return iter([rows[micro_batch] for _is_forward, _chunk, micro_batch in its])

        ends = {"recv_prev": (True, 0, 0), "recv_next": (False, schedule.stages - 1, schedule.chunks - 1)}
        self._rows = {name: received(*end) for name, end in ends.items()}

    def take(self, *sent: Tensor | None) -> None:
        self.at_message(next(self._numbers))
        self.taken += [it.detach().clone() for it in sent if it is not None and self._keeps]

    def give(self, name: str, shape: Sequence[int], config: Any) -> Tensor:
        if config.variable_seq_lengths:
            shape = (next(self._rows[name]), 1, config.hidden_size)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        generator = torch.Generator(device).manual_seed(next(self._seeds))
        how: dict[str, Any] = {"device": device, "dtype": config.pipeline_dtype, "requires_grad": True}
        given = torch.randn(*shape, generator=generator, **how)
        if self._keeps:
            self._given.append(given)
        return given


@contextlib.contextmanager
def alone(cut: Cut, stage: int) -> Iterator[Others]:
    """Inside, Megatron's schedule runs a stage without the other ones, on the groups that one stage has."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    others, several = Others(), cut.chunks if cut.chunks > 1 else None

    class Communicator(schedules.P2PCommunicator):  # type: ignore[misc]  # megatron-core has no types
        def __init__(self, pp_group: Any, config: Any) -> None:
            self.pp_group, self.config = pp_group, config
            self.virtual_pipeline_model_parallel_size = several

        def _communicate(self, *, tensor_shape: Any, **of: Any) -> Any:
            others.take(of["tensor_send_next"], of["tensor_send_prev"])
            asked = [name for name in ("recv_prev", "recv_next") if of[name]]
            given = {name: others.give(name, tensor_shape, self.config) for name in asked}
            is_there = torch.cuda.Event()  # also a handle of what comes
            is_there.record()
            return given.get("recv_prev"), given.get("recv_next"), dict.fromkeys(given, is_there)

    state: dict[str, Any] = {
        "_PIPELINE_MODEL_PARALLEL_GROUP": SimpleNamespace(size=lambda: cut.stages, rank=lambda: stage),
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK": stage,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": several,
    }
    with (
        mock.patch.multiple(parallel_state, **state),
        mock.patch.object(schedules, "P2PCommunicator", Communicator),
    ):
        yield others


def measure_memory(model: ModelOptions, cut: Cut, how: str) -> Answer:
    """Of stage 0, which has the most in flight, in steps of full packs, eager or graphed.

    Answers the most that torch `reserved`, and `slots` of all chunks.
    """
    graphs = how == "graphed"
    install_for(model.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1, mode="graph" if graphs else "eager")
    with alone(cut, 0) as others:
        trainer = PipelineTrainer(cut, model)
        batch = batch_of(a_pack(model.max_tokens), trainer.device)
        for _ in range(3):
            others.begin(schedule_of(trainer.models[0]), [model.max_tokens] * MANY, keeps=False)
            trainer.step([batch] * MANY, eager=False)
    torch.cuda.synchronize()
    reports = megagraph.reports() if graphs else []
    for report in reports:
        check_replays(report)
    return {"reserved": torch.cuda.max_memory_reserved(), "slots": sum(report["slots"] for report in reports)}
