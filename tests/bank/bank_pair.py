# SPDX-License-Identifier: Apache-2.0
"""One model twice: under a bank, and plain eager beside it. Whatever differs in a bit fails."""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph.bank.bank import Bank, BankOptions
from megagraph.bank.rng import RngTracker
from megagraph.bank.sites import EagerPart, MetadataSpec, SiteSpec, VariantSpec
from megagraph.decide.reasons import EagerReason

WIDTH = 8
ROWS = 6

_banks: weakref.WeakSet[Bank] = weakref.WeakSet()


def new_bank(
    modules: Sequence[nn.Module | SiteSpec | EagerPart], device: str, *, num_slots: int = 1, **options: Any
) -> Bank:
    """A bank that poisons freed slots, and that ends with its test."""
    bank = Bank(modules, device, num_slots=num_slots, options=BankOptions(poison=True, **options))
    _banks.add(bank)
    return bank


def release_banks() -> None:
    for bank in list(_banks):
        bank.release()
    _banks.clear()


class Block(nn.Module):
    """A pre-norm residual block: its backward saves inputs, outputs and statistics."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        return out


def blocks(num_blocks: int = 3) -> list[nn.Module]:
    return [Block() for _ in range(num_blocks)]


def variant(
    key: Any = "train",
    *,
    training: bool = True,
    rows: int = ROWS,
    dtype: torch.dtype = torch.float32,
    fewer_rows: bool = False,
    metadata: Mapping[str, MetadataSpec] | None = None,
    end_source: int = -1,
    end_buffer: str | None = None,
    arguments: Callable[[Mapping[str, Tensor]], Mapping[str, Any]] = lambda buffers: {},
) -> VariantSpec:
    return VariantSpec(
        key=key,
        training=training,
        rows=rows,
        row_shape=(WIDTH,),
        dtype=dtype,
        metadata={} if metadata is None else metadata,
        end_source=end_source,
        end_buffer=end_buffer,
        fewer_rows=fewer_rows,
        arguments=arguments,
    )


def give_main_grads(layers: Sequence[nn.Module]) -> list[object]:
    """As Megatron's DDP does: a hook on each gradient accumulator. Returns what has to stay alive."""
    accumulators: list[object] = []
    for param in (param for layer in layers for param in layer.parameters()):
        if not param.requires_grad:
            continue
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)  # type: ignore[attr-defined]
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        accumulator = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

        def add(*_: object, param: Any = param) -> None:
            is_zeroed = getattr(param, "zero_out_wgrad", False)
            if param.grad is not None and (not param.grad_added_to_main_grad or is_zeroed):
                param.main_grad.add_(param.grad)
            param.grad = None

        accumulator.register_hook(add)
        accumulators.append(accumulator)
    return accumulators


def rng_states(device: str) -> list[Tensor]:
    """The state of torch's default generators."""
    states = [torch.get_rng_state()]
    if device == "cuda":
        states.append(torch.cuda.get_rng_state())
    return states


def run_eager(layers: Sequence[nn.Module], hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden)
    return hidden


@dataclass
class MicroBatch:
    """One micro-batch through both; `reason` says why the whole of it ran eager."""

    input: Tensor
    output: Tensor
    eager_input: Tensor
    eager_output: Tensor
    reason: EagerReason | None

    def check_outputs(self) -> None:
        assert_same_bits(self.output, self.eager_output, "output")

    def backward(self, grad: Tensor | None = None) -> None:
        if grad is None:
            grad = torch.randn_like(self.eager_output)
        torch.autograd.backward(self.output, grad.clone())
        torch.autograd.backward(self.eager_output, grad.clone())
        assert_same_bits(self.input.grad, self.eager_input.grad, "gradient of the input")


class Pair:
    """The same layers under a bank and eager."""

    def __init__(
        self,
        device: str,  # of both
        layers: Sequence[nn.Module],  # moved there and copied
        *,
        num_slots: int = 1,  # of the bank
        main_grad: bool = False,  # gradients are accumulated in `main_grad`, as under Megatron's DDP
        holds_collectives: bool = False,  # its graphs do
        trackers: Sequence[RngTracker] = (),  # of the bank
    ) -> None:
        self.device = device
        self.layers = [layer.to(device) for layer in layers]
        self.eager_layers = copy.deepcopy(self.layers)
        self._accumulators = [give_main_grads(side) for side in (self.layers, self.eager_layers) if main_grad]
        self.bank = new_bank(
            self.layers, device, num_slots=num_slots, holds_collectives=holds_collectives, trackers=trackers
        )

    def capture(self, *variants: VariantSpec) -> "Pair":
        self.bank.capture(variants or [variant()])
        return self

    def input(self, rows: int = ROWS, *, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(rows, WIDTH, device=self.device).to(dtype)

    def forward(
        self, hidden: Tensor | None = None, key: Any = "train", *, requires_grad: bool = True
    ) -> MicroBatch:
        """One micro-batch through both, as a host would run it; outputs are compared."""
        if hidden is None:
            hidden = self.input()
        x, eager_x = (hidden.detach().clone().requires_grad_(requires_grad) for _ in range(2))
        with self.bank.micro_batch(key) as reason:
            if reason is None:
                out = self.bank(x)
            else:
                self.bank.core.count_eager(int(reason), len(self.layers))
                out = run_eager(self.layers, x)
        micro_batch = MicroBatch(x, out, eager_x, run_eager(self.eager_layers, eager_x), reason)
        micro_batch.check_outputs()
        self.check_counters()
        return micro_batch

    def step(self, hidden: Tensor | None = None, key: Any = "train") -> EagerReason | None:
        """Forward and backward of one micro-batch through both; everything is compared."""
        micro_batch = self.forward(hidden, key)
        micro_batch.backward()
        self.check_state()
        return micro_batch.reason

    def update_weights(self) -> None:
        """An optimizer step, in place, on both."""
        with torch.no_grad():
            for side in (self.layers, self.eager_layers):
                for param in (param for layer in side for param in layer.parameters()):
                    grad = getattr(param, "main_grad", param.grad)
                    if grad is not None:
                        param.sub_(grad.to(param.dtype), alpha=0.1)

    def check_state(self) -> None:
        """Parameters, every gradient and every buffer."""
        for layer, eager_layer in zip(self.layers, self.eager_layers, strict=True):
            for (name, param), eager in zip(layer.named_parameters(), eager_layer.parameters(), strict=True):
                assert_same_bits(param, eager, name)
                assert_same_bits(param.grad, eager.grad, f"{name}.grad")
                main_grads = (getattr(p, "main_grad", None) for p in (param, eager))
                assert_same_bits(*main_grads, f"{name}.main_grad")  # type: ignore[misc]
            for (name, buffer), eager in zip(layer.named_buffers(), eager_layer.buffers(), strict=True):
                assert_same_bits(buffer, eager, name)

    def check_counters(self) -> None:
        counters = self.bank.counters()
        calls, replays = counters.pop("calls"), counters.pop("replays")
        assert replays + sum(counters.values()) == calls

    def eager_calls(self) -> dict[str, int]:
        """The reasons counted so far, without those that are zero."""
        counters = self.bank.counters()
        return {name: count for name, count in counters.items() if count and name not in ("calls", "replays")}
