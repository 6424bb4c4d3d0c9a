# SPDX-License-Identifier: Apache-2.0
"""Packs of changing lengths in one captured capacity: metadata, counters, and rows past the end."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from bank_pair import WIDTH, new_bank, variant
from offsets import offsets
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.bank import Bank
from megagraph.bank.sites import MetadataSpec, SiteSpec, VariantSpec

TOKENS, NUM_SEQS = 10, 4
Kind = _C.SegmentKind


class DocumentMixer(nn.Module):
    """Adds the mean of a row's document, after a projection. Rows past the pack make one more document."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        starts = cu_seqlens[:-1, None]
        in_document = ((rows >= starts) & (rows < cu_seqlens[1:, None])).to(hidden.dtype)
        projected = torch.tanh(self.project(hidden))
        mean = (in_document @ projected) / in_document.sum(1, keepdim=True).clamp(min=1)
        out: Tensor = hidden + projected + in_document.t() @ mean
        return out


def pack_variant(device: str, counter: Tensor, **changes: Any) -> VariantSpec:
    metadata = {
        "cu_seqlens": MetadataSpec(
            kind=Kind.OFFSETS, example=offsets([3, 4], device, NUM_SEQS + 1), source=0
        ),
        "tokens_seen": MetadataSpec(kind=Kind.COUNT, example=counter, source=0, shared=True),
    }
    arguments: dict[str, Any] = {
        "rows": TOKENS,
        "fewer_rows": True,
        "metadata": metadata,
        "end_source": 0,
        "end_buffer": "cu_seqlens",
        "arguments": lambda buffers: {"cu_seqlens": buffers["cu_seqlens"]},
    }
    return variant(**{**arguments, **changes})


def bank_of(device: str, layers: list[nn.Module], num_slots: int = 1) -> Bank:
    sites = [SiteSpec(name=f"mixer {index}", module=layer) for index, layer in enumerate(layers)]
    return new_bank(sites, device, num_slots=num_slots)


def mixers(device: str) -> tuple[list[nn.Module], list[nn.Module]]:
    layers: list[nn.Module] = [DocumentMixer().to(device) for _ in range(3)]
    return layers, copy.deepcopy(layers)


def canonical(hidden: Tensor, end: int) -> Tensor:
    """The same pack in the capacity's rows, with a tail of zeros."""
    kept = hidden[:end]
    return torch.cat([kept, kept.new_zeros(TOKENS - kept.shape[0], WIDTH)])


PACKS = [([3, 4], 7), ([10], 10), ([1, 0, 2, 3], 9), ([2, 2], 10), ([0], 2), ([5, 1, 1], 7), ([1], 1)]


def test_packs_of_any_length_have_the_bits_of_the_canonical_pack(device: str) -> None:
    layers, eager_layers = mixers(device)
    counter = torch.zeros(1, dtype=torch.int64, device=device)
    bank = bank_of(device, layers, num_slots=2)
    bank.capture([pack_variant(device, counter)])
    assert counter.item() == 0
    seen = 0
    for lengths, rows in PACKS * 2:
        end = sum(lengths)
        hidden = torch.randn(rows, WIDTH, device=device)
        hidden[end:] = torch.nan
        x, eager_x = (hidden.clone().requires_grad_() for _ in range(2))
        with bank.micro_batch("train", [offsets(lengths, device)]) as reason:
            assert reason is None
            out = bank(x)
        eager = canonical(eager_x, end)
        for layer in eager_layers:
            eager = layer(eager, offsets(lengths, device, NUM_SEQS + 1))
        assert_same_bits(out, eager, "output")
        grad = torch.randn(TOKENS, WIDTH, device=device)
        out.backward(grad)
        eager.backward(grad)
        assert x.grad is not None and x.grad.shape == (rows, WIDTH)
        assert torch.equal(x.grad[end:], torch.zeros(rows - end, WIDTH, device=device))
        assert_same_bits(x.grad, eager_x.grad, "gradient of the input")
        for layer, eager_layer in zip(layers, eager_layers, strict=True):
            for param, eager_param in zip(layer.parameters(), eager_layer.parameters(), strict=True):
                assert_same_bits(param.grad, eager_param.grad, "gradient of a parameter")
        seen += end
        assert counter.item() == seen
        del out
    counters = bank.counters()
    assert counters["replays"] == counters["calls"] == len(PACKS) * 2 * 3


