# SPDX-License-Identifier: Apache-2.0
"""What runs in place of the forward of a GPTModel or HybridModel, and of its block of layers.

The model's forward takes the decision, once a micro-batch; the block's forward pads, replays or runs
the layers, and cuts. What a caller has in place of the output layer sees the pack and the rows that were
given.

Layers of multi-token prediction get the pack as it was given. They run eager behind the block, on the rows
that it has left, and roll tokens and labels by the pack's offsets. Only the rotary table that they are handed
is the capacity's, so the pack is marked, by which RoPE inside of them is ours. Their losses are means over
rows: any that are added before the embedding, as under sequence parallelism, would change them.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megagraph.decide.reasons import EagerReason
from megagraph.megatron.graphs.entry import Level
from megagraph.megatron.graphs.micro_batch import MicroBatch
from megagraph.megatron.graphs.model_graphs import ModelGraphs
from megagraph.megatron.graphs.one_document import as_pack
from megagraph.megatron.parallel.tensor import TensorRanks
from megagraph.megatron.plugin import Plugin, is_cuda_graph_skipped, key_of
from megagraph.megatron.scopes.walk import LayerLoop

__all__ = [
    "ROW_LISTS",
    "Arguments",
    "ForwardWrappers",
    "OnGivenRows",
    "decided_as_given",
    "places_of",
    "standing_in",
    "wrap_prediction",
]


@contextlib.contextmanager
def standing_in(block: Any, hidden_states: Tensor) -> Iterator[None]:
    """While inside, a block that takes what was set runs on these hidden states."""
    before = block.input_tensor
    block.input_tensor = hidden_states
    try:
        yield
    finally:
        block.input_tensor = before


# The row lists among a model's arguments, [1, T] each, beside its padding mask.
ROW_LISTS = ("input_ids", "position_ids", "labels", "loss_mask")


class OnGivenRows:
    """An output processor that is handed what it would be handed without the plugin.

    What it returns is of the rows that were given, whatever that is.

    Args:
        processor: the caller's.
        given: arguments of the model as its caller passed them, by name.
        tokens: rows of the pack.
        cut: makes this rank's rows of hidden states those that it has of the pack as it was given, moving
            rows between ranks; None where they are.

    Attributes:
        passed: what the model's forward was called with in place of `given`. What the model has made of that
            stays what it is, less the rows that were added.
    """

    def __init__(
        self,
        processor: Callable[..., Any],
        given: Mapping[str, Any],
        tokens: int,
        cut: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self._processor = processor
        self._given = given
        self._tokens = tokens
        self._cut = cut
        self.passed: Mapping[str, Any] = {}

    def __call__(self, **handed: Any) -> Any:
        """Calls the processor."""
        if self._cut is not None:
            handed["hidden_states"] = self._cut(handed["hidden_states"])
        for name, value in handed.items():
            if value is None or name not in self._given:
                continue
            if value is self.passed.get(name):
                handed[name] = self._given[name]
            elif self._cut is not None and name == "decoder_input":  # the embedding's, for one
                handed[name] = self._cut(value)
            elif self._cut is not None and name in ROW_LISTS:
                handed[name] = value[:, : self._tokens]
        return self._processor(**handed)


class ForwardWrappers:
    """Wraps the forwards of models and blocks.

    Args:
        plugin: knows the graphs of every model.
    """

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin

    def model_forward(self, level: Level) -> Callable[..., Any]:
        """Wraps the model's forward: decides, and hands on the pack that the decision asks for."""
        original = level.function
        places = places_of(original)
        read = {name: place for name, place in places.items() if name in _READ}
        plugin = self._plugin

        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            get = (_with_positional(kwargs, args, read) if args else kwargs).get
            ids: Any = get("input_ids")
            is_first_stage = getattr(model, "pre_process", True)
            hidden_states: Any = get("decoder_input") if is_first_stage else model.decoder.input_tensor
            is_inference = get("inference_context") is not None or get("inference_params") is not None
            has_input = hidden_states is not None or (is_first_stage and ids is not None)
            # Without input it says what is missing; a stage of a pipeline may have no layers.
            if is_inference or not has_input or not len(model.decoder.layers):
                with plugin.untouched(model):
                    return original(model, *args, **kwargs)
            graphs = plugin.graphs_of_model(model)
            entries = graphs.entries
            if entries.model.acting is not level and not entries.model.takes(level):
                return original(model, *args, **kwargs)
            entries.model.reached += 1
            run, params = original, get("packed_seq_params")
            if graphs.view.is_on:
                given, params = params, as_pack(params, ids, hidden_states)
                run = _seeing(graphs, given, params, original, places)
            tokens = ids.numel() if hidden_states is None else graphs.tensor.num_tokens(hidden_states)
            is_bare = plugin.is_bare(graphs)
            batch: MicroBatch | EagerReason | None = graphs.eager_reason(params, tokens) if is_bare else None
            is_step = is_bare and batch is None and plugin.begin_bare_call(graphs)
            if batch is None:
                mask, is_skipped = get("padding_mask"), is_cuda_graph_skipped()
                is_masked = mask is not None or graphs.masks_at_entry
                is_shared = not is_masked or graphs.tensor.shares_masks(from_ids=hidden_states is None)
                batch = graphs.decide(params, tokens, mask, is_mask_shared=is_shared, is_skipped=is_skipped)
            added_rows, processor = 0, None
            if isinstance(batch, MicroBatch):
                added_rows, processor = batch.entry_padding, get("output_processor")
                has_more = get("attention_mask") is not None or get("extra_block_kwargs") is not None
                is_foreign = not entries.are_megatrons
                # Of a pipeline's stage other stages see the rows, too.
                is_inner = not is_first_stage or not getattr(model, "post_process", True)
                is_uneven = processor is not None and tokens % graphs.tensor.size
                if has_more or (added_rows and (is_inner or is_foreign or is_uneven)):
                    # These fit the rows that were given, or ask the block for other results.
                    batch, added_rows = EagerReason.SIGNATURE_CHANGED, 0
                elif added_rows and (reason := graphs.reason_against_rows()) is not None:
                    batch, added_rows = batch.as_given(reason), 0
            if graphs.needs_equal_rows and isinstance(batch, EagerReason):
                graphs.require_rows(tokens, batch)
            if isinstance(batch, MicroBatch):
                given_arguments = Arguments(places, args, kwargs)
                shown: OnGivenRows | None = None
                if processor is not None and not is_foreign:  # whose call of it is its own
                    shown = _shown_to_processor(batch, graphs.tensor, given_arguments)
                if added_rows and hidden_states is not None:
                    _add_rows(batch, graphs.tensor, given_arguments)
                args, kwargs = _padded(batch, given_arguments)
                if shown is not None:
                    shown.passed = {name: given_arguments.get(name) for name in _HANDED_ON}
            elif entries.are_settled and not graphs.learns_from(batch):
                graphs.count_as_given(batch)  # whatever its block is given: no graph has a use for it
                batch = None
                if graphs.running is None and not is_step:
                    return run(model, *args, **kwargs)
            reached = entries.block.reached
            outer, graphs.running = graphs.running, batch
            try:
                out = run(model, *args, **kwargs)
            finally:
                graphs.running = outer
            if batch is not None and entries.block.reached == reached:
                graphs.count_as_given(entries.block_missed(decided_as_given(batch)))
            if added_rows and processor is None:
                out = _cut_rows(out, tokens)
            if is_step:
                graphs.after_step()
            return out

        return forward

    def block_forward(self, level: Level, run: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Wraps `TransformerBlock.forward`: pads the input, replays if so decided, cuts the output.

        Args:
            level: the forward.
            run: called in its place.
        """
        original = level.function if run is None else run
        graphs_of_block = self._plugin.graphs_of_block

        def forward(block: Any, hidden_states: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
            graphs = graphs_of_block(key_of(block))
            if graphs is None or graphs.running is None:
                return original(block, hidden_states, attention_mask, *args, **kwargs)
            entries = graphs.entries
            if entries.block.acting is not level and not entries.block.takes(level):
                return original(block, hidden_states, attention_mask, *args, **kwargs)
            entries.block.reached += 1
            batch = graphs.running
            is_first = getattr(block, "pre_process", True)
            entered = hidden_states if is_first else block.input_tensor
            if isinstance(batch, EagerReason):
                graphs.count_as_given(batch, entered)
                graphs.look_at_table(kwargs.get("rotary_pos_emb"), kwargs.get("packed_seq_params"), entered)
                return original(block, hidden_states, attention_mask, *args, **kwargs)
            table = kwargs.get("rotary_pos_emb")
            if not entries.are_megatrons and not _has_expected(graphs, batch, args, kwargs):
                graphs.run_as_given(batch, table, entered)
                kwargs["packed_seq_params"] = batch.params
                return original(block, hidden_states, attention_mask, *args, **kwargs)
            loop = graphs.begin(batch, entered, table, kwargs.get("padding_mask"))
            if loop is None:
                kwargs["packed_seq_params"] = batch.canonical_params()
                mask = batch.canonical_mask()
                if mask is not None:
                    kwargs["padding_mask"] = mask
                rows = batch.pad(entered)
                if is_first:
                    out = original(block, rows, None, *args, **kwargs)
                else:
                    with standing_in(block, rows):
                        out = original(block, hidden_states, None, *args, **kwargs)
                out = batch.cut(out)
                graphs.verifier.keep_gradient(batch, out)
                return out
            block.__dict__["layers"] = (loop,)  # hides the registered modules
            try:
                out = original(block, hidden_states, None, *args, **kwargs)
            finally:
                del block.__dict__["layers"]
                graphs.end(batch, loop)
            cut = batch.cut(out)
            # The schedule keeps what it hands on over later forwards, and this may be the slot's memory.
            return cut.clone() if graphs.hands_on and cut is out else cut

        return forward

    def stack_forward(self, level: Level) -> Callable[..., Any]:
        """Wraps `HybridStack.forward` as `block_forward()` does; its loop takes the layers' place alike.

        The stack hands rotary tables to a `TransformerLayer` only, which the loop is not. It gets them here.
        """
        original = level.function
        places = places_of(original)

        def run(stack: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if "layers" in stack.__dict__:  # shadowed: this micro-batch replays
                (loop,) = stack.__dict__["layers"]
                given = Arguments(places, args, kwargs)
                stack.__dict__["layers"] = (_StackLoop(loop, given),)
            return original(stack, *args, **kwargs)

        return self.block_forward(level, run)


def _seeing(
    graphs: ModelGraphs, given: Any, pack: Any, original: Callable[..., Any], places: Mapping[str, int]
) -> Callable[..., Any]:
    """A model's forward with the ranks of a pack all around. It gets the pack, without them, for `given`."""

    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments(places, args, kwargs)
        if pack is not None and arguments.get("packed_seq_params") is given:
            arguments.put("packed_seq_params", graphs.view.of_layers(pack))
        with graphs.view.of_pack(pack):
            return original(model, *arguments.args, **arguments.kwargs)

    return run


def decided_as_given(batch: MicroBatch | EagerReason) -> EagerReason | None:
    """Why a micro-batch runs as it was given; None where it was decided to run on a canonical pack."""
    return batch if isinstance(batch, EagerReason) else None


def places_of(method: Callable[..., Any]) -> Mapping[str, int]:
    """Where each argument of a method stands that may be given by position, `self` not counted."""
    _self, *parameters = inspect.signature(method).parameters.values()
    return {
        parameter.name: place
        for place, parameter in enumerate(parameters)
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


class Arguments:
    """The arguments of one call, by name, without the work of binding them in each micro-batch.

    Args:
        places: of the names among positional arguments.
        args: by position, without `self`.
        kwargs: by keyword.
    """

    def __init__(self, places: Mapping[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._places = places
        self.args = args
        self.kwargs = kwargs

    def get(self, name: str) -> Any:
        """An argument; None if it was not given."""
        place = self._places.get(name, len(self.args))
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)

    def put(self, name: str, value: Any) -> None:
        """Replaces an argument if it was given, otherwise passes it by keyword."""
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

    def __init__(self, loop: LayerLoop, given: Arguments) -> None:
        self._loop = loop
        self._further = {name: given.get(name) for name in ("rotary_pos_emb", "padding_mask")}

    def __call__(self, hidden_states: Tensor, **arguments: Any) -> tuple[Tensor, None]:
        return self._loop(hidden_states, **arguments, **self._further)


def _has_expected(
    graphs: ModelGraphs, batch: MicroBatch, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether an overridden model hands to its block what the variant's layers are captured with."""
    constants = graphs.block.constants.get(batch.key)
    further = {name: value for name, value in kwargs.items() if name != "packed_seq_params"}
    return constants is not None and not any(arg is not None for arg in args) and constants.are(further)


# Of a model's arguments those that its wrapper reads in every call.
_READ = (
    *("input_ids", "decoder_input", "packed_seq_params", "padding_mask"),
    *("inference_context", "inference_params", "output_processor", "attention_mask", "extra_block_kwargs"),
)


def _with_positional(
    kwargs: Mapping[str, Any], args: Sequence[Any], places: Mapping[str, int]
) -> Mapping[str, Any]:
    """Arguments by keyword, and of those by position the ones in `places`, which is in their order."""
    given = {**kwargs}
    for name, place in places.items():
        if place >= len(args):
            break
        given[name] = args[place]
    return given


def _padded(batch: MicroBatch, given: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A model's arguments with the capacity's constants in its pack, and rows added to each row list.

    Those hold zeros. Their losses are cut off, so that no gradient comes from them. The offsets stay as
    given: what lies behind the layers tells documents apart by them.

    Args:
        batch: the decision.
        given: the arguments.
    """
    given.put("packed_seq_params", batch.constant_params())
    if batch.variant.has_mask:
        given.put("padding_mask", batch.mask_at_entry(given.get("padding_mask")))
    if batch.entry_padding:
        for name in ROW_LISTS:
            rows: Tensor | None = given.get(name)
            if rows is not None:
                given.put(name, functional.pad(rows, (0, batch.entry_padding)))
    return given.args, given.kwargs


# What an output processor gets as the caller passed it; its hidden states are cut.
_HANDED_ON = (*ROW_LISTS, "decoder_input", "packed_seq_params")


def _shown_to_processor(batch: MicroBatch, ranks: TensorRanks, given: Arguments) -> OnGivenRows:
    """Before a model's arguments are padded: lets its output processor see what it would see without us.

    Args:
        batch: the decision.
        ranks: those that share rows.
        given: the arguments.
    """
    as_given = {name: given.get(name) for name in _HANDED_ON}
    cut = functools.partial(ranks.share_anew, tokens=batch.tokens) if batch.entry_padding else None
    shown = OnGivenRows(given.get("output_processor"), as_given, batch.tokens, cut)
    given.put("output_processor", shown)
    return shown


def _add_rows(batch: MicroBatch, ranks: TensorRanks, given: Arguments) -> None:
    """Gives the capacity's rows to the decoder's input, of which each rank has its share."""
    rows: Tensor = given.get("decoder_input")
    if not rows.requires_grad:
        # The way back is a collective, and another rank may have a use for it.
        rows = rows.detach().requires_grad_(torch.is_grad_enabled())
    given.put("decoder_input", ranks.share_anew(rows, batch.capacity.tokens))


def _cut_rows(out: Tensor, tokens: int) -> Tensor:
    """The first rows of losses [1, T] or logits [1, T, V]."""
    return out[:, :tokens]


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
            is_own = batch.is_own(given.get("rotary_pos_emb"), given.get("hidden_states"))
            given.put("packed_seq_params", batch.given_params(is_own_table=is_own))
            args, kwargs = given.args, given.kwargs
        return original(block, *args, **kwargs)

    return forward
