# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of one model: graphed, eager, unpatched, launched bare, and in Megatron's graphs.

A trainer's schedule is timed by itself: no data loading, no optimizer. Batches lie on the device, as a loader
that reads ahead leaves them. Weights are drawn there too. The optimizer never steps, so that the weights stay
and its state takes no memory.
"""

import contextlib
import gc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

import megagraph
from benchmarks.measuring.children import Answer, caught
from benchmarks.measuring.clocks import STEP, Call, Timeline, traced, wall_ms
from benchmarks.subjects.hosts import check_replays, engines_spec, install, made_quickly, prepare_rival
from benchmarks.subjects.inside import bare_step, our_rope
from benchmarks.subjects.packs import MICRO_BATCHES, Case, filled, model_options
from megagraph._C import Capacity
from megagraph.demo.packs import Pack, next_token_labels, position_ids
from megagraph.demo.trainer import Trainer, mean_loss, packed_seq_params
from megagraph.megatron.plugin import disable_cuda_graphs_this_step
from megagraph.megatron.specs import get_gpt_layer_varlen_spec

NUM_SEQS = 64  # as many documents as the shortest ones make in a pack: every pack fits
WARM_UP_STEPS, FURTHER_STEPS = 3, 3  # the first of the further ones captures
# Rounds run each of the distinct steps once.
ROUNDS, LARGE_ROUNDS = 5, 2  # of a small model, of a large one
UNPATCHED_ROUNDS = 2  # before ours, and as many after it; of a large model half
RIVAL_WARM_UP_STEPS, RIVAL_ROUNDS = 6, 4
WAYS = ("graphed", "eager")
EXPERTS = 8

Batch = dict[str, Any]
Steps = Sequence[Sequence[Batch]]


def batch_of(pack: Pack, device: torch.device, *, canonical: bool = False) -> Batch:
    """A pack as the model takes it; if it is `canonical`, in the shapes of every other full one."""
    labels, mask = next_token_labels(pack)
    rows = {"tokens": pack.tokens, "positions": position_ids(pack), "labels": labels, "mask": mask}
    offsets, longest = pack.cu_seqlens, pack.max_seqlen
    if canonical:
        offsets, longest = torch.ops.megagraph.pad_cu_seqlens(offsets, NUM_SEQS), pack.num_tokens
    batch: Batch = {name: row.unsqueeze(0).to(device) for name, row in rows.items()}
    return {**batch, "offsets": offsets.to(device), "longest": longest}


class StepTrainer(Trainer):
    """A model that runs whole steps."""

    def make_optimizer(self) -> Any:
        return None

    def zero_grad(self) -> None:
        """Not in a step, which is timed."""

    def wall_ms(
        self, batches: Sequence[Any], *, graphs: bool, beside: Sequence[Call] = (), on: Any = None
    ) -> float:
        """Runs a step, with calls beside it on another stream; the time until the device has done it all."""

        def step() -> None:
            with record_function(STEP):
                for call in beside:
                    with torch.cuda.stream(on):
                        call()
                self.forward_backward(batches)  # hands each on as it is
                torch.cuda.synchronize()

        self.model.zero_grad_buffer()
        with contextlib.nullcontext() if graphs else disable_cuda_graphs_this_step():
            return wall_ms(step)

    def walls_ms(self, steps: Steps, count: int, *, graphs: bool = True) -> list[float]:
        """Runs so many steps, one after another; after the last one the first again."""
        return [self.wall_ms(steps[index % len(steps)], graphs=graphs) for index in range(count)]

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
    config = {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 1024,
        "moe_grouped_gemm": is_engine,
        "add_bias_linear": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
    }
    return {"spec": (engines_spec if is_engine else get_gpt_layer_varlen_spec)(**kind), "config": config}


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
        tokens = self.model.max_tokens
        return Capacity(tokens=tokens, num_seqs=NUM_SEQS, max_seqlen=tokens)

    def packs(self) -> list[list[Pack]]:
        """The packs of each distinct step, the same for every way to run it, and full. That of a small model
        has one pack several times: graphs that are launched again, unstaged, then do the work of all of it.
        """
        full = partial(filled, tokens=self.model.max_tokens)
        steps = [[*map(full, step)] for step in self.steps(self.distinct_steps)]
        return [[step[0]] * MICRO_BATCHES for step in steps] if self.is_small else steps

    def batches(self, device: torch.device, *, canonical: bool = False) -> list[list[Batch]]:
        """`packs()` on the device; with `canonical` all of one shape."""
        return [[batch_of(pack, device, canonical=canonical) for pack in step] for step in self.packs()]


def step_case(hidden: int, *, layers: int, tokens: int) -> StepCase:
    """Lognormal documents that all fit; heads of 64, of 128 in large models."""
    model = model_options(hidden, layers=layers, tokens=tokens, head_dim=64 if hidden <= 1024 else 128)
    name = f"hidden {hidden}, packs of {tokens}"
    return StepCase(name=name, model=model, max_packed_seqs=(NUM_SEQS,), mean_length=tokens // 8)


def walls_in_turns(
    trainer: StepTrainer, steps: Steps, rounds: int, ways: Sequence[str]
) -> dict[str, list[float]]:
    """Walls in ms of each step, by way: `graphed`, `eager`, or `bare`, as the graphed one has staged."""
    runs: dict[str, Any] = {way: partial(trainer.wall_ms, graphs=way == "graphed") for way in ways}
    if "bare" in ways:
        launch = bare_step(trainer, MICRO_BATCHES)
        runs["bare"] = lambda _batches: wall_ms(launch)
    walls: dict[str, list[float]] = {way: [] for way in ways}
    with without_collection():
        for batches, way in itertools.product([*steps] * rounds, ways):
            walls[way].append(runs[way](batches))
    return walls


def measure_ours(case: StepCase) -> Answer:
    """Graphed and eager steps in turn, unpatched ones before and after them, and what their floor is.

    Answers walls in ms of each round of the distinct steps, `graphed`, `eager` and of a small model also
    `bare`; `outside_ms` of graphs by distinct step of a small model; `kernels_ms` of one traced step;
    `unpatched`, its own walls and kernels.
    """
    trainer, is_small = made_quickly(StepTrainer, case.model, beside=True), case.is_small
    steps = case.batches(trainer.device)

    def unpatched() -> Answer:
        """Eager steps with nothing installed but our RoPE; attention is ours by the model's spec."""
        rounds = UNPATCHED_ROUNDS if is_small else UNPATCHED_ROUNDS // 2
        with our_rope(), without_collection():
            trainer.walls_ms(steps, WARM_UP_STEPS)
            walls = trainer.walls_ms(steps, rounds * len(steps))
            return {"walls": walls, "kernels_ms": trainer.traced(steps[0]).kernels_ms()}

    before = caught(unpatched)
    install(capacities=(case.capacity,))
    trainer.walls_ms(steps, WARM_UP_STEPS + FURTHER_STEPS)
    trainer.wall_ms(steps[0], graphs=False)
    ways = ("graphed", "bare", "eager") if is_small else ("graphed", "eager")
    walls = walls_in_turns(trainer, steps, ROUNDS if is_small else LARGE_ROUNDS, ways)
    traced = [trainer.traced(batches) for batches in (steps if is_small else steps[:1])]
    if not any(work.is_graphed for work in traced[0].work):
        raise RuntimeError("the trace of a graphed step has no graphs")
    check_replays(megagraph.reports()[-1], "DISABLED")
    megagraph.uninstall()
    after = before if "error" in before else caught(unpatched)
    return {
        **walls,
        "outside_ms": [timeline.eager_ms() for timeline in traced] if is_small else [],
        "kernels_ms": traced[0].kernels_ms(),
        "unpatched": after if "error" in after else {**after, "walls": before["walls"] + after["walls"]},
    }


