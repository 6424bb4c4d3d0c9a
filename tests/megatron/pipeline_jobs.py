# SPDX-License-Identifier: Apache-2.0
"""What the stages of a pipeline run: chunks trained eager and graphed over the same packs, and compared."""

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any
from unittest import mock

import megatron_rig as rig
import torch
from context_jobs import CAPACITY_OF_RANK, OwnMicro, SharedMicro
from megatron.core import parallel_state
from model_specs import asks_for_no_engine, spec_of
from overlap_rig import delay_linears
from parallel_jobs import MISFIT, hearing
from same_bits import assert_same_bits
from sharded_sgd import ShardedSGD
from streams import makes_groups, seed_streams
from torch import distributed

import megagraph
from benchmarks.subjects import pipelines
from benchmarks.subjects.pipelines import BlockSpec, Cut, Others, PipelineTrainer, alone, engines_block_spec
from megagraph._C import StageSchedule
from megagraph.demo.trainer import ModelOptions
from megagraph.megatron.parallel.model_parallel import schedule_of

FULL = rig.CAPACITY.tokens
# Some fill their capacity, most do not, and one kind fits none.
SHAPES = [(9, 20), (FULL,), (3, 30, 8), (24, FULL - 24), (12,), (5, 5, 5), (10, FULL - 14, 4)]


class Trainer(PipelineTrainer):
    def __init__(
        self,
        cut: Cut,
        options: ModelOptions,
        *,
        ddp: dict[str, Any],
        kind: str = "core",  # of layers
        others: Others | None = None,
        **further: Any,
    ) -> None:
        self.others, wrap = others, pipelines.in_half_precision

        def prepare(model: Any) -> Any:
            """Layers of core's that are late are made so before DDP sees them."""
            if kind == LATE:
                delay_linears(model, "unfused")
            return wrap(model)

        with asks_for_no_engine(), mock.patch.object(pipelines, "in_half_precision", prepare):
            super().__init__(cut, options, ddp=ddp, spec=LAYERS[kind], **further)
        sharded = ddp.get("overlap_param_gather", False)
        self._sharded = [ShardedSGD(chunk) for chunk in self.chunks] if sharded else []
        self.reduced: list[tuple[int, int]] = []  # buckets of chunks, in the order of their reductions
        self.at_reduction: Callable[[], None] = lambda: None  # called before each
        for index, chunk in enumerate(self.chunks):
            for number, bucket in enumerate(chunk.bucket_groups):
                bucket.start_grad_sync = self._noted((index, number), bucket.start_grad_sync)

    def _noted(self, which: tuple[int, int], start: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any, **kwargs: Any) -> None:
            self.reduced.append(which)
            self.at_reduction()
            start(*args, **kwargs)

        return noted

    def forward(self, run: Callable[..., Any], batch: rig.Micro) -> tuple[torch.Tensor, Any]:
        return rig.forward(run, batch, self.device)

    def train(self, micros: Sequence[rig.Micro], *, eager: bool, forward_only: bool = False) -> rig.Step:
        """Runs Megatron's schedule, and updates the weights after a training step."""
        if self.others is not None:
            rows = [micro.physical for micro in micros]
            self.others.begin(schedule_of(self.models[0]), rows, forward_only=forward_only)
        results = self.step(micros, eager=eager, forward_only=forward_only)
        torch.cuda.synchronize()  # the schedule hands on from another stream
        sent = [] if self.others is None else self.others.taken
        grads = {name: param.main_grad.clone() for name, param in self.named_parameters()}
        if not forward_only:
            self.update()
        return rig.Step(losses=[*(result["losses"] for result in results), *sent], grads=grads)

    def update(self) -> None:
        for sharded in self._sharded:
            sharded.step()
        if not self._sharded:
            super().update()


def _spec(config: Any, **place: Any) -> Any:
    return spec_of(config, moe_grouped_gemm=False, **place)