def test_the_gradient_of_an_inner_input_has_its_rows_too(device: str) -> None:
    layers, _ = mixers(device)
    bank = bank_of(device, layers)
    bank.capture([pack_variant(device, torch.zeros(1, dtype=torch.int64, device=device))])
    leaf = torch.randn(6, WIDTH, device=device, requires_grad=True)
    with bank.micro_batch("train", [offsets([2, 3], device)]):
        out = bank(leaf * 2)
    out.sum().backward()
    assert leaf.grad is not None and leaf.grad.shape == (6, WIDTH)
    assert torch.equal(leaf.grad[5:], torch.zeros(1, WIDTH, device=device))


def test_the_bank_takes_fewer_rows_and_no_more(device: str) -> None:
    layers, _ = mixers(device)
    bank = bank_of(device, layers)
    bank.capture([pack_variant(device, torch.zeros(1, dtype=torch.int64, device=device))])
    with bank.micro_batch("train", [offsets([2], device)]):
        assert bank.sites[0](torch.randn(TOKENS + 1, WIDTH, device=device)) is NotImplemented
        assert bank.sites[0](torch.randn(2, WIDTH + 1, device=device)) is NotImplemented
        out = bank.sites[0](torch.randn(2, WIDTH, device=device))
        assert out.shape == (TOKENS, WIDTH)
        assert bank.sites[1](out[:2]) is NotImplemented
    assert bank.counters()["SIGNATURE_CHANGED"] == 3


def test_metadata_of_micro_batches_in_flight_is_kept_apart(device: str) -> None:
    layers, eager_layers = mixers(device)
    bank = bank_of(device, layers, num_slots=2)
    bank.capture([pack_variant(device, torch.zeros(1, dtype=torch.int64, device=device))])
    flights = []
    for lengths in ([1, 5], [3, 3]):
        x, eager_x = (torch.ones(6, WIDTH, device=device).requires_grad_() for _ in range(2))
        with bank.micro_batch("train", [offsets(lengths, device)]) as reason:
            assert reason is None
            flights.append((x, bank(x), eager_x, lengths))
    for x, out, eager_x, lengths in flights:
        eager = canonical(eager_x, 6)
        for layer in eager_layers:
            eager = layer(eager, offsets(lengths, device, NUM_SEQS + 1))
        assert_same_bits(out, eager, "output")
        out.backward(torch.ones_like(out))
        eager.backward(torch.ones_like(eager))
        assert_same_bits(x.grad, eager_x.grad, "gradient of the input")


