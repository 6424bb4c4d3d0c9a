# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of one model: graphed, eager, unpatched, launched bare, and in Megatron's graphs.

A trainer's schedule is timed by itself: no data loading, no optimizer. Batches lie on the device, as a loader
that reads ahead leaves them. Weights are drawn there too. The optimizer never steps, so that the weights stay
and its state takes no memory.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import record_function

import megagraph
from benchmarks.measuring.children import Answer, caught
from benchmarks.measuring.clocks import STEP, Timeline, traced, wall_ms
from benchmarks.subjects.hosts import check_replays, engines_spec, install, on_side_stream, prepare_rival
from benchmarks.subjects.inside import bare_step, our_rope
from benchmarks.subjects.packs import MICRO_BATCHES, Case, filled, model_options
from megagraph._C import Capacity
from megagraph.demo.packs import Pack, next_token_labels, position_ids
from megagraph.demo.trainer import ModelOptions, Trainer, mean_loss, packed_seq_params
from megagraph.megatron.plugin import disable_cuda_graphs_this_step
from megagraph.megatron.specs import get_gpt_layer_varlen_spec

NUM_SEQS = 64  # as many documents as the shortest ones make in a pack: every pack fits
WARM_UP_STEPS, FURTHER_STEPS = 3, 3  # the first of the further ones captures
ROUNDS, LARGE_ROUNDS = 5, 2  # of each distinct step of a small model, of a large one
UNPATCHED_ROUNDS = 2  # before ours, and as many after it; of a large model half
RIVAL_WARM_UP_STEPS, RIVAL_ROUNDS = 6, 12
EXPERTS = 8

Batch = dict[str, Any]
Steps = Sequence[Sequence[Batch]]
Schedule = Callable[..., Any]
Wrap = Callable[[Schedule], Schedule] | None


def batch_of(pack: Pack, device: torch.device, capacity: Capacity | None = None) -> Batch:
    """A pack as the model takes it; padded to a capacity, so that every batch has the same shapes."""
    labels, mask = next_token_labels(pack)
    rows = {"tokens": pack.tokens, "positions": position_ids(pack), "labels": labels, "mask": mask}
    offsets, longest = pack.cu_seqlens, pack.max_seqlen
    if capacity is not None:
        missing = capacity.tokens - pack.num_tokens
        rows = {name: functional.pad(row, (0, missing)) for name, row in rows.items()}
        offsets = torch.cat([offsets, offsets[-1:].expand(capacity.num_seqs - pack.num_seqs)])
        longest = capacity.max_seqlen
    batch: Batch = {name: row.unsqueeze(0).to(device) for name, row in rows.items()}
    return {**batch, "offsets": offsets.to(device), "longest": longest}


