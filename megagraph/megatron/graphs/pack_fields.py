# SPDX-License-Identifier: Apache-2.0
"""Fields of `PackedSeqParams`: those that a release has, and those that stay."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = [
    "copy_foreign_attributes",
    "fields_of",
    "new_params",
    "put_seq_idx",
]


@functools.cache
def fields_of(params_type: type[Any]) -> frozenset[str]:
    """Names of what the release's packs carry."""
    return frozenset(inspect.signature(params_type).parameters)


def copy_foreign_attributes(given: Any, made: Any) -> None:
    """Hands on what others have set on a pack beside the fields of its class.

    Args:
        given: the pack as it was given.
        made: the pack that stands for it.
    """
    known = fields_of(type(given))  # type: ignore[arg-type]  # a class is hashable
    if len(given.__dict__) > len(known):
        made.__dict__.update({name: value for name, value in given.__dict__.items() if name not in known})


def new_params(params_type: type[Any], fields: Mapping[str, Any]) -> Any:
    """`PackedSeqParams` of these fields, less those that the release does not have."""
    known = fields_of(params_type)  # type: ignore[arg-type]  # a class is hashable
    if not known.issuperset(fields):
        fields = {name: value for name, value in fields.items() if name in known}
    return params_type(**fields)


def put_seq_idx(params: Any, seq_idx: Tensor, tokens: int) -> None:
    """Gives `seq_idx` to a pack of `tokens` rows, whose constructor would wait for the device to make it."""
    params.seq_idx, params.total_tokens = seq_idx, tokens
