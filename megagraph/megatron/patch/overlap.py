# SPDX-License-Identifier: Apache-2.0
"""What runs in place of the plans by which Megatron trains a GPTModel under expert-parallel overlap.

Note [Plans]
The combined 1F1B schedule calls no forward: it asks for a plan of each micro-batch, whose nodes, parts of
layers, run beside those of another one's backward. No graph takes part in one yet: micro-batches run as they
were given, and are counted. Steps that only go forward call the model.

Megatron's nodes route without the padding mask, which changes losses: the first one of each layer gets it.

The `forward_step` of Megatron's own script makes a pack, and asks for the plan without it: documents would
attend to each other. If the pack that was made last in the step of a micro-batch still lives and is of just
as many rows, with no attention mask in its place, it was left out.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

from megagraph._C import by_name, is_skipped
from megagraph.megatron.graphs.entry import names_of
from megagraph.megatron.plugin import Plugin
from megagraph.megatron.scopes.parts import experts_of
from megagraph.megatron.seams import PACKED_SEQ_PARAMS, first_nodes, stand_in

__all__ = ["wrap_plan", "wrap_step"]

_Function = Callable[..., Any]


def wrap_step(plugin: Plugin, original: _Function) -> _Function:
    """Wraps the combined forward and backward of two micro-batches: notes which pack is made inside."""

    def combined_forward_backward_step(*args: Any, **kwargs: Any) -> Any:
        packs: Any = PACKED_SEQ_PARAMS.function()
        make = packs.__init__

        @functools.wraps(make)  # its signature is asked for
        def init(pack: Any, *given: Any, **fields: Any) -> None:
            make(pack, *given, **fields)
            plugin.last_pack = weakref.ref(pack)

        with contextlib.ExitStack() as afterwards:
            stand_in(afterwards, plugin, "last_pack", None)
            stand_in(afterwards, packs, "__init__", init)
            return original(*args, **kwargs)

    return combined_forward_backward_step


def wrap_plan(plugin: Plugin, original: _Function) -> _Function:
    """Wraps `GPTModel.build_schedule_plan`: counts the micro-batch, and has the nodes know its mask."""
    names = names_of(original)[1:]

    def build_schedule_plan(model: Any, *args: Any, **kwargs: Any) -> Any:
        if plugin.is_over or not len(model.decoder.layers):  # a stage of a pipeline
            return original(model, *args, **kwargs)
        graphs = plugin.graphs_of_model(model)
        args, kwargs = by_name(names, args, kwargs)
        is_first_stage, ids = getattr(model, "pre_process", True), kwargs["input_ids"]
        hidden_states = kwargs.get("decoder_input") if is_first_stage else model.decoder.input_tensor
        tokens = ids.numel() if hidden_states is None else graphs.tensor.num_tokens(hidden_states)
        params = kwargs.get("packed_seq_params")
        if params is None and plugin.last_pack is not None and kwargs.get("attention_mask") is None:
            _check_left_out(plugin.last_pack(), tokens * graphs.context.size)
        plan = original(model, *args, **kwargs)
        if graphs.refusal is None and kwargs.get("padding_mask") is not None:
            for layer, node in first_nodes(plan):
                if (mixture := experts_of(layer)) is not None:
                    node.submodule = _masked(mixture, node.submodule)
        graphs.dispatcher.count_plan(params, tokens, is_skipped())
        return plan

    return build_schedule_plan


def _check_left_out(pack: Any, rows: int) -> None:
    """Raises `ValueError` if a pack, or what is left of it, must be that of a plan which was given none."""
    padded = getattr(pack, "cu_seqlens_q_padded", None)
    offsets = getattr(pack, "cu_seqlens_q", None) if padded is None else padded
    if offsets is not None and int(offsets[-1]) == rows:  # here alone the host waits for the device
        raise ValueError(
            "expected packed_seq_params in build_schedule_plan(), got none beside a PackedSeqParams of just "
            f"its {rows} rows: documents would attend to each other; where forward_step returns a plan, hand "
            "it on: build_schedule_plan(..., packed_seq_params=packed_seq_params)"
        )


def _masked(mixture: Any, submodule: _Function) -> _Function:
    """What a node runs up to the dispatch of a layer of experts, whose router gets the micro-batch's mask."""

    def run(node: Any, *args: Any) -> Any:
        mask = node.chunk_state.padding_mask.transpose(0, 1).bool()  # as `MoELayer.forward` has it
        with contextlib.ExitStack() as afterwards:
            stand_in(afterwards, mixture, "route", functools.partial(mixture.route, padding_mask=mask))
            return submodule(node, *args)

    return run
