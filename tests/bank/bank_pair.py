# SPDX-License-Identifier: Apache-2.0
"""One model twice: under a bank, and plain eager beside it. Whatever differs in a bit fails. Layers over
packs run in graphs of one capacity, and eager on the canonical pack."""

import contextlib
import copy
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from offsets import offsets
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.bank import Bank
from megagraph.bank.capture import BankOptions
from megagraph.bank.sites import CapturedVariant, EagerPart, SiteSpec, VariantSpec
from megagraph.reasons import EagerReason

WIDTH = 8
ROWS = 6

Step = nn.Module | SiteSpec | EagerPart
banks: weakref.WeakSet[Bank] = weakref.WeakSet()  # of this test


class RunningBank(Bank):
    """A bank that runs its steps by itself, as the loop of Megatron's layers does. What is eager runs as its
    graph would: on the captured rows, with the variant's arguments over the micro-batch's own metadata."""

    _running: tuple[CapturedVariant, Sequence[Tensor]] | None = None

    @contextlib.contextmanager
    def micro_batch(self, key: Hashable, sources: Sequence[Tensor] = ()) -> Iterator[EagerReason | None]:
        with super().micro_batch(key, sources) as reason:
            if reason is None:
                self._running = self.captured[self.variants[key]], sources
            try:
                yield reason
            finally:
                self._running = None

    def run(self, hidden: Tensor, sources: Sequence[Tensor] = ()) -> Tensor:
        """All of a micro-batch, which nothing keeps eager when it begins."""
        with self.micro_batch("train", sources) as reason:
            assert reason is None
            return self(hidden)

    def __call__(self, hidden: Tensor) -> Tensor:
        given = self.replay_all(hidden)
        if given is not NotImplemented:
            return given
        given = hidden
        try:
            sites = iter(self.sites)
            for place, step in enumerate(self.steps):
                out: Any = NotImplemented if isinstance(step, EagerPart) else next(sites)(given)
                if out is NotImplemented:
                    assert self._running is not None  # a site would have raised
                    variant, sources = self._running
                    out = step.call(
                        variant.staged(given, sources) if place == 0 else given,  # held by no name
                        **variant.arguments(self.slot_index, sources),
                    )
                given = out
        except BaseException:
            given = out = None  # the traceback keeps this frame, and would keep a slot
            raise
        return given


def new_bank(modules: Sequence[Step], device: str, *, num_slots: int = 1, **options: Any) -> RunningBank:
    """A bank that poisons freed slots unless told otherwise, and that ends with its test."""
    options = {"poison": True, **options}
    bank = RunningBank(modules, device, num_slots=num_slots, options=BankOptions(**options))
    banks.add(bank)
    return bank


def pool_bytes(steps: Sequence[Step], *variants: VariantSpec, **options: Any) -> int:
    """Of a bank on a GPU that is gone again."""
    bank = new_bank(steps, "cuda", **options)
    bank.capture(variants)
    assert not bank.failures
    held = bank.pool_bytes()
    bank.release()
    return held


class Block(nn.Module):
    """A pre-norm residual block: its backward saves inputs, outputs and statistics."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Applies(nn.Module):
    """A function of the hidden states as a module, and of its weight if it `has_weight`."""

    def __init__(self, function: Callable[..., Tensor], *, has_weight: bool = False) -> None:
        super().__init__()
        self.function = function
        if has_weight:
            self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(hidden, *self.parameters())


def blocks(num_blocks: int = 3) -> list[nn.Module]:
    return [Block() for _ in range(num_blocks)]


def variant(key: Any = "train", *, training: bool = True, rows: int = ROWS, **changes: Any) -> VariantSpec:
    """Of rows of floats, `WIDTH` wide."""
    shape: dict[str, Any] = {"row_shape": (WIDTH,), "dtype": torch.float32}
    return VariantSpec(key=key, training=training, rows=rows, **{**shape, **changes})


def give_main_grads(layers: Sequence[nn.Module]) -> list[object]:
    """As Megatron's DDP does: a hook on each gradient accumulator. Returns what has to stay alive."""
    accumulators: list[object] = []
    for param in (it for layer in layers for it in layer.parameters() if it.requires_grad):
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)
        param.grad_added_to_main_grad = False
        accumulator = param.expand_as(param).grad_fn.next_functions[0][0]

        def add(*_: object, param: Any = param) -> None:
            is_zeroed = getattr(param, "zero_out_wgrad", False)
            if param.grad is not None and (not param.grad_added_to_main_grad or is_zeroed):
                param.main_grad.add_(param.grad)
            param.grad = None

        accumulator.register_hook(add)
        accumulators.append(accumulator)
    return accumulators


