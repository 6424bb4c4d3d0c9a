# SPDX-License-Identifier: Apache-2.0
"""What runs in place of the forward and the call of a GPTModel or HybridModel, and of its block of layers.

The model's forward takes the decision, once a micro-batch; the block's forward pads, replays or runs
the layers, and cuts. Where a host's forward does not reach these, the calls do the same around it (Note [Two
doors]): the model hands on the rows that it was given, and the block's layers are replaced one by one. What a
caller has in place of the output layer sees the pack and the rows that were given.

Layers of multi-token prediction get the pack as it was given. They run eager behind the block, on the rows
that it has left, and roll tokens and labels by the pack's offsets. Only the rotary table that they are handed
is the capacity's, so the pack is marked, by which RoPE inside of them is ours. Their losses are means over
rows: any that are added before the embedding, as under sequence parallelism, would change them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from megagraph._C import as_pack, by_name, has_forwards, has_layers, without_ranks
from megagraph.megatron.graphs.dispatcher import MicroBatch
from megagraph.megatron.graphs.entry import is_ours, names_of
from megagraph.megatron.graphs.model import GraphedModel
from megagraph.megatron.graphs.walk import LayerLoop, LayersOneByOne
from megagraph.megatron.plugin import Plugin, key_of
from megagraph.megatron.seams import inference_flag, stand_in
from megagraph.reasons import EagerReason

__all__ = [
    *("wrap_block_call", "wrap_block_forward", "wrap_model_call", "wrap_model_forward", "wrap_prediction"),
]

_Function = Callable[..., Any]


def wrap_model_call(plugin: Plugin, original: _Function) -> _Function:
    """Wraps the call of models: acts around it if Megatron's forward is not reached."""
    act = wrap_model_forward(plugin, original, around_call=True)
    infers = inference_flag()

    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # a compiled model is its compiler's, in its counts as in its calls
            return original(model, *args, **kwargs)
        graphs, get = plugin.known_graphs(key_of(model)), kwargs.get
        is_inference = infers() or get("inference_context") is not None or get("inference_params") is not None
        if graphs is None:  # a stage of a pipeline may have no layers
            if plugin.is_over or is_inference or is_ours(model) or not has_layers(model):
                return original(model, *args, **kwargs)
            graphs = plugin.graphs_of_model(model)
        entries = graphs.entries
        if not has_forwards(model, entries.model.forward, entries.block.forward):
            entries.find_doors(model)
        doors = entries.model
        if is_inference or (doors.is_own is False and not doors.problem):
            return act(model, *args, **kwargs)
        reached, of_block = doors.reached, entries.block.reached
        if doors.is_own is None and not doors.problem:
            with stand_in(graphs, running=EagerReason.WARMING_UP):  # its block says what that is given
                out = original(model, *args, **kwargs)
        else:
            out = original(model, *args, **kwargs)
        # If the host has set another forward meanwhile, it has called the model with that one itself.
        if doors is entries.model and doors.reached == reached:
            reason = entries.model_bypassed()
            if entries.block.reached == of_block:
                graphs.count_as_given(reason)
        return out

    return call


