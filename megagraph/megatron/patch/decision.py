# SPDX-License-Identifier: Apache-2.0
"""Which graphs take a micro-batch, decided where it enters a model: by a call, or by the plan of its nodes.

What the model is given then holds the capacity's pack, if it runs on that.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megagraph.megatron.graphs.dispatcher import MicroBatch
from megagraph.megatron.graphs.model import GraphedModel
from megagraph.megatron.parallel.model_parallel import TensorRanks
from megagraph.megatron.plugin import Plugin
from megagraph.reasons import EagerReason

__all__ = ["decide"]

# The row lists among a model's arguments, [1, T] each, beside its padding mask.
_ROW_LISTS = ("input_ids", "position_ids", "labels", "loss_mask")
# What an output processor gets as the caller passed it; its hidden states are cut.
_HANDED_ON = (*_ROW_LISTS, "decoder_input", "packed_seq_params")


def decide(
    plugin: Plugin,
    graphs: GraphedModel,
    model: Any,
    given: dict[str, Any],
    params: Any,  # the pack, with the ranks that share it
    tokens: int,
    against: EagerReason | None,  # that was found already
) -> MicroBatch | EagerReason:
    """Decides on the micro-batch that a model is `given`; captures first, if that is due inside of a step.

    Puts the capacity's constants into the pack that is given, and adds rows where the model is entered. The
    offsets stay as given: what lies behind the layers tells documents apart by them. Losses of rows that are
    added are cut off, so that no gradient comes from them. Returns the micro-batch, or why it runs as given
    after all: there is no capacity yet, it is not known what the layers will get, something fits the rows
    that were given alone, or asks the block for other results.
    """
    dispatcher, entries, ranks = graphs.dispatcher, graphs.entries, graphs.tensor
    batch: MicroBatch | EagerReason | None = against
    graphs.unlearned = None
    if batch is None:
        # Layers get as many of its rows as they have of hidden states.
        from_ids = getattr(model, "pre_process", True) and given.get("decoder_input") is None
        is_shared = not ranks.shards_sequence or (ranks.is_gpt and from_ids)
        mask = given.get("padding_mask")
        entered = params, tokens, mask, is_shared, entries.are_megatrons, entries.are_settled
        batch = dispatcher.enter(*entered)
        if isinstance(batch, MicroBatch) and not batch.is_ready:
            if batch.capacity is None:
                graphs.unlearned = batch
                return EagerReason.WARMING_UP
            if graphs.running is None and plugin.capture_inside(graphs):
                batch = dispatcher.enter(*entered)
    if isinstance(batch, EagerReason):
        return batch
    processor, is_foreign = given.get("output_processor"), not graphs.entries.are_megatrons
    if is_foreign and not graphs.has_constants(batch):
        return EagerReason.WARMING_UP
    if given.get("attention_mask") is not None or given.get("extra_block_kwargs") is not None:
        return EagerReason.SIGNATURE_CHANGED
    if is_longer := ranks.shards_sequence and batch.entry_padding:
        # Of a pipeline's stage other stages see the rows, too.
        is_inner = not getattr(model, "pre_process", True) or not getattr(model, "post_process", True)
        if is_inner or is_foreign or (processor is not None and batch.tokens % ranks.size):
            return EagerReason.SIGNATURE_CHANGED
        reason = None if batch.key.by_token else graphs.reason_against_rows()
        if reason is not None and not batch.as_given(reason):
            return reason
    as_given = {} if processor is None else dict(given)
    batch.enter(given, _ROW_LISTS)
    if is_longer and batch.entry_padding and (rows := given.get("decoder_input")) is not None:
        if not rows.requires_grad:
            # The way back is a collective, and another rank may have a use for it.
            rows = rows.detach().requires_grad_(torch.is_grad_enabled())
        given["decoder_input"] = ranks.share_anew(rows, batch.tokens + batch.entry_padding)
    if processor is not None and not is_foreign:  # whose call of it is its own
        given["output_processor"] = _of_given_rows(batch, ranks, as_given, dict(given))
    return batch


def _of_given_rows(
    batch: MicroBatch, ranks: TensorRanks, as_given: Mapping[str, Any], passed: Mapping[str, Any]
) -> Callable[..., Any]:
    """An output processor that hands the caller's own what it would be handed without us.

    What that returns is of the rows that were given, whatever it is. What the model has made of what it was
    `passed` stays what it is, less the rows that were added.
    """
    tokens, has_more = batch.tokens, bool(batch.entry_padding)

    def process(**handed: Any) -> Any:
        if has_more:
            handed["hidden_states"] = ranks.share_anew(handed["hidden_states"], tokens)
        for name in (name for name in _HANDED_ON if handed.get(name) is not None):
            if handed[name] is passed.get(name):
                handed[name] = as_given.get(name)
            elif has_more and name == "decoder_input":  # the embedding's, for one
                handed[name] = ranks.share_anew(handed[name], tokens)
            elif has_more and name in _ROW_LISTS:
                handed[name] = handed[name][:, :tokens]
        return as_given["output_processor"](**handed)

    return process
