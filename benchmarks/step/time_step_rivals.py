# SPDX-License-Identifier: Apache-2.0
"""Times training steps with Megatron's own graphs, `local` and `full_iteration`, on packs of one shape."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.hosts.prepare_megatron import our_rope, prepare_megatrons_graphs
from benchmarks.packs.cases import MICRO_BATCHES
from benchmarks.step.train_steps import Batch, StepTrainer, without_collection
from megagraph.demo.trainer import ModelOptions

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

    prepare_megatrons_graphs(MICRO_BATCHES)
    is_full = kind == "full_iteration"

    def wrap(schedule: Callable[..., Any]) -> Any:
        return FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=2)

    with our_rope():
        # Megatron's local graphs choose a stream themselves while the model is built.
        trainer = StepTrainer(
            options,
            beside=is_full,
            wrap=wrap if is_full else None,
            cuda_graph_impl=kind,
            cuda_graph_modules=[],
        )
        for index in range(WARM_UP_STEPS):
            trainer.wall_ms(steps[index % len(steps)], graphs=True)
        with without_collection():
            return [trainer.wall_ms(steps[i % len(steps)], graphs=True) for i in range(ROUNDS)]
