# SPDX-License-Identifier: Apache-2.0
"""Asks a model of Megatron what it hands to its layers beside a pack: rotary tables and the like."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megagraph.megatron.seams import HYBRID_FORWARD

__all__ = ["layer_constants"]

# What `GPTModel._preprocess` returns after the hidden states, in order.
_TABLES = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset", "padding_mask")


def layer_constants(model: nn.Module, params: Any, hidden_states: Tensor) -> Mapping[str, Any]:
    """What the layers are called with for a pack, less the pack, its mask and the hidden states.

    Runs no layer and reads no values of the hidden states.

    Args:
        model: a GPTModel or HybridModel.
        params: the pack.
        hidden_states: [T, 1, H], given as the decoder's input.

    Raises:
        ValueError: where unfused RoPE has a table of another length than the pack declares, so that where
            positions begin cannot be told.
    """
    config: Any = model.config
    constants = _constants(model, params, hidden_states)
    table = constants.get("rotary_pos_emb")
    rows = table.size(0) if isinstance(table, Tensor) else params.max_seqlen_q
    if rows != params.max_seqlen_q and not config.apply_rope_fusion:
        raise ValueError(f"expected a rotary table of max_seqlen, {params.max_seqlen_q} rows, got {rows}")
    return constants


def _constants(model: nn.Module, params: Any, hidden_states: Tensor) -> Mapping[str, Any]:
    preprocess: Any = getattr(model, "_preprocess", None)
    if preprocess is None:
        return _handed_to_hybrid_stack(model, params, hidden_states)
    accepted = inspect.signature(preprocess).parameters
    given = {
        "input_ids": None,
        "position_ids": None,
        "decoder_input": hidden_states,
        "packed_seq_params": params,
    }
    _hidden, *tables = preprocess(**{name: value for name, value in given.items() if name in accepted})
    named = zip(_TABLES, tables, strict=False)
    return {name: value for name, value in named if value is not None}


class _Handed(Exception):
    """Carries what a model hands to its decoder out of the model's forward."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def _hand_back(**arguments: Any) -> None:
    raise _Handed(arguments)


def _handed_to_hybrid_stack(model: nn.Module, params: Any, hidden_states: Tensor) -> Mapping[str, Any]:
    """The same for a HybridModel, which has no `_preprocess`.

    Its own forward runs as far as the decoder, in place of which a function stands for so long.
    """
    forward = inspect.unwrap(HYBRID_FORWARD.function())
    model.__dict__["decoder"] = _hand_back  # found before the registered module
    try:
        forward(model, None, None, None, decoder_input=hidden_states, packed_seq_params=params)
    except _Handed as handed:
        given = {"hidden_states", "attention_mask", "packed_seq_params"}
        found = handed.arguments.items()
        return {name: value for name, value in found if name not in given and value is not None}
    finally:
        del model.__dict__["decoder"]
    raise AssertionError("HybridModel.forward did not call its decoder")
