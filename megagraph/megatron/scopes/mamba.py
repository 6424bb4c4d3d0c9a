# SPDX-License-Identifier: Apache-2.0
"""Scope: a Mamba layer of a hybrid model. It has no halves, and is graphed whole or not at all.

| enters | runs | leaves |
|---|---|---|
| hidden states; the document of each row | norm, mixer, dropout, residual | hidden states |

The mixer carries a state from row to row. Where it begins anew is what the pack says: `seq_idx` of
`PackedSeqParams`, or, in releases without that field, its offsets, of which each mixer makes the same.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megagraph.megatron.scopes.halves import Half

__all__ = ["MAMBA", "given_to_mamba", "is_mamba"]


def is_mamba(layer: nn.Module) -> bool:
    """Whether it is a layer of Megatron's `MambaLayer`, or of a class derived from it."""
    from megatron.core.ssm.mamba_layer import MambaLayer

    return isinstance(layer, MambaLayer)


# What a stack hands to such layers; rotary tables and masks are for the others.
_GIVEN = frozenset({"attention_mask", "packed_seq_params"})


def given_to_mamba(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of a block's arguments those that a Mamba layer takes."""
    return {name: value for name, value in arguments.items() if name in _GIVEN}


def _run(layer: Any, hidden_states: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    out: Tensor = layer(hidden_states=hidden_states, **given_to_mamba(arguments))
    return out


MAMBA = Half(
    name="mamba",
    core="mixer",
    children=("norm", "mixer", "mamba_bda"),
    run=_run,
    accepts=is_mamba,
)
