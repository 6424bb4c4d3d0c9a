# SPDX-License-Identifier: Apache-2.0
"""Times training steps with Megatron's own graphs, `local` and `full_iteration`, on packs of one shape."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.cases import MICRO_BATCHES
from benchmarks.step_trainer import Batch, StepTrainer, without_collection
from megagraph.cli.trainer import ModelOptions
from megagraph.megatron import seams
from megagraph.megatron.rope import wrap_rope

__all__ = ["RIVALS", "measure_rival"]

RIVALS = {"local": "Megatron's local graphs", "full_iteration": "Megatron's full iteration graph"}
WARM_UP_STEPS = 6
ROUNDS = 12


def measure_rival(options: ModelOptions, kind: str, steps: Sequence[Sequence[Batch]]) -> list[float]:
    """Walls of steps in ms, with our attention and RoPE kernels: Megatron's RoPE reads offsets on the host.

    Leaves graphs behind that hold the process group: its destruction may wait for them for ever.

    Args:
        options: the model's shape.
        kind: of `RIVALS`.
        steps: batches, all of one shape.
    """
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    init_num_microbatches_calculator(0, None, MICRO_BATCHES, 1, 1)
    is_full = kind == "full_iteration"

    def wrap(schedule: Callable[..., Any]) -> Callable[..., Any]:
        return FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=2) if is_full else schedule

    with _our_rope():
        # Megatron's local graphs choose a stream themselves while the model is built.
        trainer = StepTrainer(options, beside=is_full, wrap=wrap, cuda_graph_impl=kind, cuda_graph_modules=[])
        for index in range(WARM_UP_STEPS):
            trainer.wall_ms(steps[index % len(steps)], graphs=True)
        with without_collection():
            return [trainer.wall_ms(steps[i % len(steps)], graphs=True) for i in range(ROUNDS)]


@contextmanager
def _our_rope() -> Iterator[None]:
    seam = seams.ATTENTION_ROPE
    owner, name, original = seam.owner(), seam.name, seam.function()
    setattr(owner, name, wrap_rope(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