class _ScaleByLength(torch.autograd.Function):
    """Multiplies a gradient by the length of the first document, read while the backward runs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        ctx.cu_seqlens = cu_seqlens
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.cu_seqlens[1], None


class ReadsInBackward(nn.Module):
    """As attention does: its backward reads the offsets again."""

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        out: Tensor = _ScaleByLength.apply(hidden, cu_seqlens)
        return out


def test_a_backward_reads_the_metadata_of_its_own_micro_batch(device: str) -> None:
    """The second forward stages other offsets before the first backward has read its own."""
    layers: list[nn.Module] = [ReadsInBackward(), ReadsInBackward()]
    bank = bank_of(device, layers, num_slots=2)
    bank.capture([pack_variant(device, torch.zeros(1, dtype=torch.int64, device=device))])
    flights = []
    for first in (2, 3):
        x = torch.ones(6, WIDTH, device=device).requires_grad_()
        with bank.micro_batch("train", [offsets([first, 6 - first], device)]) as reason:
            assert reason is None
            flights.append((x, bank(x), first))
    for x, out, first in flights:
        out.backward(torch.ones_like(out))
        assert_same_bits(x.grad, torch.full_like(x, first**2), "gradient of the input")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda d: offsets([1] * 5, d), r"expected up to 5 entries, got 6", id="too many"),
        pytest.param(lambda d: offsets([1], d).long(), r"expected contiguous Int", id="dtype"),
        pytest.param(lambda d: offsets([1, 1, 1], d)[::2], r"expected contiguous Int", id="strides"),
        pytest.param(lambda d: offsets([1], d)[:0], r"metadata source 0: expected", id="empty"),
        pytest.param(lambda d: offsets([1], "meta"), r"metadata source 0: expected", id="device"),
    ],
)
def test_unfit_metadata_is_an_error_that_leases_nothing(device: str, make: Any, expected: str) -> None:
    layers, _ = mixers(device)
    bank = bank_of(device, layers)
    bank.capture([pack_variant(device, torch.zeros(1, dtype=torch.int64, device=device))])
    with pytest.raises(ValueError, match=expected):
        bank.begin("train", [make(device)])
    assert bank.core.all_free() and not bank.core.is_running
    assert bank.counters()["calls"] == 0


METADATA: dict[str, tuple[dict[str, Any], Tensor, list[list[int]]]] = {
    # name: specification, example, content after packs of [3, 2] and of [6]
    "repeat the last": (
        {"kind": Kind.OFFSETS, "source": 0},
        torch.zeros(5, dtype=torch.int32),
        [[0, 3, 5, 5, 5], [0, 6, 6, 6, 6]],
    ),
    "fill": (
        {"kind": Kind.OFFSETS, "source": 0, "fill": 9},
        torch.zeros(4, dtype=torch.int32),
        [[0, 3, 5, 9], [0, 6, 9, 9]],
    ),
    "mask": (
        {"kind": Kind.MASK, "source": 1},
        torch.zeros(8, dtype=torch.bool),
        [[0, 1, 0, 0, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0, 1, 1]],
    ),
    "copy": (
        {"kind": Kind.COPY, "source": 2},
        torch.full((3,), 7, dtype=torch.int64),
        [[4, 5, 0], [4, 5, 0]],
    ),
    "count": (
        {"kind": Kind.COUNT, "source": 0, "shared": True},
        torch.full((1,), 100, dtype=torch.int64),
        [[105], [111]],
    ),
    "constant": ({"kind": Kind.COPY, "source": -1}, torch.tensor([1, 2]), [[1, 2], [1, 2]]),
}


@pytest.mark.parametrize("case", METADATA.values(), ids=METADATA.keys())
def test_staging_fills_metadata_as_it_was_specified(
    device: str, case: tuple[dict[str, Any], Tensor, list[list[int]]]
) -> None:
    specification, example, contents = case
    example = example.clone().to(device)
    buffers: list[Tensor] = []

    def look(given: Mapping[str, Tensor]) -> Mapping[str, Any]:
        buffers.append(given["it"])
        return {}

    layer = nn.Linear(WIDTH, WIDTH).to(device)
    bank = bank_of(device, [layer])
    spec = MetadataSpec(example=example, **specification)
    bank.capture([variant(rows=TOKENS, metadata={"it": spec}, end_source=0, fewer_rows=True, arguments=look)])
    mask = torch.tensor([0, 1, 0, 0, 0, 0, 0], dtype=torch.bool, device=device)
    copied = torch.tensor([4, 5], device=device)
    for lengths, content in zip(([3, 2], [6]), contents, strict=True):
        with bank.micro_batch("train", [offsets(lengths, device), mask, copied]) as reason:
            assert reason is None
            bank(torch.randn(7, WIDTH, device=device))
        assert buffers[0].long().tolist() == content
    assert (buffers[0] is example) == specification.get("shared", False)


def test_one_launch_stages_a_limited_number_of_buffers(device: str) -> None:
    spec = MetadataSpec(kind=Kind.OFFSETS, example=torch.zeros(3, dtype=torch.int32, device=device), source=0)
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    bank = bank_of(device, [layer])
    bank.capture([variant(metadata={str(i): spec for i in range(16)})])
    with (
        bank.micro_batch("train", [offsets([2], device)]),
        pytest.raises(RuntimeError, match=r"takes up to 16 buffers"),
    ):
        bank(torch.randn(6, WIDTH, device=device))
    assert bank.core.all_free()
