# SPDX-License-Identifier: Apache-2.0
"""What ranks run that have two micro-batches in flight."""

from contextlib import nullcontext
from typing import Any

import megatron_rig as rig
import parallel_jobs
import torch
from torch import Tensor

import megagraph
from megagraph.demo.trainer import Trainer


def _in_flight(transformer: dict[str, Any], *, eager: bool) -> tuple[list[Tensor], dict[str, Tensor], Any]:
    """Losses and gradients of two micro-batches, both forwards before the first backward; the report."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    megagraph.install(rig.graph_config())
    try:
        model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        trainer = Trainer(parallel_jobs.OPTIONS, config=transformer)
        *steps, micros = parallel_jobs.steps_of(4)
        for of_step in steps:
            rig.step(trainer, of_step, eager=eager)
        trainer.zero_grad()
        with megagraph.disable_cuda_graphs_this_step() if eager else nullcontext():
            losses = [rig.forward(trainer.model, micro, trainer.device)[0] for micro in micros[:2]]
            for of_micro in losses:
                of_micro.sum().backward()
        grads = rig.grads(trainer.chunk)
        return [of_micro.detach().clone() for of_micro in losses], grads, rig.report_of(trainer)
    finally:
        megagraph.uninstall()


def two_in_flight(*, transformer: dict[str, Any]) -> dict[str, Any]:
    """Compares them with eager's, bit by bit. Returns the report."""
    losses, grads, _report = _in_flight(transformer, eager=True)
    graphed_losses, graphed_grads, report = _in_flight(transformer, eager=False)
    assert all(map(torch.equal, losses, graphed_losses)), "losses"
    assert all(torch.equal(grad, graphed_grads[name]) for name, grad in grads.items()), "gradients"
    found: dict[str, Any] = report
    return found
