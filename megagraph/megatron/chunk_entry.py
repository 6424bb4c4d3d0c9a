# SPDX-License-Identifier: Apache-2.0
"""What runs in place of a GPTModel's and a TransformerBlock's forward.

The model's forward takes the decision, once a micro-batch; the block's forward pads, replays or runs
the layers, and cuts.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megagraph.megatron.micro_batch import MicroBatch
from megagraph.megatron.plugin import Plugin, is_cuda_graph_skipped
from megagraph.megatron.scopes.layer import shadowed_layers

__all__ = ["ChunkEntry"]


class ChunkEntry:
    """The wrapped forwards of one release.

    Args:
        plugin: knows the graphs of every model.
    """

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._running: dict[int, MicroBatch] = {}  # by the id of its graphs

    def model_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `GPTModel.forward`: decides, and hands on the pack that the decision asks for."""
        signature = inspect.signature(original)

        def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(model, *args, **kwargs)
            given = bound.arguments
            if given.get("inference_context") is not None or given.get("inference_params") is not None:
                return original(model, *args, **kwargs)
            graphs = self._plugin.graphs_of_model(model)
            with self._plugin.call_of(graphs):
                batch = graphs.decide(
                    given.get("packed_seq_params"),
                    _num_tokens(given),
                    training=model.training,
                    is_skipped=is_cuda_graph_skipped(),
                )
                if batch.capacity is not None:
                    replays = batch.reason is None
                    params = batch.constant_params() if replays else batch.canonical_params()
                    given["packed_seq_params"] = params
                self._running[id(graphs)] = batch
                try:
                    return original(*bound.args, **bound.kwargs)
                finally:
                    del self._running[id(graphs)]

        return forward

    def block_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `TransformerBlock.forward`: pads the input, replays where decided, cuts the output."""

        def forward(
            block: nn.Module, hidden_states: Any, attention_mask: Any, *args: Any, **kwargs: Any
        ) -> Any:
            graphs = self._plugin.graphs_of_block(block)
            batch = None if graphs is None else self._running.get(id(graphs))
            if graphs is None or batch is None:
                return original(block, hidden_states, attention_mask, *args, **kwargs)
            loop = graphs.begin(batch, hidden_states)
            if loop is not None:
                try:
                    with shadowed_layers(block, loop):
                        out = original(block, hidden_states, None, *args, **kwargs)
                finally:
                    graphs.end()
                return batch.cut(out)
            if batch.capacity is None:
                return original(block, hidden_states, attention_mask, *args, **kwargs)
            kwargs["packed_seq_params"] = batch.canonical_params()
            return batch.cut(original(block, batch.pad(hidden_states), None, *args, **kwargs))

        return forward


def _num_tokens(given: dict[str, Any]) -> int:
    """Physical tokens of the input: from the token ids, or from the hidden states given instead."""
    source: Tensor | None = given.get("decoder_input")
    if source is not None:
        return source.size(0)
    ids: Tensor = given["input_ids"]
    return ids.numel()
