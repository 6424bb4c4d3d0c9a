# SPDX-License-Identifier: Apache-2.0
"""Trains two models from the same weights, one eager and one graphed, and compares every bit."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megagraph.demo.packs import Pack
from megagraph.demo.trainer import Trainer
from megagraph.megatron.plugin import disable_cuda_graphs_this_step

__all__ = ["Agreement", "StepTimes", "compare_steps", "time_steps"]


@dataclass(kw_only=True)
class Agreement:
    """How two trainings compare.

    Args:
        steps: steps compared.
        losses: the eager loss of each step, averaged over its micro-batches.
        differences: the first few differences, in words; empty if every bit was equal.
    """

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def bitwise_equal(self) -> bool:
        """Whether every loss and every parameter's gradient was equal at every step."""
        return not self.differences


def _differences(
    step: int, losses: tuple[Sequence[Tensor], Sequence[Tensor]], trainers: tuple[Trainer, Trainer]
) -> list[str]:
    found = [
        f"step {step}, micro-batch {index}: loss {float(eager)!r} eager, {float(graphed)!r} graphed"
        for index, (eager, graphed) in enumerate(zip(*losses, strict=True))
        if not torch.equal(eager, graphed)
    ]
    pairs = list(zip(*(trainer.named_main_grads() for trainer in trainers), strict=True))
    # One look at the device for all gradients; the names only if it is needed.
    unequal = torch.stack([(eager[1] != graphed[1]).any() for eager, graphed in pairs])
    for (name, _), differs in zip([pair[0] for pair in pairs], unequal.tolist(), strict=True):
        if differs:
            found.append(f"step {step}: gradient of {name}")
    return found


def compare_steps(
    eager: Trainer,
    graphed: Trainer,
    steps: Iterable[Sequence[Pack]],
    progress: Callable[[], None] = lambda: None,
) -> Agreement:
    """Trains both on the same packs and compares losses and gradients before each update.

    Args:
        eager: runs under `disable_cuda_graphs_this_step()`.
        graphed: runs as the installed plugin decides.
        steps: the packs of each step.
        progress: called after each step.
    """
    agreement = Agreement()
    for step, packs in enumerate(steps):
        with disable_cuda_graphs_this_step():
            eager_losses = eager.forward_backward(packs)
        losses = eager_losses, graphed.forward_backward(packs)
        found = _differences(step, losses, (eager, graphed))
        agreement.differences += found[: max(0, 8 - len(agreement.differences))]
        agreement.losses.append(float(torch.stack(eager_losses).mean()))
        agreement.steps += 1
        eager.update()
        graphed.update()
        progress()
    return agreement


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Wall time of training steps.

    Args:
        median_ms: over the timed steps.
        fastest_ms: of them.
        peak_bytes: device memory at its highest within a step, above what was allocated before it.
    """

    median_ms: float
    fastest_ms: float
    peak_bytes: int


def time_steps(trainer: Trainer, steps: Sequence[Sequence[Pack]], *, graphs: bool) -> StepTimes:
    """Times whole forward-backward steps on the GPU, without the optimizer.

    Fresh memory is not filled meanwhile, which deterministic mode would do.
    """
    settings = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    times = []
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        for packs in steps:
            torch.cuda.synchronize()
            start = time.perf_counter()
            if graphs:
                trainer.forward_backward(packs)
            else:
                with disable_cuda_graphs_this_step():
                    trainer.forward_backward(packs)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
    finally:
        settings.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
    return StepTimes(
        median_ms=statistics.median(times),
        fastest_ms=min(times),
        peak_bytes=torch.cuda.max_memory_allocated() - before,
    )
