# SPDX-License-Identifier: Apache-2.0
"""What Megatron and Transformer Engine are told while layers are captured, and what of theirs is put back.

Sets their flags, and keeps random streams from being swapped inside a capture. Captures nothing.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megagraph.megatron.scopes.moe import make_scale, new_metrics_are_empty
from megagraph.megatron.seams import RNG_TRACKER, stand_in


@contextlib.contextmanager
def step_kept(module: nn.Module) -> Iterator[None]:
    """Puts back the flag of Transformer Engine's first micro-batch, and metrics of experts that were none."""
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
    """Sets the flags that say so, and leaves random streams where they are inside a stream capture.

    Megatron's flag silences its DDP's hooks. Transformer Engine's is set with its own random streams only:
    its attention refuses any other tracker meanwhile, even if nothing is dropped.

    Megatron swaps the generator's state around some parts of a layer, which a capture refuses. A layer that
    draws from a swapped stream, a named one or one that recomputing sets back, was found in its warm-up and
    is not captured (megagraph/bank/rng.py); for the others, the swap is without effect.
    """
    from megatron.core.tensor_parallel import random as streams
    from megatron.core.transformer import cuda_graphs

    if cuda_graphs.is_graph_capturing():
        yield
        return
    tracker = RNG_TRACKER.function()()
    engine, engine_streams = (
        sys.modules.get(f"transformer_engine.pytorch.{name}") for name in ("graph", "distributed")
    )
    with contextlib.ExitStack() as afterwards:
        cuda_graphs._set_capture_start()
        afterwards.callback(cuda_graphs._set_capture_end)
        if engine and engine_streams and isinstance(tracker, engine_streams.CudaRNGStatesTracker):
            engine.set_capture_start()
            afterwards.callback(engine.set_capture_end)
        swaps: Sequence[tuple[Any, str, Any]] = (  # and what is handed out in place of each
            (streams.CudaRNGStatesTracker, "fork", contextlib.nullcontext()),
            (streams, "_get_all_rng_states", (None, None, None)),
            (streams, "_set_all_rng_states", None),
        )
        are_fixed = torch.cuda.is_available() and not streams.is_graph_safe_cuda_rng_tracker(tracker)
        for owner, name, instead in swaps if are_fixed else ():
            stand_in(afterwards, owner, name, _outside_of_captures(getattr(owner, name), instead))
        yield


def _outside_of_captures(original: Callable[..., Any], instead: Any) -> Callable[..., Any]:
    is_inside = torch.cuda.is_current_stream_capturing
    return lambda *args, **kwargs: instead if is_inside() else original(*args, **kwargs)