def wrap_model_forward(plugin: Plugin, original: _Function, *, around_call: bool = False) -> _Function:
    """Wraps Megatron's forward of models, or all of their call: decides, and hands on a pack accordingly."""
    own_names = None if around_call else names_of(original)[1:]
    infers = inference_flag()

    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(model, *args, **kwargs)
        graphs = plugin.known_graphs(key_of(model))
        if args:
            # A call is one of a known model.
            names = graphs.entries.model.names if own_names is None else own_names  # type: ignore[union-attr]
            args, kwargs = by_name(names, args, kwargs)
        get = kwargs.get
        ids: Any = get("input_ids")
        is_first_stage = getattr(model, "pre_process", True)
        hidden_states: Any = get("decoder_input") if is_first_stage else model.decoder.input_tensor
        is_inference = infers() or get("inference_context") is not None or get("inference_params") is not None
        has_input = hidden_states is not None or (is_first_stage and ids is not None)
        # Without input it says what is missing; a stage of a pipeline may have no layers.
        is_untouched = is_inference or not has_input or not has_layers(model)
        if graphs is None:
            if plugin.is_over or is_untouched:
                return original(model, *args, **kwargs)
            graphs = plugin.graphs_of_model(model)
        with graphs.lock:
            entries = graphs.entries
            if own_names is not None:
                if entries.model.is_own is False:
                    return original(model, *args, **kwargs)
                entries.model.is_own = True
                entries.model.reached += 1
            elif not has_input and not is_inference:  # all of it by position, or by other names
                graphs.count_as_given(EagerReason.SCOPE_UNSUPPORTED)
            if is_untouched:
                if not has_layers(model):  # any more
                    graphs.count_as_given(EagerReason.SCOPE_UNSUPPORTED)
                with stand_in(graphs, running=None):
                    return original(model, *args, **kwargs)
            run, params = original, get("packed_seq_params")
            if graphs.context.is_dynamic:
                given, params = params, as_pack(params, ids, hidden_states)
                run = _seeing(graphs, given, params, original)
            tokens = ids.numel() if hidden_states is None else graphs.tensor.num_tokens(hidden_states)
            why, is_step, dispatcher = None, False, graphs.dispatcher
            if graphs not in plugin.step_graphs:
                if plugin.gone and not plugin.step_models:
                    plugin.retire()
                why = dispatcher.eager_reason(params, tokens, entries.are_settled)
                if why is None:  # a step of its own; in another model's what is due waits: `decide()`
                    graphs.at_step_boundary(captures=not plugin.step_models)
                    is_step = True
            outer = graphs.running
            try:
                batch: MicroBatch | EagerReason | None
                batch = graphs.decide(model, kwargs, params, tokens, why, may_capture=not plugin.has_pipeline)
                if isinstance(batch, EagerReason) and entries.are_settled and graphs.refusal is None:
                    dispatcher.require_rows(tokens, batch)
                if isinstance(batch, EagerReason) and entries.are_settled and batch not in graphs.learns_from:
                    # Whatever its block is given: no graph has a use for it.
                    dispatcher.count_eager(batch)
                    batch = None
                    if outer is None and not is_step:
                        return run(model, *args, **kwargs)
                reached = entries.block.reached
                graphs.running = batch  # as `stand_in()`, without its calls
                out = run(model, *args, **kwargs)
                if batch is not None and entries.block.reached == reached:
                    graphs.count_as_given(entries.block_missed(batch))
                is_whole = graphs.tensor.shards_sequence and get("output_processor") is None
                if is_whole and isinstance(batch, MicroBatch) and batch.entry_padding:
                    out = out[:, :tokens]  # of losses [1, T] or logits [1, T, V]
            except BaseException:
                if is_step:
                    graphs.break_step()
                raise
            finally:
                graphs.running = outer
            if is_step:
                graphs.after_step()
            return out

    return forward


