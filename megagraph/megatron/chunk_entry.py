# SPDX-License-Identifier: Apache-2.0
"""What runs in place of the forward of a GPTModel or HybridModel, and of its block of layers.

The model's forward takes the decision, once a micro-batch; the block's forward pads, replays or runs
the layers, and cuts.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from megagraph.dispatch import EagerReason
from megagraph.megatron.micro_batch import MicroBatch
from megagraph.megatron.peers import Peers
from megagraph.megatron.plugin import Plugin, is_cuda_graph_skipped
from megagraph.megatron.scopes.layer import LayerLoop, shadowed_layers

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
        """Wraps the model's forward: decides, and hands on the pack that the decision asks for."""
        places = _places_of(original)

        def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = _Arguments(places, args, kwargs)
            if given.get("inference_context") is not None or given.get("inference_params") is not None:
                return original(model, *args, **kwargs)
            if given.get("input_ids") is None and given.get("decoder_input") is None:
                return original(model, *args, **kwargs)  # which says what is missing
            graphs = self._plugin.graphs_of_model(model)
            with self._plugin.call_of(graphs):
                batch = graphs.decide(
                    given.get("packed_seq_params"),
                    _num_tokens(given, graphs.block.peers),
                    training=model.training,
                    is_skipped=is_cuda_graph_skipped(),
                )
                if batch.entry_padding and any(given.get(name) is not None for name in _TAKE_ROWS_AS_GIVEN):
                    batch.run_as_given(EagerReason.SIGNATURE_CHANGED)
                if batch.capacity is not None:
                    replays = batch.reason is None
                    params = batch.constant_params() if replays else batch.canonical_params()
                    given.put("packed_seq_params", params)
                    _pad_rows(given, batch.entry_padding)
                self._running[id(graphs)] = batch
                try:
                    out = original(model, *given.args, **given.kwargs)
                finally:
                    del self._running[id(graphs)]
                return _cut_rows(out, batch.tokens) if batch.entry_padding else out

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

    def stack_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `HybridStack.forward` as `block_forward()` does; its loop takes the layers' place alike.

        The stack hands rotary tables to a `TransformerLayer` only, which the loop is not. It gets them here.
        """
        places = _places_of(original)

        def run(stack: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if "layers" in stack.__dict__:  # shadowed: this micro-batch replays
                (loop,) = stack.__dict__["layers"]
                given = _Arguments(places, args, kwargs)
                stack.__dict__["layers"] = (_StackLoop(loop, given),)
            return original(stack, *args, **kwargs)

        return self.block_forward(run)


def _places_of(method: Callable[..., Any]) -> Mapping[str, int]:
    """Where each argument of a method stands that may be given by position, `self` not counted."""
    _self, *parameters = inspect.signature(method).parameters.values()
    return {
        parameter.name: place
        for place, parameter in enumerate(parameters)
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


class _Arguments:
    """The arguments of one call, by name, without the work of binding them in each micro-batch.

    Args:
        places: of the names among positional arguments.
        args: by position, without `self`.
        kwargs: by keyword.
    """

    def __init__(self, places: Mapping[str, int], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._places = places
        self.args = args
        self.kwargs = kwargs

    def get(self, name: str) -> Any:
        """An argument; None where it was not given."""
        place = self._places.get(name, len(self.args))
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)

    def put(self, name: str, value: Any) -> None:
        """Replaces an argument where it was given, or gives it by keyword."""
        place = self._places.get(name, len(self.args))
        if place < len(self.args):
            self.args = (*self.args[:place], value, *self.args[place + 1 :])
        else:
            self.kwargs[name] = value


class _StackLoop:
    """A `LayerLoop` as the one layer of a HybridStack.

    Args:
        loop: runs all layers.
        given: what the stack's forward was called with.
    """

    layer_number = 1  # read for the context of fp8, which is refused

    def __init__(self, loop: LayerLoop, given: _Arguments) -> None:
        self._loop = loop
        self._further = {name: given.get(name) for name in ("rotary_pos_emb", "padding_mask")}

    def __call__(self, hidden_states: Tensor, **arguments: Any) -> tuple[Tensor, None]:
        return self._loop(hidden_states, **arguments, **self._further)


def _num_tokens(given: _Arguments, peers: Peers) -> int:
    """Physical tokens of the input: from the token ids, or from the hidden states given instead."""
    source: Tensor | None = given.get("decoder_input")
    if source is not None:
        return source.size(0) * (peers.size if peers.shards_sequence else 1)
    ids: Tensor = given.get("input_ids")
    return ids.numel()


# The row lists among a model's arguments, [1, T] each, and what stands in rows that are added. Their
# losses are cut off, so that no gradient comes from them.
_ROW_LISTS = {"input_ids": 0, "position_ids": 0, "labels": 0, "loss_mask": 0, "padding_mask": True}


# Arguments that fit the rows that were given, and no others.
_TAKE_ROWS_AS_GIVEN = ("decoder_input", "output_processor")


def _pad_rows(given: _Arguments, rows: int) -> None:
    """Adds rows to each row list of a model's arguments."""
    if rows == 0:
        return
    for name, filler in _ROW_LISTS.items():
        rows_given: Tensor | None = given.get(name)
        if rows_given is not None:
            given.put(name, functional.pad(rows_given, (0, rows), value=filler))


def _cut_rows(out: Tensor, tokens: int) -> Tensor:
    """The first rows of losses [1, T] or logits [1, T, V]."""
    return out[:, :tokens]
