# SPDX-License-Identifier: Apache-2.0
"""One stage of a pipeline in one process: its forwards and backwards in Megatron's order, without the others.

What a stage does depends on that order alone, since no graph holds what stages send each other. So recorded
activations and gradients stand for what would be received, and any stage of any pipeline runs here. It stands
for pipelines that no machine here holds; nothing is sent, and nobody waits for another stage.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import host_seconds, phases_us
from benchmarks.subjects.hosts import check_replays, install_for, seed_streams
from benchmarks.subjects.packs import a_pack, filled
from benchmarks.subjects.steps import Batch, batch_of, rows_of, without_collection
from megagraph import megatron
from megagraph.decide.dispatch import StageSchedule
from megagraph.demo.documents import Document
from megagraph.demo.lengths import lognormal_lengths
from megagraph.demo.packs import Pack, stream_packs
from megagraph.demo.trainer import (
    ModelOptions,
    gpt_model,
    in_half_precision,
    packed_seq_params,
    transformer_config,
)
from megagraph.megatron.patch.installation import installed_plugin
from megagraph.megatron.specs import get_gpt_block_varlen_spec

# The spec of a chunk's layers, from Megatron's config; its keywords say which chunk of which stage it is.
BlockSpec = Callable[..., Any]
DOCUMENTS = 8  # of a pack, at most
WARM_UP, SAMPLES = 10, 150
MICRO_BATCHES = 8  # of a timed step: the launch queue has room for it
MANY = 48  # micro-batches of a step whose memory is measured
IN_THE_MIDDLE = StageSchedule(stages=18, stage=1)  # needs 17 slots, of which it gets as many as it is told


class Pass(NamedTuple):
    """A forward, or else a backward, of a micro-batch through one model chunk of a stage."""

    is_forward: bool
    chunk: int
    micro_batch: int


def transformer_engines_spec(config: Any, **place: Any) -> Any:
    """A `BlockSpec` of Transformer Engine's modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, **place)


LAYERS: dict[str, BlockSpec] = {
    "core": get_gpt_block_varlen_spec,
    "Transformer Engine": transformer_engines_spec,
}


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


def differing(ones: Iterable[Tensor], others: Iterable[Tensor]) -> int:
    """How many values are not the same; NaN is never."""
    return sum(int((one != other).sum()) for one, other in zip(ones, others, strict=True))


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


class PretendedStages:
    """Stands for the process group of a pipeline, for what a model asks of it."""

    def __init__(self, schedule: StageSchedule) -> None:
        self._schedule = schedule

    def size(self) -> int:
        """How many stages."""
        return self._schedule.stages

    def rank(self) -> int:
        """Which of them this process is."""
        return self._schedule.stage


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
        groups.pp = PretendedStages(schedule)
        spec = get_gpt_block_varlen_spec
        self.models, self.chunks = chunks_of(options, config, spec, schedule, pg_collection=groups)

    def step(
        self,
        batches: Sequence[Batch],
        *,
        forward_only: bool = False,
        keeps: bool = True,
        passes: Iterable[Pass] | None = None,
        before: Callable[[int, Pass], None] = lambda index, it: None,
    ) -> StageStep:
        """Runs a step in the stage's order, as the schedule that the plugin wraps.

        Args:
            batches: its micro-batches, on the device: `tokens`, `labels`, `positions` [1, rows], `offsets`
                (int32) and `longest`, the rows of the longest document.
            forward_only: as in an evaluation.
            keeps: returns copies of what there is to compare; else nothing, which takes no memory.
            passes: another order than the schedule's.
            before: called before each pass, with its place in the order; may raise.
        """
        for chunk in self.chunks:
            chunk.train(not forward_only)
            chunk.zero_grad_buffer()
        plugin = installed_plugin()
        schedule = self._run if plugin is None else plugin.schedule(self._run)
        if passes is None:
            passes = map(Pass._make, self.schedule.passes(len(batches), forward_only=forward_only))
        with torch.set_grad_enabled(not forward_only):
            left: StageStep = schedule(
                model=self.chunks,
                batches=batches,
                passes=passes,
                forward_only=forward_only,
                keeps=keeps,
                before=before,
            )
        return left

    def _run(
        self,
        *,
        model: Sequence[Any],
        batches: Sequence[Batch],
        passes: Iterable[Pass],
        forward_only: bool,
        keeps: bool,
        before: Callable[[int, Pass], None],
    ) -> StageStep:
        from megatron.core.pipeline_parallel.schedules import custom_backward, deallocate_output_tensor

        left = StageStep({}, {}, {})
        pending: dict[tuple[int, int], tuple[Tensor | None, Tensor, torch.Size]] = {}
        for index, it in enumerate(passes):
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
        out: Tensor = chunk(
            **(rows_of(batch) | ({} if model.post_process else {"labels": None})),
            packed_seq_params=packed_seq_params(batch["offsets"], batch["longest"]),
        )
        return given, out

    def _recorded(self, it: Pass, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What another stage would have sent for this pass: the same at every call."""
        seed = 1000 * it.micro_batch + 10 * it.chunk + it.is_forward
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=dtype)


# -- what is measured of a stage that runs without the others ---------------------------------------


def measure_slots(model: ModelOptions, numbers: Sequence[int]) -> Answer:
    """One micro-batch after another, in slots that they take in turns; all numbers of slots in turns, too.

    The stage is one in the middle of a pipeline, which has nothing eager but what the driver itself does.
    Answers by number of slots the host time of a micro-batch in us.
    """
    install_for(model.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1)
    steps = {str(slots): _step_in(slots, model) for slots in numbers}
    with without_collection():
        found = phases_us(
            lambda: {slots: host_seconds(step) for slots, step in steps.items()},
            **{"repeats": SAMPLES, "warm_up": WARM_UP, "divisor": MICRO_BATCHES},
        )
    for slots, report in zip(numbers, megatron.reports(), strict=True):
        check_replays(report)
        if report["slots"] != slots or report["most_in_flight"] != 1:
            raise RuntimeError(f"expected one micro-batch at a time in {slots} slots, got {report}")
    return dict(found)


def _step_in(slots: int, model: ModelOptions) -> Callable[[], object]:
    """A step of a model that has so many slots, which has captured."""
    plugin = installed_plugin()
    assert plugin is not None
    config = dataclasses.replace(plugin.config, cuda_graph_slots=slots)
    trainer = StageTrainer(model, IN_THE_MIDDLE)
    batches = [batch_of(a_pack(model.max_tokens), trainer.device)] * MICRO_BATCHES
    passes = [Pass(is_forward, 0, index) for index in range(MICRO_BATCHES) for is_forward in (True, False)]
    step = partial(trainer.step, batches, passes=passes, keeps=False)
    with mock.patch.object(plugin, "config", config):  # which is asked when a model is first seen
        step()
        step()
    return step


def measure_memory(model: ModelOptions, schedule: StageSchedule, *, graphs: bool) -> Answer:
    """Of steps of full packs: the most that torch `reserved`, and `slots` of all chunks."""
    install_for(model.max_tokens, DOCUMENTS, cuda_graph_warmup_steps=1, mode="graph" if graphs else "eager")
    trainer = StageTrainer(model, schedule)
    batch = batch_of(a_pack(model.max_tokens), trainer.device)
    for _ in range(3):
        trainer.step([batch] * MANY, keeps=False)
    torch.cuda.synchronize()
    reports = megatron.reports() if graphs else []
    for report in reports:
        check_replays(report)
    return {
        "reserved": torch.cuda.max_memory_reserved(),
        "slots": sum(report["slots"] for report in reports),
    }
