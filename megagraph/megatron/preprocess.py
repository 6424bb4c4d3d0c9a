# SPDX-License-Identifier: Apache-2.0
"""What a model hands to its layers beside a pack, rotary tables and the like, by its own answer."""

import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.megatron.seams import GPT_FORWARD, hybrid_seams

__all__ = ["Constants", "layer_constants", "writes_of"]


class Constants(dict[str, Any]):
    """Arguments that a variant's graphs were captured with, by name. None is left out."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        # The last tensor that equalled a constant, by name, and how often either had been written by then.
        self._equal: dict[str, tuple[Tensor, tuple[int, int]]] = {}

    def are(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call has just these arguments; None is as good as none."""
        given = {name: value for name, value in arguments.items() if value is not None}
        return given.keys() == self.keys() and all(
            value is self[name] or self.is_equal(name, value) for name, value in given.items()
        )

    def is_equal(self, name: str, value: Any) -> bool:
        """Whether an argument that is another object equals the one of the capture.

        Megatron keeps 32 rotary tables, over all models, and makes one that it dropped anew: an equal
        tensor is compared once, which waits for the device, and known until one of the two is written.
        """
        known = self.get(name)
        if not (isinstance(value, Tensor) and isinstance(known, Tensor)):
            return False
        writes = writes_of(value), writes_of(known)
        before, seen = self._equal.get(name, (None, None))
        if value is before and writes == seen:
            return True
        if value.shape != known.shape or value.dtype != known.dtype or not torch.equal(value, known):
            return False
        self._equal[name] = value, writes
        return True


def writes_of(tensor: Tensor) -> int:
    """How often a tensor has been written in place; one of inference mode does not say."""
    return -1 if tensor.is_inference() else tensor._version


# What `GPTModel._preprocess` returns after the hidden states, in order.
_TABLES = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset", "padding_mask")


def layer_constants(
    model: nn.Module, params: Any, hidden_states: Tensor, *, is_overridden: bool = False
) -> Mapping[str, Any]:
    """What a model calls its layers with for a pack, less the pack, its mask and the hidden states.

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
    preprocess: Any = getattr(model, "_preprocess", None)
    if is_overridden or preprocess is None:
        constants = _handed_to_decoder(model, params, hidden_states, is_overridden)
    else:
        given = {
            "input_ids": None,
            "position_ids": None,
            "decoder_input": hidden_states,
            "packed_seq_params": params,
        }
        accepted = inspect.signature(preprocess).parameters
        _hidden, *tables = preprocess(**{name: value for name, value in given.items() if name in accepted})
        constants = dict(zip(_TABLES, tables, strict=False))
    constants = {name: value for name, value in constants.items() if value is not None}
    table = constants.get("rotary_pos_emb")
    rows = table.size(0) if isinstance(table, Tensor) else params.max_seqlen_q
    if rows != params.max_seqlen_q and not config.apply_rope_fusion:
        raise ValueError(f"expected a rotary table of max_seqlen, {params.max_seqlen_q} rows, got {rows}")
    return constants


class _Handed(Exception):
    """Carries what a model hands to its decoder out of the model's forward."""

    def __init__(self, arguments: dict[str, Any]) -> None:
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
    model: nn.Module, params: Any, hidden_states: Tensor, is_overridden: bool
) -> dict[str, Any]:
    """Of a model without `_preprocess`, or one whose forward need not use it.

    The forward runs as far as the decoder, in place of which something else stands for so long.
    """
    forward = model.forward
    if not is_overridden:  # a hybrid model
        hybrid = hybrid_seams()
        assert hybrid is not None
        forward = types.MethodType(inspect.unwrap(hybrid[0].function()), model)
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
        return {name: value for name, value in handed.arguments.items() if name != "packed_seq_params"}
    finally:
        del model.__dict__["decoder"]
    raise AssertionError("the model's forward did not call its decoder")