def _delaying(spec: BlockSpec) -> BlockSpec:
    """Which a config of core's layers refuses."""

    def delayed(config: Any, **place: Any) -> Any:
        config.delay_wgrad_compute = True
        return spec(config, **place)

    return delayed


LATE, OF_ENGINE = "late gradients", "late gradients of Transformer Engine's"
LAYERS = {"core": _spec, LATE: _delaying(_spec), OF_ENGINE: _delaying(engines_block_spec)}


def steps_of(schedule: StageSchedule, count: int, *, misfits: bool, even: bool, most: int) -> list[list[Any]]:
    """Steps of the least, the most and another legal number of packs, others on ranks that share experts."""
    own = parallel_state.get_expert_model_parallel_rank()
    numbers = [number for number in range(1, most + 1) if schedule.is_legal(number)]
    some = [shape for shape in SHAPES if sum(shape) % 2 == 0 or not even]
    in_turns = (numbers[0], numbers[-1], numbers[len(numbers) // 2])
    steps = []
    for index in range(count):
        number = in_turns[index % 3]
        shapes = [some[(index + place + 2 * own) % len(some)] for place in range(number)]
        if misfits and index % 2 and own == parallel_state.get_expert_model_parallel_world_size() - 1:
            shapes[-1] = MISFIT
        first = 100 * index + 1000 * own  # seed
        steps.append([rig.Micro(lengths=it, seed=first + place) for place, it in enumerate(shapes)])
    return steps


def _shared(micro: rig.Micro, ranks: int) -> SharedMicro:
    """A pack of as many documents, of which each rank may have its share; full where this one is."""
    if sum(micro.lengths) == FULL:
        rows = FULL * ranks
        return SharedMicro(lengths=(rows - 1,), padded=(rows,), seed=micro.seed)
    documents = len(micro.lengths) if len(micro.lengths) <= rig.CAPACITY.num_seqs else 1
    padded = tuple(2 * ranks * (1 + (micro.seed + place) % 3) for place in range(documents))
    return SharedMicro(lengths=tuple(each - 1 for each in padded), padded=padded, seed=micro.seed)


def _in_turns(groups: Any, place: int, micro: rig.Micro) -> OwnMicro:
    """The same for another number of ranks in each micro-batch; one rank alone has a pack of its own."""
    size = groups.cp_sizes[(place + micro.seed // 100) % len(groups.cp_sizes)]
    own = 1000 * distributed.get_rank(parallel_state.get_data_parallel_group()) if size == 1 else 0
    shared = _shared(dataclasses.replace(micro, seed=micro.seed + own), size)
    return OwnMicro(**vars(shared), group=groups.of_size(size))


class Pair:
    """The same chunks twice: one set runs eager, the other with graphs of the plugin that is there."""

    def __init__(self, cut: Cut, options: ModelOptions, **given: Any) -> None:
        self.both = self.eager, self.graphed = [Trainer(cut, options, **given) for _ in range(2)]
        self.schedule = schedule_of(self.eager.models[0])

    def step(self, micros: Sequence[rig.Micro], *, forward_only: bool = False) -> rig.Step:
        """A step of both, which must leave the same bits, also in what other stages are sent."""
        one, other = (it.train(micros, eager=it is self.eager, forward_only=forward_only) for it in self.both)
        assert_same_bits(one, other)
        return one

    def reports(self) -> list[dict[str, Any]]:
        """Of the graphed chunks that have layers, with what the schedule needs. Nobody holds their slots."""
        reports = []
        graphed = rig.the_plugin().all_graphs()[len(self.eager.chunks) :]
        for graphs, most in zip(graphed, self.schedule.most_in_flight, strict=bool(graphed)):
            assert graphs.captures.bank.holders() == ""
            reports.append(graphs.report() | {"schedule": most})
        return reports


@makes_groups
def train_pair(
    *,
    cut: Cut,  # of the model
    cp_sizes: tuple[int, ...] = (),  # ranks that share packs which say so, in turns; none where none says it
    num_steps: int = 2,  # to train
    evaluate_at: Collection[int] = (1, 2),  # the steps, from 1 on, whose packs are evaluated behind them
    layers: int = 1,  # of each chunk
    kind: str = "core",  # of layers
    others: Others | None = None,  # stages that are not there
    most: int = 4,  # in a step
    misfits: bool = False,  # let some packs fit no capacity, of ranks that share experts on the last one
    masks: bool = False,  # of all packs
    even: bool = False,  # take packs with even numbers of rows alone
    shared_embeddings: bool = False,
    aligned: bool = False,
    transformer: dict[str, Any] | None = None,  # further fields of Megatron's config
    ddp: dict[str, Any] | None = None,  # further fields of its DDP config
    plugin: dict[str, Any] | None = None,  # further options of the plugin
) -> list[dict[str, Any]]:
    """Trains eager and graphed: all is of the same bits, and buckets are reduced in the same order."""
    if others is None:
        cut.start()
    seed_streams()
    rig.forget_metrics()  # which are of as many layers as an earlier model had
    options = dataclasses.replace(rig.OPTIONS, layers=layers * cut.stages * cut.chunks, heads=4)
    if (transformer or {}).get("overlap_moe_expert_parallel_comm"):  # which demands half precision
        options = dataclasses.replace(options, bf16=True)
    if cp_sizes:
        plugin = {"cp_sizes": cp_sizes, **CAPACITY_OF_RANK, **(plugin or {})}
        transformer = {"calculate_per_token_loss": True, **(transformer or {})}
    megagraph.install(rig.graph_config(**(plugin or {})))
    how = {"ddp": ddp or {}, "transformer": transformer, "kind": kind, "others": others}
    pair = Pair(cut, options, shared_embeddings=shared_embeddings, aligned=aligned, **how)
    steps = steps_of(pair.schedule, num_steps, misfits=misfits, even=even, most=most)
    if masks:
        steps = [[dataclasses.replace(it, mask_seed=it.seed) for it in each] for each in steps]
    if cut.context_parallel > 1:
        steps = [[_shared(micro, cut.context_parallel) for micro in micros] for micros in steps]
    if cp_sizes:
        groups = megagraph.context_groups(cp_sizes)
        steps = [[_in_turns(groups, *each) for each in enumerate(micros)] for micros in steps]
    if not pair.eager.config.variable_seq_lengths:
        steps = [[dataclasses.replace(it, tail=FULL - sum(it.lengths)) for it in micros] for micros in steps]
    for number, micros in enumerate(steps, 1):
        left = pair.step(micros)
        assert all(grad.any() for name, grad in left.grads.items() if "linear_proj" in name)
        assert pair.eager.reduced == pair.graphed.reduced and set(pair.eager.reduced)
        if number in evaluate_at:
            pair.step(micros, forward_only=True)
    reports = pair.reports()
    for report in reports:
        report["first"] = len(steps[0]) + sum(len(steps[number - 1]) for number in sorted(evaluate_at)[:1])
    megagraph.uninstall()
    distributed.barrier()  # a stage that is done must not close what another still sends over
    return reports


@makes_groups
def train_alone(*, cut: Cut, stage: int, **options: Any) -> list[dict[str, Any]]:
    """As `train_pair()`: a stage of a longer pipeline, in Megatron's order."""
    dataclasses.replace(cut, stages=1, chunks=1).start()
    with alone(cut, stage) as others:
        return train_pair(cut=cut, others=others, **options)


@makes_groups
def speak(*, cut: Cut, report: str) -> list[str]:
    """Trains a few steps, and leaves a report. Returns what this rank says of its steps in the log."""
    plugin = {"log_interval": 2, "report": report}
    with hearing(logging.INFO) as said:
        train_pair(cut=cut, evaluate_at=(), plugin=plugin)
    return [line for line in said if "replayed" in line]
