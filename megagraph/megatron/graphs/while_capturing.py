# SPDX-License-Identifier: Apache-2.0
"""What Megatron and Transformer Engine are told while layers are captured, and what of theirs is kept.

Sets their flags, keeps random streams from being swapped inside a capture, and names the buffers that
they might let go of. Captures nothing.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.megatron.scopes.moe import make_scale, new_metrics_are_empty

__all__ = ["block_context", "capturing", "held_workspaces", "rng_tracker_source", "step_kept"]


def rng_tracker_source() -> Callable[[], Any]:
    """What is asked for Megatron's tracker of random streams, which may be replaced at any time."""
    from megatron.core import tensor_parallel

    source: Callable[[], Any] = tensor_parallel.get_cuda_rng_tracker
    return source


def _rng_tracker() -> Any:
    """Megatron's named random streams, which may be Transformer Engine's."""
    return rng_tracker_source()()


def held_workspaces() -> list[Tensor]:
    """Megatron's global buffers as they are now.

    Sequence-parallel layers gather into one that is reallocated when a larger pack comes; a graph goes
    on using the one that it was captured with.
    """
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return []
    return list(parallel_state.get_global_memory_buffer().buffer.values())


def block_context(block: nn.Module) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What a capture has to enter around a layer, of what its block enters around all layers.

    In a TransformerBlock under sequence parallelism that is a random stream of each rank. Where streams are
    saved states, the block writes one into the default generator, whose graphs draw from whatever it holds
    when they are replayed. Where they are generators, the block puts another one in its place, and a graph
    keeps the one it was captured with.
    """
    from megatron.core.tensor_parallel import random as streams
    from megatron.core.transformer.transformer_block import TransformerBlock

    config: Any = block.config
    has_own_stream = config.sequence_parallel and isinstance(block, TransformerBlock)

    def own_stream() -> contextlib.AbstractContextManager[Any]:
        tracker = _rng_tracker()  # may be replaced at any time
        if not streams.is_graph_safe_cuda_rng_tracker(tracker):
            return contextlib.nullcontext()
        forked: contextlib.AbstractContextManager[Any] = tracker.fork()
        return forked

    return own_stream if has_own_stream else contextlib.nullcontext


@contextlib.contextmanager
def step_kept(module: nn.Module) -> Iterator[None]:
    """Puts back what a step knows of itself and no layer does.

    The flag by which Transformer Engine's modules know its first micro-batch, and metrics of experts that
    nothing has been recorded in.
    """
    first = "is_first_microbatch"
    flags = [(child, getattr(child, first)) for child in module.modules() if hasattr(child, first)]
    make_scale(module)
    try:
        with new_metrics_are_empty():
            yield
    finally:
        for child, flag in flags:
            setattr(child, first, flag)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Sets the flags that say so: Megatron's, which silences its DDP's hooks, and Transformer Engine's."""
    from megatron.core.transformer import cuda_graphs

    if cuda_graphs.is_graph_capturing():
        yield
        return
    cuda_graphs._set_capture_start()
    try:
        with _te_capturing(), _fixed_streams():
            yield
    finally:
        cuda_graphs._set_capture_end()


@contextlib.contextmanager
def _te_capturing() -> Iterator[None]:
    """Sets Transformer Engine's flag, with its own random streams only.

    Its attention refuses any other tracker while the flag is set, even if nothing is dropped.
    """
    te_graph = sys.modules.get("transformer_engine.pytorch.graph")
    te_streams = sys.modules.get("transformer_engine.pytorch.distributed")
    tracker = _rng_tracker()
    if te_graph is None or te_streams is None or not isinstance(tracker, te_streams.CudaRNGStatesTracker):
        yield
        return
    te_graph.set_capture_start()
    try:
        yield
    finally:
        te_graph.set_capture_end()


@contextlib.contextmanager
def _fixed_streams() -> Iterator[None]:
    """Inside a stream capture, leaves random streams where they are.

    Megatron swaps the generator's state around some parts of a layer, which a capture refuses. A layer that
    draws from a swapped stream, a named one or one that recomputing sets back, was found in its warm-up and
    is not captured (megagraph/bank/rng.py); for the others, the swap is without effect.
    """
    from megatron.core.tensor_parallel import random as streams

    tracker = _rng_tracker()
    if not torch.cuda.is_available() or streams.is_graph_safe_cuda_rng_tracker(tracker):
        yield
        return
    tracker_type: Any = streams.CudaRNGStatesTracker
    fork, get_all, set_all = tracker_type.fork, streams._get_all_rng_states, streams._set_all_rng_states

    @contextlib.contextmanager
    def fixed_fork(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with contextlib.nullcontext() if _in_capture() else fork(self, *args, **kwargs):
            yield

    def fixed_get_all() -> Any:
        return (None, None, None) if _in_capture() else get_all()

    def fixed_set_all(*states: Any) -> None:
        if not _in_capture():
            set_all(*states)

    tracker_type.fork = fixed_fork
    streams._get_all_rng_states, streams._set_all_rng_states = fixed_get_all, fixed_set_all
    try:
        yield
    finally:
        tracker_type.fork = fork
        streams._get_all_rng_states, streams._set_all_rng_states = get_all, set_all


def _in_capture() -> bool:
    return torch.cuda.is_current_stream_capturing()