def wrap_block_call(plugin: Plugin, original: _Function) -> _Function:
    """Wraps the call of blocks: replaces their layers one by one if Megatron's forward is not reached."""

    def call(block: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = None if is_dynamo_compiling() else plugin.graphs_of_block(key_of(block))
        if graphs is None or graphs.running is None:
            return original(block, *args, **kwargs)
        batch, doors = graphs.running, graphs.entries.block
        if doors.is_own is False and isinstance(batch, MicroBatch):
            doors.reached += 1
            args, kwargs = by_name(doors.names, args, kwargs)
            entered = _entered(block, kwargs.get("hidden_states"))
            out = _one_by_one(graphs, batch, functools.partial(original, block, *args), entered, kwargs)
            if batch.reason is not None:
                graphs.watch_backward(out, batch.reason)
            return out
        reached, inside = doors.reached, kwargs
        if isinstance(batch, MicroBatch) and not doors.is_plain:
            args, kwargs = by_name(doors.names, args, kwargs)
            if kwargs.get("packed_seq_params") is batch.constant_params():  # it may run layers itself
                entered = _entered(block, kwargs.get("hidden_states"))
                is_own = batch.is_own(kwargs.get("rotary_pos_emb"), entered)
                doors.handed = batch.given_params(is_own_table=is_own)
                inside = {**kwargs, "packed_seq_params": doors.handed}
        out = original(block, *args, **inside)
        if doors.reached == reached:
            now = graphs.entries.block
            now.reached += 1
            now.is_own = bool(now.is_own)
            reason = graphs.entries.block_missed(batch)
            _args, given = by_name(doors.names, args, kwargs)
            entered = _entered(block, given.get("hidden_states"))
            graphs.look_at_table(given.get("rotary_pos_emb"), given.get("packed_seq_params"), entered)
            graphs.count_as_given(reason, entered)
        eager_reason = batch if isinstance(batch, EagerReason) else batch.reason
        if eager_reason is not None:
            graphs.watch_backward(out, eager_reason)
        return out

    return call


def wrap_block_forward(plugin: Plugin, original: _Function, kept: Sequence[str] = ()) -> _Function:
    """Wraps Megatron's forward of blocks: pads the input, replays if so decided, cuts the output.

    What the block has `kept` from its layers but those of Megatron's one class the loop gets here.
    """
    further_names = names_of(original)[3:]

    def forward(block: Any, hidden_states: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = None if is_dynamo_compiling() else plugin.graphs_of_block(key_of(block))
        if graphs is None or graphs.running is None or graphs.entries.block.is_own is False:
            return original(block, hidden_states, attention_mask, *args, **kwargs)
        entries, batch, get = graphs.entries, graphs.running, kwargs.get
        entries.block.is_own = True
        entries.block.reached += 1
        # `_entered()`, without its call: each replayed micro-batch comes by.
        entered = hidden_states if getattr(block, "pre_process", True) else block.input_tensor
        table, mask = get("rotary_pos_emb"), get("padding_mask")
        if isinstance(batch, MicroBatch):
            pack, expected = get("packed_seq_params"), batch.constant_params()
            if pack is not expected and not _is_one_of(pack, (expected, entries.block.handed)):
                graphs.count_as_given(EagerReason.SIGNATURE_CHANGED, entered)  # the table is of another
                return original(block, hidden_states, attention_mask, *args, **kwargs)
            if not entries.are_megatrons and not _has_expected(graphs, batch, args, kwargs):
                graphs.dispatcher.run_as_given(batch, entered, table)
                kwargs["packed_seq_params"] = batch.params
                return original(block, hidden_states, attention_mask, *args, **kwargs)
        if isinstance(batch, EagerReason):
            graphs.look_at_table(table, get("packed_seq_params"), entered)
            graphs.count_as_given(batch, entered)
            return original(block, hidden_states, attention_mask, *args, **kwargs)
        as_given = attention_mask is not None or bool(get("extract_layer_indices"))  # no graph has either
        if as_given:
            graphs.dispatcher.run_as_given(batch, entered, table)
        variant = None if as_given else graphs.begin(batch, entered, table, mask)
        if variant is None:
            rows, given = batch.pad(entered), {**kwargs, **batch.layer_arguments()}
            del given["attention_mask"]
            instead = {} if getattr(block, "pre_process", True) else {"input_tensor": rows}
            with stand_in(block, **instead):
                out = original(block, hidden_states if instead else rows, attention_mask, *args, **given)
            if not as_given:
                out = batch.cut(out)
                graphs.verifier.keep_gradient(batch, out)
            return out
        loop = LayerLoop(graphs.captures, batch, variant)
        if kept:
            _args, given = by_name(further_names, args, kwargs)
            loop.kept = {name: given.get(name) for name in kept}
        block.__dict__["layers"] = (loop,)  # hides the registered modules
        try:
            out = original(block, hidden_states, None, *args, **kwargs)
        finally:
            del block.__dict__["layers"]
            graphs.dispatcher.end(batch)
        cut = batch.cut(out)
        # The schedule keeps what it hands on over later forwards, and this may be the slot's memory.
        return cut.clone() if graphs.hands_on and cut is out else cut

    return forward


def _seeing(graphs: GraphedModel, given: Any, pack: Any, original: _Function) -> _Function:
    """A model's forward with the ranks of a pack all around. It gets the pack, without them, for `given`."""

    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        if pack is not None and kwargs.get("packed_seq_params") is given:
            kwargs["packed_seq_params"] = without_ranks(pack)
        with graphs.context.showing_pack(pack):
            if isinstance(batch := graphs.running, MicroBatch):
                graphs.dispatcher.expect_state(batch)
            return original(model, *args, **kwargs)

    return run


def _is_one_of(pack: Any, handed: Sequence[Any]) -> bool:
    """Whether a pack is one of several, or has the tensors and values of one."""
    if not dataclasses.is_dataclass(pack):
        return False
    names = [field.name for field in dataclasses.fields(pack)]
    for other in handed:
        pairs = [(getattr(pack, name), getattr(other, name, None)) for name in names]
        if all(one is it or (not isinstance(one, Tensor) and one == it) for one, it in pairs):
            return True
    return False


def _has_expected(
    graphs: GraphedModel, batch: MicroBatch, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether an overridden model hands to its block what the variant's layers are captured with."""
    arguments, table = graphs.captures.arguments, kwargs.get("rotary_pos_emb")
    if not batch.take_freqs(table):
        return False
    if batch.key.by_token:
        arguments.staged.set("rotary_pos_emb", table)
    further = {name: value for name, value in kwargs.items() if name != "packed_seq_params"}
    constants = arguments.get(batch.key)
    return constants is not None and not any(arg is not None for arg in args) and constants.are(further)


def _entered(block: Any, hidden_states: Any) -> Any:
    """The hidden states that enter a block which is called with some: a later stage has received others."""
    return hidden_states if getattr(block, "pre_process", True) else block.input_tensor


def _one_by_one(
    graphs: GraphedModel, batch: MicroBatch, original: _Function, hidden_states: Any, given: dict[str, Any]
) -> Any:
    """Runs a block of layers that some hidden states enter; each layer replays or runs eager by itself.

    What comes without the pack that was handed on, or with another one, runs as it is.
    """
    if hidden_states is None or given.get("packed_seq_params") is not batch.constant_params():
        graphs.count_as_given(EagerReason.SIGNATURE_CHANGED, hidden_states)
        return original(**given)
    variant = graphs.begin(batch, hidden_states, given.get("rotary_pos_emb"), None)
    given["packed_seq_params"] = batch.params
    layers = LayersOneByOne(graphs.captures, batch, variant)
    try:
        with layers.shadowing():
            graphs.dispatcher.expect_state(batch)  # the stand-ins are ours
            out = original(**given)
    finally:
        if variant is not None:
            graphs.dispatcher.end(batch)
    if variant is not None and layers.num_called == 0:
        graphs.count_as_given(graphs.entries.block_missed(batch))
    # Of a layer's memory, of which the schedule frees no part.
    return out.clone() if graphs.hands_on and isinstance(out, Tensor) else out


def wrap_prediction(plugin: Plugin, original: _Function) -> _Function:
    """Wraps `MultiTokenPredictionBlock.forward`."""
    names = names_of(original)[1:]

    def forward(block: Any, *args: Any, **kwargs: Any) -> Any:
        graphs = None if is_dynamo_compiling() else plugin.graphs_of_block(key_of(block))
        batch = None if graphs is None else graphs.running
        if isinstance(batch, MicroBatch):
            args, kwargs = by_name(names, args, kwargs)
            is_own = batch.is_own(kwargs.get("rotary_pos_emb"), kwargs.get("hidden_states"))
            kwargs["packed_seq_params"] = batch.given_params(is_own_table=is_own)
        return original(block, *args, **kwargs)

    return forward
