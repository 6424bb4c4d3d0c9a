# SPDX-License-Identifier: Apache-2.0
"""Asks a model of Megatron what it hands to its layers beside a pack: rotary tables and the like."""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from megagraph.megatron.seams import GPT_FORWARD, hybrid_seams

__all__ = ["layer_constants"]

# What `GPTModel._preprocess` returns after the hidden states, in order.
_TABLES = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset", "padding_mask")


def layer_constants(
    model: nn.Module, params: Any, hidden_states: Tensor, *, is_overridden: bool = False
) -> Mapping[str, Any]:
    """What the layers are called with for a pack, less the pack, its mask and the hidden states.

    Runs no layer and reads no values of the hidden states.

    Args:
        model: a GPTModel or HybridModel.
        params: the pack.
        hidden_states: [T, 1, H], given as the decoder's input.
        is_overridden: the model's own forward is asked, and not what Megatron's is known to do.

    Raises:
        ValueError: where unfused RoPE has a table of another length than the pack declares, so that where
            positions begin cannot be told.
    """
    config: Any = model.config
    constants = _constants(model, params, hidden_states, is_overridden)
    table = constants.get("rotary_pos_emb")
    rows = table.size(0) if isinstance(table, Tensor) else params.max_seqlen_q
    if rows != params.max_seqlen_q and not config.apply_rope_fusion:
        raise ValueError(f"expected a rotary table of max_seqlen, {params.max_seqlen_q} rows, got {rows}")
    return constants


def _constants(
    model: nn.Module, params: Any, hidden_states: Tensor, is_overridden: bool
) -> Mapping[str, Any]:
    preprocess: Any = getattr(model, "_preprocess", None)
    if is_overridden or preprocess is None:
        forward = model.forward if is_overridden else _own_forward(model)
        return _handed_to_decoder(model, forward, params, hidden_states)
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


def _own_forward(model: nn.Module) -> Callable[..., Any]:
    """Megatron's forward of a hybrid model."""
    hybrid = hybrid_seams()
    assert hybrid is not None
    return types.MethodType(inspect.unwrap(hybrid[0].function()), model)


class _Handed(Exception):
    """Carries what a model hands to its decoder out of the model's forward."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class _HandsBack:
    """Stands for a decoder, and raises what it is called with."""

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def __call__(self, hidden_states: Any = None, attention_mask: Any = None, **arguments: Any) -> None:
        raise _Handed(arguments)


def _handed_to_decoder(
    model: nn.Module, forward: Callable[..., Any], params: Any, hidden_states: Tensor
) -> Mapping[str, Any]:
    """The same for a model without `_preprocess`, or one whose forward need not use it.

    The forward runs as far as the decoder, in place of which something else stands for so long.
    """
    parameters = inspect.signature(forward).parameters.values()
    given = {
        parameter.name: None
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):  # which may hand them on
        given |= dict.fromkeys(GPT_FORWARD.parameters)
    model.__dict__["decoder"] = _HandsBack(model.get_submodule("decoder"))  # found before the module
    try:
        forward(**{**given, "decoder_input": hidden_states, "packed_seq_params": params})
    except _Handed as handed:
        found = handed.arguments.items()
        return {name: value for name, value in found if name != "packed_seq_params" and value is not None}
    finally:
        del model.__dict__["decoder"]
    raise AssertionError("the model's forward did not call its decoder")