def measure_steps(
    case: StepCase,
    ways: Sequence[str] = WAYS,
    *,
    rounds: int = 0,
    is_full: bool = True,
    beside: bool = False,
    experts_of_engine: bool | None = None,
    **plugin: Any,
) -> Answer:
    """Memory of a model that warms up and captures, then rounds of its steps, `graphed` or `eager` in turns.

    Unless they are full, packs are those of the case as they come. Layers are of no experts by default.

    Answers walls in ms by way, the `report`, and the most that torch `reserved` before them.
    """
    install(**{"capacities": (case.capacity,), "cuda_graph_warmup_steps": WARM_UP_STEPS, **plugin})
    layers = {} if experts_of_engine is None else expert_layers(experts_of_engine)
    made, graphs = made_quickly(StepTrainer, case.model, beside=beside, **layers), ways[0] == "graphed"
    packs = case.packs() if is_full else case.steps(WARM_UP_STEPS + FURTHER_STEPS)
    steps = [[batch_of(pack, made.device) for pack in step] for step in packs]
    made.walls_ms(steps, WARM_UP_STEPS + FURTHER_STEPS, graphs=graphs)
    reserved = torch.cuda.max_memory_reserved()
    walls = walls_in_turns(made, steps, rounds, ways)
    report = megagraph.reports()[-1]
    if graphs and plugin.get("mode") != "eager":
        check_replays(report, "DISABLED")
    return {**walls, "reserved": reserved, "report": report}


def measure_rival(case: StepCase, impl: str) -> Answer:
    """Walls of steps in ms in Megatron's own graphs, on batches of one shape, with our RoPE in its layers."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    prepare_rival(MICRO_BATCHES)
    steps = case.batches(torch.device("cuda"), canonical=True)
    config: dict[str, Any] = {"cuda_graph_impl": impl, "cuda_graph_modules": []}
    with our_rope():
        # Megatron's local graphs choose a stream themselves while the model is built.
        made = made_quickly(StepTrainer, case.model, beside=impl != "local", config=config)
        if impl == "full_iteration":
            schedule = FullCudaGraphWrapper(made.schedule(), cuda_graph_warmup_steps=2)
            made.schedule = lambda: schedule  # type: ignore[method-assign]
        made.walls_ms(steps, RIVAL_WARM_UP_STEPS)
        with without_collection():
            return {"walls": made.walls_ms(steps, RIVAL_ROUNDS * len(steps))}
