# SPDX-License-Identifier: Apache-2.0
"""Stages of pipelines: one alone in its process, and those of real ranks in Megatron's own schedule.

What a stage does depends on its order of forwards and backwards alone, since no graph holds what stages send
each other. So recorded activations and gradients stand for what would be received, and any stage of any
pipeline runs alone; nothing is sent, and nobody waits for another stage.
"""

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

import megagraph
from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import wall_ms
from benchmarks.subjects.hosts import check_replays, install_for, seed_streams
from benchmarks.subjects.packs import a_pack, filled
from benchmarks.subjects.steps import Batch, arguments_of, batch_of
from megagraph.cli.demo import quiet_megatron
from megagraph.decide.dispatch import StageSchedule
from megagraph.demo.documents import Document
from megagraph.demo.lengths import lognormal_lengths
from megagraph.demo.packs import Pack, stream_packs
from megagraph.demo.trainer import ModelOptions, gpt_model, in_half_precision, mean_loss, transformer_config
from megagraph.megatron.parallel.model_parallel import schedule_of
from megagraph.megatron.patch.installation import installed_plugin
from megagraph.megatron.specs import get_gpt_block_varlen_spec

# The spec of a chunk's layers, from Megatron's config; its keywords say which chunk of which stage it is.
BlockSpec = Callable[..., Any]
# Calls a chunk on a micro-batch, with its device. Returns what its last layer leaves, and what reduces it.
Forward = Callable[[Any, Any, torch.device], tuple[Tensor, Any]]
DOCUMENTS = 8  # of a pack, at most
MANY = 48  # micro-batches of a step whose memory is measured
LEARNING_RATE = 0.05
MOST_MICRO_BATCHES = 12
STEPS, SETTLED = 100, 10  # the first ones warm up, capture, and fill the allocator's cache
ALONE = 5  # graphed steps at the end, whose slots the report shows without the eager ones between


class Pass(NamedTuple):
    is_forward: bool  # or else a backward of the micro-batch through one model chunk of the stage
    chunk: int
    micro_batch: int


# Called before each pass, with its place in the order; it may raise.
Before = Callable[[int, Pass], None]


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
    generator = torch.Generator().manual_seed(seed)
    documents = (
        Document(name=str(index), tokens=torch.randint(256, (length,), generator=generator))
        for index, length in enumerate(lengths.tolist())
    )
    packs = itertools.islice(stream_packs(documents, tokens, DOCUMENTS - 1), count)
    return [filled(pack, tokens) if place % 3 == 0 else pack for place, pack in enumerate(packs)]


