# SPDX-License-Identifier: Apache-2.0
"""What runs in place of the forward of multi-token prediction: its layers get the pack as it was given.

They run eager behind the block of layers, on the rows that it has left, and roll tokens and labels by the
pack's offsets. Only the rotary table that they are handed is the capacity's.
"""

from collections.abc import Callable
from typing import Any

from megagraph.megatron.graphs.micro_batch import MicroBatch
from megagraph.megatron.graphs.positions import with_positions
from megagraph.megatron.patch.forwards import Arguments, places_of
from megagraph.megatron.plugin import Plugin, key_of

__all__ = ["wrap_prediction"]


def wrap_prediction(plugin: Plugin, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `MultiTokenPredictionBlock.forward`.

    Args:
        plugin: knows what each model runs just now.
        original: the forward.
    """
    places = places_of(original)
    graphs_of_block = plugin.graphs_of_block

    def forward(block: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = graphs_of_block(key_of(block))
        batch = None if graphs is None else graphs.running
        if isinstance(batch, MicroBatch):
            given = Arguments(places, args, kwargs)
            given.put("packed_seq_params", _params_behind(batch, given))
            args, kwargs = given.args, given.kwargs
        return original(block, *args, **kwargs)

    return forward


def _params_behind(batch: MicroBatch, given: Arguments) -> Any:
    """The pack as it was given, whose offsets say where positions begin in the table that is handed on."""
    if batch.reason is None:  # layers have replayed, so that the table is that of their capture
        return with_positions(batch.params, batch.kind.rows_are_positions)
    return batch.given_params(given.get("rotary_pos_emb"), given.get("hidden_states"))
