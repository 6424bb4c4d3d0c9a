# SPDX-License-Identifier: Apache-2.0
"""Names what can be graphed: a site (one module call) and a variant (what it is captured for).

Holds no graph.
"""

import contextlib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.bank.metadata import MetadataSpec
from megagraph.decide.reasons import EagerReason

__all__ = ["CaptureError", "MetadataSpec", "SiteSpec", "VariantSpec"]


class CaptureError(RuntimeError):
    """A site could not be captured; everything of the attempt has been undone.

    Args:
        site: name of the site.
        index: its place in the chain.
        reason: how its calls are counted from now on.
        detail: the pass, the op that started last and the line of the user's code.
    """

    def __init__(self, *, site: str, index: int, reason: EagerReason, detail: str) -> None:
        super().__init__(f"{site}: {detail}")
        self.site = site
        self.index = index
        self.reason = reason
        self.detail = detail


def _call(module: nn.Module, hidden: Tensor, **arguments: Any) -> Tensor:
    out: Tensor = module(hidden, **arguments)
    return out


class SiteSpec:
    """One module call to graph. Holds its module weakly: graphs must not keep a model alive.

    Args:
        name: for reports.
        module: owns the parameters and buffers that the call uses.
        forward: maps the module, the hidden states and the variant's arguments to one tensor of as
            many rows; by default the module's own call.
    """

    def __init__(self, *, name: str, module: nn.Module, forward: Callable[..., Tensor] = _call) -> None:
        self.name = name
        self._module = weakref.ref(module)
        self._forward = forward

    @property
    def module(self) -> nn.Module:
        """The module. Raises `RuntimeError` once it is gone."""
        module = self._module()
        if module is None:
            raise RuntimeError(f"the module of site {self.name} does not exist any more")
        return module

    def call(self, hidden: Tensor, **arguments: Any) -> Tensor:
        """Runs the module eagerly."""
        return self._forward(self.module, hidden, **arguments)

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that get a gradient, each once."""
        return [param for param in self.module.parameters() if param.requires_grad]


@dataclass(frozen=True, kw_only=True)
class VariantSpec:
    """What a chain is captured for: shapes, with or without a backward pass, the calls' arguments.

    Args:
        key: the variant's place in the chain's table.
        training: capture a backward pass too.
        rows: first dimension of the hidden states.
        row_shape: their other dimensions.
        dtype: their dtype.
        metadata: named buffers.
        end_source: the source whose last entry is the pack's physical end: rows at or past it are
            zeroed in the chain's input and in the gradient that it returns; -1 for none.
        end_buffer: the metadata buffer that ends with the same entry.
        fewer_rows: the chain's input may have fewer rows than `rows`.
        arguments: keyword arguments of every site's call, from the slot's metadata buffers: these
            themselves or views of them, and constants. Asked at the capture and again where a call runs
            eager; never in a replay: megagraph/bank/arguments.py, Note [Arguments of a variant].
        name: for progress and profilers; by default the key's.
        context: entered around the variant's warm-up and capture: the mode of its modules, say.
    """

    key: Any
    training: bool
    rows: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    metadata: Mapping[str, MetadataSpec] = field(default_factory=dict)
    end_source: int = -1
    end_buffer: str | None = None
    fewer_rows: bool = False
    arguments: Callable[[Mapping[str, Tensor]], Mapping[str, Any]] = lambda buffers: {}
    name: str = ""
    context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __str__(self) -> str:
        return self.name or str(self.key)