def unowned(tensor: Tensor) -> Tensor:
    """The same memory, which this tensor does not keep: what a kernel that reads freed memory has."""
    own = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(own.data_ptr(), tensor.device, own.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def rng_states(device: str) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def run_eager(layers: Sequence[Callable[[Tensor], Tensor]], hidden: Tensor) -> Tensor:
    return reduce(lambda given, layer: layer(given), layers, hidden)


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
        assert self.output.requires_grad == self.eager_output.requires_grad

    def backward(self, grad: Tensor | None = None) -> None:
        grad = torch.randn_like(self.eager_output) if grad is None else grad
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
        steps: Callable[[Sequence[Any]], Sequence[Any]] = lambda layers: layers,  # of the bank
        **options: Any,  # of the bank
    ) -> None:
        self.device = device
        self.layers = [layer.to(device) for layer in layers]
        self.eager_layers = copy.deepcopy(self.layers)
        self._accumulators = [give_main_grads(side) for side in (self.layers, self.eager_layers) if main_grad]
        self.bank = new_bank(steps(self.layers), device, num_slots=num_slots, **options)

    def capture(self, *variants: VariantSpec) -> "Pair":
        self.bank.capture(variants or [variant()])
        return self

    def input(self, rows: int = ROWS) -> Tensor:
        return torch.randn(rows, WIDTH, device=self.device)

    def forward(
        self,
        hidden: Tensor | None = None,
        key: Any = "train",
        *,
        requires_grad: bool = True,
        sources: Sequence[Tensor] = (),
        ours: Callable[[Tensor], Tensor] | None = None,  # in place of the bank
        eager: Callable[[Tensor], Tensor] | None = None,  # in place of the eager layers
    ) -> MicroBatch:
        """One micro-batch through both, as a host would run it; outputs are compared."""
        hidden = self.input() if hidden is None else hidden
        x, eager_x = (hidden.detach().clone().requires_grad_(requires_grad) for _ in range(2))
        with self.bank.micro_batch(key, sources) as reason:
            if reason is None:
                out = (ours or self.bank)(x)
            else:
                self.bank.count_eager(reason, len(self.layers))
                out = run_eager(self.layers, x)
        eager_out = eager(eager_x) if eager else run_eager(self.eager_layers, eager_x)
        micro_batch = MicroBatch(x, out, eager_x, eager_out, reason)
        micro_batch.check_outputs()
        self.check_counters()
        return micro_batch

    def step(self, hidden: Tensor | None = None, key: Any = "train", **how: Any) -> EagerReason | None:
        """Forward and backward of one micro-batch through both; everything is compared."""
        micro_batch = self.forward(hidden, key, **how)
        micro_batch.backward()
        self.check_state()
        return micro_batch.reason

    def evaluate(self, key: Any = "even") -> EagerReason | None:
        """A forward without gradients through both."""
        with torch.no_grad():
            return self.forward(key=key, requires_grad=False).reason

    def replay_steps(self, count: int, **eager: int) -> None:
        """Steps in which every call replays, but for as many as are counted for each reason."""
        for _ in range(count):
            assert self.step() is None
        assert self.eager_calls() == eager
        assert self.bank.counters()["replays"] == count * len(self.layers) - sum(eager.values())

    def failure(self, index: int, reason: EagerReason) -> str:
        """What is said of the only site that could not be captured."""
        (failure,) = self.bank.failures
        assert (failure.index, failure.reason) == (index, reason)
        return failure.detail

    def params(self) -> list[Any]:
        """Of the layers under the bank."""
        return [param for layer in self.layers for param in layer.parameters()]

    def counts(self) -> dict[str, int]:
        """Calls, replays and the reasons counted so far, without those that are zero."""
        return {name: count for name, count in self.bank.counters().items() if count}

    def zero_grads(self) -> None:
        """Of both."""
        nn.ModuleList([*self.layers, *self.eager_layers]).zero_grad()

    def update_weights(self) -> None:
        """An optimizer step, in place, on both."""
        with torch.no_grad():
            for param in nn.ModuleList([*self.layers, *self.eager_layers]).parameters():
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
                assert_same_bits(*main_grads, f"{name}.main_grad")
            for (name, buffer), eager in zip(layer.named_buffers(), eager_layer.buffers(), strict=True):
                assert_same_bits(buffer, eager, name)

    def check_counters(self) -> None:
        counters = self.bank.counters()
        assert counters.pop("calls") == sum(counters.values())

    def eager_calls(self) -> dict[str, int]:
        """The reasons counted so far, without those that are zero."""
        return {name: count for name, count in self.counts().items() if name not in ("calls", "replays")}