def chunks_of(
    options: ModelOptions,
    config: Any,
    spec: BlockSpec,
    place: StageSchedule,
    *,
    ddp: dict[str, Any] | None = None,
    **further: Any,
) -> tuple[list[nn.Module], list[Any]]:
    """The chunks of a stage, and their DDPs. `further` goes to each GPTModel."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    torch.manual_seed(options.seed)
    seed_streams()
    models = []
    for index in range(place.chunks):
        vp_stage = {"vp_stage": index} if place.chunks > 1 else {}
        model = gpt_model(
            options,
            config,
            spec(config, pp_rank=place.stage, **vp_stage),
            pre_process=place.stage == 0 and index == 0,
            post_process=place.stage == place.stages - 1 and index == place.chunks - 1,
            **vp_stage,
            **further,
        )
        models.append(model.cuda() if torch.cuda.is_available() else model)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **(ddp or {}))
    modules = map(in_half_precision, models)
    made = partial(DistributedDataParallel, config=config, ddp_config=ddp_config)
    return models, [made(module=module) for module in modules]


class StageStep(NamedTuple):
    """What a step of a stage left."""

    outputs: dict[tuple[int, int], Tensor]  # of each chunk and micro-batch
    gradients: dict[tuple[int, int], Tensor]  # of what each chunk and micro-batch was given
    main_grads: dict[str, Tensor]  # of every parameter, by chunk and name


class StageTrainer:
    """The chunks of one stage.

    With `deallocates` outputs are emptied once they would have been sent (`deallocate_pipeline_outputs`).
    """

    def __init__(self, options: ModelOptions, schedule: StageSchedule, *, deallocates: bool = False) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        self.options, self.schedule, self._deallocates = options, schedule, deallocates
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        virtual: dict[str, Any] = {}
        if schedule.chunks > 1:
            virtual["virtual_pipeline_model_parallel_size"] = schedule.chunks
            virtual["microbatch_group_size_per_vp_stage"] = schedule.group_size or schedule.stages
        config = transformer_config(options, pipeline_model_parallel_size=schedule.stages, **virtual)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        # Stands for the process group of a pipeline, for what a model asks of it.
        groups.pp = SimpleNamespace(size=lambda: schedule.stages, rank=lambda: schedule.stage)
        spec = get_gpt_block_varlen_spec
        self.models, self.chunks = chunks_of(options, config, spec, schedule, pg_collection=groups)

    def step(
        self,
        batches: Sequence[Batch],
        *,
        forward_only: bool = False,
        keeps: bool = True,
        before: Before = lambda index, it: None,
    ) -> StageStep:
        """Runs a step in the stage's order, as the schedule that the plugin wraps.

        `batches` lie on the device: `tokens`, `labels`, `positions` [1, rows], `offsets` (int32) and
        `longest`. Unless it `keeps` copies to compare, nothing is returned, which takes no memory.
        """
        for chunk in self.chunks:
            chunk.train(not forward_only)
            chunk.zero_grad_buffer()
        plugin = installed_plugin()
        schedule = self._run if plugin is None else plugin.schedule(self._run)
        how: dict[str, Any] = {"batches": batches, "forward_only": forward_only}
        with torch.set_grad_enabled(not forward_only):
            left: StageStep = schedule(model=self.chunks, **how, keeps=keeps, before=before)
        return left

    def _run(
        self, *, model: Any, batches: Sequence[Batch], forward_only: bool, keeps: bool, before: Before
    ) -> StageStep:
        from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor

        left = StageStep({}, {}, {})
        pending: dict[tuple[int, int], tuple[Tensor | None, Tensor, torch.Size]] = {}
        passes = self.schedule.passes(len(batches), forward_only=forward_only)
        for index, it in enumerate(map(Pass._make, passes)):
            before(index, it)
            place = it.chunk, it.micro_batch
            is_emptied = self._deallocates and not self.models[it.chunk].post_process
            if it.is_forward:
                given, out = self._forward(model[it.chunk], it, batches[it.micro_batch])
                if keeps:
                    left.outputs[place] = out.detach().clone()
                if not forward_only:
                    pending[place] = given, out, out.shape
                    deallocate_output_tensor(out, is_emptied)
                continue
            given, out, shape = pending.pop(place)
            gradient = self._recorded(it, shape, out.dtype)
            if is_emptied:
                custom_backward(out, gradient)
            else:
                torch.autograd.backward(out, gradient)
            if keeps and given is not None:
                assert given.grad is not None
                left.gradients[place] = given.grad
        for chunk, module in enumerate(self.models if keeps else ()):
            parameters: Any = module.named_parameters()
            left.main_grads.update({f"chunk {chunk}.{name}": it.main_grad.clone() for name, it in parameters})
        return left

    def _forward(self, chunk: Any, it: Pass, batch: Batch) -> tuple[Tensor | None, Tensor]:
        """What the chunk was given, None for tokens, and what comes out."""
        model: Any = self.models[it.chunk]
        rows, given = batch["tokens"].numel(), None
        if not model.pre_process:
            given = self._recorded(it, (rows, 1, self.options.hidden), next(model.parameters()).dtype)
            model.set_input_tensor(given.requires_grad_())  # as what Megatron receives, in no_grad too
        out: Tensor = chunk(**(arguments_of(batch) | ({} if model.post_process else {"labels": None})))
        return given, out

    def _recorded(self, it: Pass, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What another stage would have sent for this pass: the same at every call."""
        seed = 1000 * it.micro_batch + 10 * it.chunk + it.is_forward
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=dtype)


def measure_memory(model: ModelOptions, schedule: StageSchedule, how: str) -> Answer:
    """Of steps of full packs, eager or graphed: the most that torch `reserved`, and `slots` of all chunks."""
    graphs = how == "graphed"
    install_for(model.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1, mode="graph" if graphs else "eager")
    trainer = StageTrainer(model, schedule)
    batch = batch_of(a_pack(model.max_tokens), trainer.device)
    for _ in range(3):
        trainer.step([batch] * MANY, keeps=False)
    torch.cuda.synchronize()
    reports = megagraph.reports() if graphs else []
    for report in reports:
        check_replays(report)
    return {"reserved": torch.cuda.max_memory_reserved(), "slots": sum(report["slots"] for report in reports)}


# -- stages of real ranks ---------------------------------------------------------------------------


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
        return f"PP={self.stages}" + (f", {self.chunks} chunks a stage" if self.chunks > 1 else "")

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
                stack.enter_context(megagraph.disable_cuda_graphs_this_step())
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
        entry = chunk.build_schedule_plan if return_schedule_plan else chunk
        return self._forward(entry, next(micros), self.device)


def _forward(chunk: Any, batch: Batch, _device: torch.device) -> tuple[Tensor, Any]:
    return chunk(**arguments_of(batch)), partial(mean_loss, mask=batch["mask"])


def train(model: ModelOptions, cut: Cut, layers: str) -> Answer:
    """Trains eager and graphed on the same packs, another number in each step; this rank's part.

    Leaves the report that `MEGAGRAPH_REPORT` names. Answers `graphed` and `eager`, walls in ms of the settled
    steps; how many values of losses and gradients were `differing` in all steps, of which NaN is never equal.
    """
    quiet_megatron()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    cut.start()
    path = os.environ.get("MEGAGRAPH_REPORT")
    target = None if path is None else Path(path)
    install_for(model.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1, report=target)
    trainers = {it: PipelineTrainer(cut, model, _forward, spec=LAYERS[layers]) for it in ("eager", "graphed")}
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
    settled = {how: times[SETTLED:] for how, times in walls.items()}
    for _ in range(ALONE):
        step("graphed", batches)
    for report in megagraph.reports()[cut.chunks :]:
        check_replays(report)
    megagraph.uninstall()
    distributed.barrier()  # a stage that is done must not close what another still sends over
    return {**settled, "differing": differing}
