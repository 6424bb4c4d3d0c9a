# SPDX-License-Identifier: Apache-2.0
"""A trainer whose schedule is timed by itself: no data loading, no optimizer.

Batches lie on the device, as a loader that reads ahead leaves them. Weights are drawn there too. The
optimizer never steps, so that the weights stay and its state takes no memory.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import record_function

from benchmarks.measuring.clocks import wall_ms
from benchmarks.subjects.hosts import on_side_stream
from megagraph.decide.dispatch import Capacity
from megagraph.demo.packers import Pack, next_token_labels, position_ids
from megagraph.demo.trainer import ModelOptions, Trainer, packed_seq_params
from megagraph.megatron import disable_cuda_graphs_this_step

Batch = dict[str, Any]
Schedule = Callable[..., Any]


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
    `main_grad` beside the backward pass. `wrap` is put around Megatron's schedule, once; `transformer` are
    further fields of its config.
    """

    def __init__(
        self,
        options: ModelOptions,
        *,
        beside: bool,
        wrap: Callable[[Schedule], Schedule] | None = None,
        **transformer: Any,
    ) -> None:
        self._wrap = wrap
        self._wrapped: Schedule | None = None
        self._walls: list[float] = []
        with on_side_stream() if beside else contextlib.nullcontext():
            super().__init__(options, config={"use_cpu_initialization": False, **transformer})

    def make_optimizer(self) -> Any:
        return SimpleNamespace(zero_grad=lambda: None)  # there is nothing beside the DDP's buffer

    def wall_ms(self, batches: Sequence[Batch], *, graphs: bool) -> float:
        """Runs a step; the time from the start of the schedule until the device has done it all."""
        from megatron.core import pipeline_parallel

        schedule = pipeline_parallel.get_forward_backward_func()  # what is installed now
        if self._wrap is not None:
            self._wrapped = schedule = self._wrapped or self._wrap(schedule)
        timed = partial(_timed, schedule, self._walls)
        with (
            mock.patch.object(pipeline_parallel, "get_forward_backward_func", lambda: timed),
            contextlib.nullcontext() if graphs else disable_cuda_graphs_this_step(),
        ):
            self.forward_backward(batches)  # type: ignore[arg-type]  # hands each on as it is
        return self._walls[-1]

    def _forward_step(self, packs: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        batch: Batch = next(packs)
        losses = model(
            input_ids=batch["tokens"],
            position_ids=batch["positions"],
            attention_mask=None,
            labels=batch["labels"],
            packed_seq_params=packed_seq_params(batch["offsets"], batch["longest"]),
        )
        return losses, partial(_mean_loss, mask=batch["mask"])


def _mean_loss(losses: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (losses.float() * mask).sum() / mask.sum()
    return loss, {"loss": loss.detach().clone()}  # a copy: the schedule divides the loss in place


def _timed(schedule: Schedule, walls: list[float], **arguments: Any) -> Any:
    results: list[Any] = []

    def step() -> None:
        with record_function("phase: schedule"):
            results.append(schedule(**arguments))
            torch.cuda.synchronize()

    walls.append(wall_ms(step))
    return results[0]


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Python's cyclic garbage waits meanwhile, for whatever is timed alike."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def named_phases(trainer: StepTrainer) -> Iterator[None]:
    """Names the host's phases for a profiler: `phase: embedding` and so on."""
    from megatron.core.pipeline_parallel import schedules

    chunk, config = trainer.chunk, trainer.model.config
    places = (
        (schedules, "forward_step", "forward step"),
        (chunk.embedding, "forward", "embedding"),
        (chunk.decoder, "forward", "layers"),
        (chunk.output_layer, "forward", "output layer"),
        (chunk, "compute_language_model_loss", "loss"),
        (schedules, "backward_step", "backward"),
        (config, "finalize_model_grads_func", "finish gradients"),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, phase in places:
            named = partial(_in_phase, getattr(owner, name), f"phase: {phase}")
            stack.enter_context(mock.patch.object(owner, name, named))
        yield


def _in_phase(call: Callable[..., Any], phase: str, /, *args: Any, **kwargs: Any) -> Any:
    with record_function(phase):
        return call(*args, **kwargs)