# -- packs -----------------------------------------------------------------------------------------

TOKENS, NUM_SEQS = 10, 4
Kind = _C.SegmentKind

# Lengths of documents, and rows that are given.
PACKS = [([3, 4], 7), ([10], 10), ([1, 0, 2, 3], 9), ([2, 2], 10), ([0], 2), ([5, 1, 1], 7), ([1], 1)]


class DocumentMixer(nn.Module):
    """Adds the mean of a row's document, after a projection. Rows past the pack make one more document."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        in_document = ((rows >= cu_seqlens[:-1, None]) & (rows < cu_seqlens[1:, None])).to(hidden.dtype)
        projected = torch.tanh(self.project(hidden))
        mean = (in_document @ projected) / in_document.sum(1, keepdim=True).clamp(min=1)
        return hidden + projected + in_document.t() @ mean


def canonical(hidden: Tensor, end: int, tokens: int = TOKENS) -> Tensor:
    """The same pack in the capacity's rows, with a tail of zeros."""
    kept = hidden[:end]
    return torch.cat([kept, kept.new_zeros(tokens - kept.shape[0], kept.shape[1])])


class PackPair(Pair):
    """A pair whose layers take a pack's offsets; rows past its end are given as NaN."""

    def __init__(self, device: str, layers: Sequence[nn.Module] = (), **options: Any) -> None:
        sizes = {"tokens": TOKENS, "num_seqs": NUM_SEQS, "width": WIDTH, "dtype": torch.float32}
        self.tokens, self.num_seqs, self.width, self.dtype = (options.pop(*it) for it in sizes.items())
        layers = layers or [DocumentMixer() for _ in range(3)]
        super().__init__(device, [layer.to(self.dtype) for layer in layers], **options)
        self.tokens_seen = torch.zeros(1, dtype=torch.int64, device=device)

    def variant(self, key: str = "train", **changes: Any) -> VariantSpec:
        example = offsets([3, 4], self.device, self.num_seqs + 1)
        ends = _C.MetadataSpec(kind=Kind.OFFSETS, example=example, source=0)
        seen = _C.MetadataSpec(kind=Kind.COUNT, example=self.tokens_seen, source=0, shared=True)
        arguments: dict[str, Any] = {
            **{"rows": self.tokens, "row_shape": (self.width,), "dtype": self.dtype, "fewer_rows": True},
            "metadata": {"cu_seqlens": ends, "tokens_seen": seen},
            **{"end_source": 0, "end_buffer": "cu_seqlens"},
            "arguments": lambda buffers: {"cu_seqlens": buffers["cu_seqlens"]},
        }
        return variant(key, **{**arguments, **changes})

    def capture(self, *variants: VariantSpec) -> "PackPair":
        super().capture(*(variants or [self.variant()]))
        return self

    def pack(self, lengths: Sequence[int], rows: int | None = None, **how: Any) -> MicroBatch:
        """A forward of one pack through both."""
        end = sum(lengths)
        hidden = torch.randn(rows or self.tokens, self.width, device=self.device).to(self.dtype)
        hidden[end:] = torch.nan

        def eager(given: Tensor) -> Tensor:
            ends = offsets(lengths, self.device, self.num_seqs + 1)
            layers = [partial(layer, cu_seqlens=ends) for layer in self.eager_layers]
            return run_eager(layers, canonical(given, end, self.tokens))

        return self.forward(hidden, sources=[offsets(lengths, self.device)], eager=eager, **how)
