# SPDX-License-Identifier: Apache-2.0
"""Prepares what Megatron's parts ask for: random streams, counts of micro-batches, streams, kernels."""

import contextlib
from collections.abc import Iterator

import torch

from megagraph.megatron import seams
from megagraph.megatron.patch.rope import wrap_rope


def seed_streams(*, for_graphs: bool = False) -> None:
    """Megatron's random streams, from which weights are drawn on the GPU.

    Args:
        for_graphs: streams that a graph can advance, which Megatron's own graphs want.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1234, te_rng_tracker=for_graphs, force_reset_rng=True)


def prepare_megatrons_graphs(micro_batches: int) -> None:
    """Before a model with Megatron's own graphs is built: they also ask how many micro-batches there are."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    seed_streams(for_graphs=True)
    init_num_microbatches_calculator(0, None, micro_batches, 1, 1)


@contextlib.contextmanager
def on_side_stream() -> Iterator[None]:
    """Runs what is inside on a stream of its own, and has the current one wait for it.

    Megatron-LM builds its DDP so: gradients are then added to `main_grad` beside the backward pass.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@contextlib.contextmanager
def our_rope() -> Iterator[None]:
    """Our RoPE of packs in unpatched attention: Megatron's reads offsets on the host."""
    seam = seams.ATTENTION_ROPE
    owner, name, original = seam.owner(), seam.name, seam.function()
    setattr(owner, name, wrap_rope(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
