# SPDX-License-Identifier: Apache-2.0
"""An MLP whose output depends on a value of each kind that a captured layer's Python may read."""

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_rig import OPTIONS
from torch import Tensor, nn

WIDTH = OPTIONS.hidden


class Choice(enum.Enum):
    """What a module may be told to do."""

    PLAIN = 1
    NEGATED = 2


@dataclass
class Knobs:
    """A configuration of its own."""

    gain: float = 1.0
    inner: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(gain=1.0))


def identity(hidden: Tensor) -> Tensor:
    """As it came."""
    return hidden


def scaled(hidden: Tensor, by: float = 1.25) -> Tensor:
    """Multiplied."""
    return hidden * by


class Adapter(nn.Module):
    """A low-rank path beside a module, as adapters of Megatron-Bridge and PEFT have it.

    Args:
        inner: the module, frozen or not.
        seed: of the weights.
    """

    def __init__(self, inner: Any, seed: int = 3) -> None:
        super().__init__()
        self.inner = inner
        generator = torch.Generator().manual_seed(seed)
        self.paths = nn.ParameterDict()
        for name in ("first", "second"):
            for shape, side in (((4, WIDTH), "down"), ((WIDTH, 4), "up")):
                values = torch.empty(shape).normal_(0, 0.2, generator=generator)
                self.paths[f"{name}_{side}"] = nn.Parameter(values.to(OPTIONS_DTYPE))
        self._adapter_enabled = True
        self.active = ["first"]
        self.scaling = {"first": 1.0, "second": 0.5}
        self.is_merged = False

    def low_rank(self, hidden: Tensor, name: str) -> Tensor:
        """One path."""
        down, up = self.paths[f"{name}_down"], self.paths[f"{name}_up"]
        return nn.functional.linear(nn.functional.linear(hidden, down), up) * self.scaling[name]

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.inner(hidden, *args, **kwargs)
        if self._adapter_enabled and not self.is_merged:
            for name in self.active:
                out = out + self.low_rank(hidden, name)
        return out, bias


OPTIONS_DTYPE = torch.bfloat16 if OPTIONS.bf16 else torch.float32


class Probe(nn.Module):
    """An MLP whose output depends on a value of each kind.

    Args:
        inner: Megatron's MLP.
    """

    shared = 1.0
    config: Any

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = Adapter(inner)
        self.config = inner.config
        self.knobs = Knobs()
        self.number, self.count, self.flag = 1.0, 1, True
        self.text, self.choice, self.dtype = "plain", Choice.PLAIN, torch.float32
        self.shape: tuple[Any, ...] = (1.0, (1.0,))
        self.maybe: float | None = None
        self.names, self.table = ["plain"], {"gain": 1.0}
        self.function: Callable[[Tensor], Tensor] = identity
        self.partial = functools.partial(scaled, by=1.0)
        device = inner.linear_fc1.weight.device
        self.vector = torch.ones(WIDTH, device=device, dtype=OPTIONS_DTYPE)
        self.register_buffer("offset", torch.zeros(WIDTH, device=device, dtype=OPTIONS_DTYPE))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.gate: nn.Module = nn.Identity()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Probe":
        super()._apply(fn, recurse)
        self.vector = fn(self.vector)  # as modules do that keep tensors in plain attributes
        return self

    @property
    def computed(self) -> float:
        """From a property."""
        return 1.0

    def factor(self) -> float:
        """What plain values make of the output."""
        gains = (self.number, self.count, self.shared, self.computed, self.knobs.gain, self.knobs.inner.gain)
        found = 1.0
        for gain in (*gains, self.shape[0], self.shape[1][0], self.table["gain"], self.maybe or 1.0):
            found *= gain
        for is_other in (
            not self.flag,
            self.text == "negated",
            self.choice is Choice.NEGATED,
            self.dtype is torch.float16,
            "negated" in self.names,
            not self.training,
            getattr(self.config, "probe_gain", 1.0) != 1.0,
        ):
            found *= -0.5 if is_other else 1.0
        return found

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.inner(hidden, *args, **kwargs)
        out = self.partial(self.function(self.gate(out * self.factor())))
        return self.norm(out + self.offset[:WIDTH]) * self.vector, bias


def probes_in_place_of_mlps(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every layer that is made has a `Probe` around its MLP."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    original = TransformerLayer.__init__

    def changed(layer: Any, *args: Any, **kwargs: Any) -> None:
        original(layer, *args, **kwargs)
        layer.mlp = Probe(layer.mlp)

    monkeypatch.setattr(TransformerLayer, "__init__", changed)