class StepTrainer(Trainer):
    """A model that runs whole steps.

    With `beside` it is built on a side stream, as Megatron-LM does: its DDP then adds gradients to
    `main_grad` beside the backward pass. `wrap` is put around Megatron's schedule, once.
    """

    def __init__(
        self,
        options: ModelOptions,
        *,
        beside: bool = False,
        wrap: Wrap = None,
        spec: Any = None,
        ddp: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self._wrap = wrap
        self._wrapped: Schedule | None = None
        self._wall_ms = 0.0
        with on_side_stream() if beside else contextlib.nullcontext():
            config = {"use_cpu_initialization": False, **config}
            super().__init__(options, config=config, spec=spec, ddp=ddp)

    def make_optimizer(self) -> Any:
        return SimpleNamespace(zero_grad=lambda: None)  # there is nothing beside the DDP's buffer

    def schedule(self) -> Schedule:
        schedule = super().schedule()
        if self._wrap is not None:
            self._wrapped = schedule = self._wrapped or self._wrap(schedule)

        def timed(**arguments: Any) -> Any:
            results: list[Any] = []

            def step() -> None:
                with record_function(STEP):
                    results.append(schedule(**arguments))
                    torch.cuda.synchronize()

            self._wall_ms = wall_ms(step)
            return results[0]

        return timed

    def wall_ms(self, batches: Sequence[Any], *, graphs: bool) -> float:
        """Runs a step; the time from the start of the schedule until the device has done it all."""
        with contextlib.nullcontext() if graphs else disable_cuda_graphs_this_step():
            self.forward_backward(batches)  # hands each on as it is
        return self._wall_ms

    def walls_ms(self, steps: Steps, order: Sequence[int], *, graphs: bool = True) -> list[float]:
        """Runs some of the steps, one after another."""
        return [self.wall_ms(steps[index % len(steps)], graphs=graphs) for index in order]

    def traced(self, batches: Sequence[Any]) -> Timeline:
        """A profiled step."""
        return traced(lambda: self.wall_ms(batches, graphs=True))

    def _forward_step(
        self, packs: Iterator[Any], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Tensor, Any]:
        batch: Batch = next(packs)
        run = model.build_schedule_plan if return_schedule_plan else model
        return run(**arguments_of(batch)), partial(mean_loss, mask=batch["mask"])


def arguments_of(batch: Batch) -> dict[str, Any]:
    """What a model takes of a batch."""
    rows = {"input_ids": batch["tokens"], "position_ids": batch["positions"], "labels": batch["labels"]}
    params = packed_seq_params(batch["offsets"], batch["longest"])
    return {**rows, "attention_mask": None, "packed_seq_params": params}


def expert_layers(is_engine: bool) -> dict[str, Any]:
    """Of a trainer: dropless, as most are trained."""
    kind = {"num_experts": EXPERTS, "moe_grouped_gemm": is_engine}
    return {
        "spec": (engines_spec if is_engine else get_gpt_layer_varlen_spec)(**kind),
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 1024,
        "moe_grouped_gemm": is_engine,
        "add_bias_linear": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
    }


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Python's cyclic garbage waits meanwhile, for whatever is timed alike."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True, kw_only=True)
class StepCase(Case):
    """Packs whose whole training steps are timed."""

    rivals: tuple[str, ...] = ()  # Megatron's graphs beside it, as its config calls them

    @property
    def tokens(self) -> int:
        return self.model.max_tokens

    @property
    def is_small(self) -> bool:
        """Whether the floor is its bar, else eager."""
        return self.model.hidden <= 1024

    @property
    def distinct_steps(self) -> int:
        """Steps that differ. Of a small model each is traced."""
        return 3 if self.is_small else 4

    @property
    def capacity(self) -> Capacity:
        return Capacity(tokens=self.tokens, num_seqs=NUM_SEQS, max_seqlen=self.tokens)

    def packs(self) -> list[list[Pack]]:
        """The packs of each distinct step, the same for every way to run it, and full.

        A small model's step has one pack several times: graphs that are launched again, without staging,
        then do the work of the whole step.
        """
        steps = [[filled(pack, self.tokens) for pack in step] for step in self.steps(self.distinct_steps)]
        return [[step[0]] * MICRO_BATCHES for step in steps] if self.is_small else steps

    def batches(self, device: torch.device, *, canonical: bool = False) -> list[list[Batch]]:
        """`packs()` on the device; with `canonical` all of one shape."""
        capacity = self.capacity if canonical else None
        return [[batch_of(pack, device, capacity) for pack in step] for step in self.packs()]

    def rounds(self, count: int) -> list[int]:
        """Which of the distinct steps each of `count` rounds runs: each as often as the others."""
        if count % self.distinct_steps:
            raise ValueError(f"expected rounds that {self.distinct_steps} steps share evenly, got {count}")
        return [index % self.distinct_steps for index in range(count)]


def step_case(hidden: int, *, layers: int, tokens: int, rivals: Sequence[str] = ()) -> StepCase:
    """Lognormal documents that all fit; heads of 64, of 128 in large models."""
    model = model_options(hidden, layers=layers, tokens=tokens, head_dim=64 if hidden <= 1024 else 128)
    name, packs = f"hidden {hidden}, packs of {tokens}", {"mean_length": tokens // 8}
    return StepCase(name=name, model=model, max_packed_seqs=(NUM_SEQS,), **packs, rivals=tuple(rivals))


def _walls_in_turns(
    trainer: StepTrainer, steps: Steps, order: Sequence[int], ways: Sequence[str]
) -> dict[str, list[float]]:
    """Walls in ms of each round, by way: `graphed`, `eager`, or `bare`, as the graphed one has staged."""
    walls: dict[str, list[float]] = {way: [] for way in ways}
    launch = bare_step(trainer, MICRO_BATCHES) if "bare" in ways else None
    with without_collection():
        for index in order:
            for way, of_way in walls.items():
                if way == "bare" and launch is not None:
                    of_way.append(wall_ms(launch))
                else:
                    of_way.append(trainer.wall_ms(steps[index], graphs=way == "graphed"))
    return walls


def measure_ours(case: StepCase) -> Answer:
    """Graphed and eager steps in turn, unpatched ones before and after them, and what their floor is.

    Answers walls in ms of each round, `graphed`, `eager` and of a small model also `bare`, and which distinct
    step it ran, `order`; `outside_ms` of graphs by distinct step of a small model; `kernels_ms` of one traced
    step; `unpatched`, its own walls, order and kernels.
    """
    trainer, is_small = StepTrainer(case.model, beside=True), case.is_small
    steps = case.batches(trainer.device)
    before = caught(lambda: _unpatched(trainer, case, steps))
    install(capacities=(case.capacity,))
    trainer.walls_ms(steps, range(WARM_UP_STEPS + FURTHER_STEPS))
    trainer.wall_ms(steps[0], graphs=False)
    order = case.rounds((ROUNDS if is_small else LARGE_ROUNDS) * len(steps))
    ways = ("graphed", "bare", "eager") if is_small else ("graphed", "eager")
    walls = _walls_in_turns(trainer, steps, order, ways)
    traced = [trainer.traced(batches) for batches in (steps if is_small else steps[:1])]
    if not any(work.is_graphed for work in traced[0].work):
        raise RuntimeError("the trace of a graphed step has no graphs")
    check_replays(megagraph.reports()[-1], "DISABLED")
    megagraph.uninstall()
    after = caught(lambda: _unpatched(trainer, case, steps))
    unpatched = next((answer for answer in (before, after) if "error" in answer), None)
    return {
        **walls,
        "order": order,
        "outside_ms": [timeline.eager_ms() for timeline in traced] if is_small else [],
        "kernels_ms": traced[0].kernels_ms(),
        "unpatched": unpatched or {**after, **{of: before[of] + after[of] for of in ("walls", "order")}},
    }


def _unpatched(trainer: StepTrainer, case: StepCase, steps: Steps) -> Answer:
    """Eager steps with nothing installed but our RoPE; attention is ours by the model's spec."""
    rounds = UNPATCHED_ROUNDS if case.is_small else UNPATCHED_ROUNDS // 2
    with our_rope(), without_collection():
        trainer.walls_ms(steps, range(WARM_UP_STEPS))
        order = case.rounds(rounds * len(steps))
        walls = trainer.walls_ms(steps, order)
        return {"walls": walls, "order": order, "kernels_ms": trainer.traced(steps[0]).kernels_ms()}


def measure_steps(
    case: StepCase, *ways: str, rounds: int = 0, is_full: bool = True, trainer: dict[str, Any], **plugin: Any
) -> Answer:
    """Memory of a model that warms up and captures, then `rounds` steps in turns, `graphed` or `eager`.

    Unless they are full, packs are those of the case as they come.

    Answers walls in ms by way, the `report`, and the most that torch `reserved` before them.
    """
    install(**{"capacities": (case.capacity,), "cuda_graph_warmup_steps": WARM_UP_STEPS, **plugin})
    made, graphs = StepTrainer(case.model, **trainer), ways[0] == "graphed"
    packs = case.packs() if is_full else case.steps(WARM_UP_STEPS + FURTHER_STEPS)
    steps = [[batch_of(pack, made.device) for pack in step] for step in packs]
    made.walls_ms(steps, range(WARM_UP_STEPS + FURTHER_STEPS), graphs=graphs)
    reserved = torch.cuda.max_memory_reserved()
    walls = _walls_in_turns(made, steps, case.rounds(rounds), ways)
    report = megagraph.reports()[-1]
    if graphs and plugin.get("mode") != "eager":
        check_replays(report, "DISABLED")
    return {**walls, "reserved": reserved, "report": report}


def measure_rival(case: StepCase, impl: str) -> Answer:
    """Walls of steps in ms in Megatron's own graphs, on batches of one shape, with our RoPE in its layers."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    prepare_rival(MICRO_BATCHES)
    wrap = partial(FullCudaGraphWrapper, cuda_graph_warmup_steps=2) if impl == "full_iteration" else None
    steps = case.batches(torch.device("cuda"), canonical=True)
    config: dict[str, Any] = {"cuda_graph_impl": impl, "cuda_graph_modules": []}
    with our_rope():
        # Megatron's local graphs choose a stream themselves while the model is built.
        made = StepTrainer(case.model, beside=impl != "local", wrap=wrap, **config)
        made.walls_ms(steps, range(RIVAL_WARM_UP_STEPS))
        with without_collection():
            return {"walls": made.walls_ms(steps, case.rounds(RIVAL_ROUNDS))}
