# SPDX-License-Identifier: Apache-2.0
"""Packs of changing lengths in one captured capacity: metadata, counters, and rows past the end."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from bank_pair import PACKS, TOKENS, WIDTH, Kind, PackPair, new_bank, variant
from offsets import offsets
from torch import Tensor, nn

from megagraph._C import MetadataSpec


def test_packs_of_any_length_have_the_bits_of_the_canonical_pack(device: str) -> None:
    pair = PackPair(device, num_slots=2).capture()
    assert pair.tokens_seen.item() == 0
    seen = 0
    for lengths, rows in PACKS * 2:
        pair.pack(lengths, rows).backward()
        pair.check_state()
        seen += sum(lengths)
        assert pair.tokens_seen.item() == seen
    calls = len(PACKS) * 2 * 3
    assert pair.counts() == {"calls": calls, "replays": calls}


def test_the_gradient_of_an_inner_input_has_its_rows_too(device: str) -> None:
    pair = PackPair(device).capture()
    leaf = torch.randn(6, WIDTH, device=device, requires_grad=True)
    with pair.bank.micro_batch("train", [offsets([2, 3], device)]):
        out = pair.bank(leaf * 2)
    out.sum().backward()
    assert leaf.grad is not None and leaf.grad.shape == (6, WIDTH)
    assert leaf.grad[:5].all() and not leaf.grad[5:].any()


def test_the_bank_takes_fewer_rows_and_no_more(device: str) -> None:
    pair = PackPair(device).capture()
    first, second, _third = pair.bank.sites
    with pair.bank.micro_batch("train", [offsets([2], device)]):
        assert first(torch.randn(TOKENS + 1, WIDTH, device=device)) is NotImplemented
        assert first(torch.randn(2, WIDTH + 1, device=device)) is NotImplemented
        out = first(torch.randn(2, WIDTH, device=device))
        assert out.shape == (TOKENS, WIDTH)
        assert second(out[:2]) is NotImplemented
    assert pair.eager_calls() == {"SIGNATURE_CHANGED": 3}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda d: [offsets([1] * 5, d)], r"expected up to 5 entries, got 6", id="too many"),
        pytest.param(lambda d: [offsets([1], d).long()], r"expected contiguous Int", id="dtype"),
        pytest.param(lambda d: [offsets([1, 1, 1], d)[::2]], r"expected contiguous Int", id="strides"),
        pytest.param(lambda d: [offsets([1], d)[:0]], r"metadata source 0: expected", id="empty"),
        pytest.param(lambda d: [offsets([1], "meta")], r"metadata source 0: expected", id="device"),
        # It raised `vector::_M_range_check`, for the pack's end after a slot had been leased.
        pytest.param(lambda d: [], r"expected 1 metadata sources, got 0", id="missing"),
    ],
)
def test_unfit_metadata_is_an_error_that_leases_nothing(device: str, make: Any, expected: str) -> None:
    pair = PackPair(device).capture()
    with pytest.raises(ValueError, match=expected):
        pair.bank.begin(pair.bank.variants["train"], make(device), True)
    assert pair.bank.all_free() and pair.bank.slot_index == -1
    assert pair.counts() == {}


# name: specification, example, content after packs of [3, 2] and of [6]
METADATA: dict[str, tuple[dict[str, Any], Tensor, list[list[int]]]] = {
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
    "mask of the end": (
        {"kind": Kind.MASK, "source": -1},
        torch.zeros(8, dtype=torch.bool),
        [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]],
    ),
    "mask": (
        {"kind": Kind.MASK, "source": 1},
        torch.zeros(8, dtype=torch.bool),
        [[0, 1, 0, 0, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0, 1, 1]],
    ),
    "copy": ({"kind": Kind.COPY, "source": 2}, torch.full((3,), 7), [[4, 5, 0], [4, 5, 0]]),
    "count": ({"kind": Kind.COUNT, "source": 0, "shared": True}, torch.full((1,), 100), [[105], [111]]),
    "constant": ({"kind": Kind.COPY, "source": -1}, torch.tensor([1, 2]), [[1, 2], [1, 2]]),
}


@pytest.mark.parametrize("name", METADATA)
def test_staging_and_calls_that_run_eager_have_metadata_as_it_was_specified(device: str, name: str) -> None:
    specification, example, contents = METADATA[name]
    example = example.clone().to(device)
    buffers: list[Tensor] = []

    def look(given: Mapping[str, Tensor]) -> Mapping[str, Any]:
        buffers.append(given["it"])
        return {}

    layer = nn.Linear(WIDTH, WIDTH).to(device)
    bank = new_bank([layer], device)
    spec = MetadataSpec(example=example, **specification)
    own, before = spec.buffer(), spec.buffer().clone()
    bank.capture([variant(rows=TOKENS, metadata={"it": spec}, end_source=0, fewer_rows=True, arguments=look)])
    mask = torch.tensor([0, 1, 0, 0, 0, 0, 0], dtype=torch.bool, device=device)
    copied = torch.tensor([4, 5], device=device)
    is_own = spec.is_staged and name != "count"
    for lengths, content in zip(([3, 2], [6]), contents, strict=True):
        sources = [offsets(lengths, device), mask, copied]
        if is_own:
            assert torch.equal(own, before)
        eager = spec.content(own, sources, 0)
        assert eager.dtype == own.dtype and eager.shape == own.shape and (eager is not own) == is_own
        assert not is_own or eager.long().tolist() == content
        with bank.micro_batch("train", sources) as reason:
            assert reason is None
            bank(torch.randn(7, WIDTH, device=device))
        assert buffers[0].long().tolist() == content
    assert (buffers[0] is example) == specification.get("shared", False)


def test_what_staging_cannot_do_is_an_error(device: str) -> None:
    """A mask without an end read through a null pointer; one launch stages a limited number of buffers."""
    layer = nn.Linear(WIDTH, WIDTH).to(device)
    bank = new_bank([layer], device)
    mask = MetadataSpec(kind=Kind.MASK, example=torch.zeros(6, dtype=torch.bool, device=device), source=0)
    with pytest.raises(ValueError, match=r"a mask needs the pack's end"):
        bank.capture([variant(metadata={"mask": mask})])
    spec = MetadataSpec(kind=Kind.OFFSETS, example=torch.zeros(3, dtype=torch.int32, device=device), source=0)
    bank.capture([variant(metadata={str(i): spec for i in range(16)})])
    with (
        bank.micro_batch("train", [offsets([2], device)]),
        pytest.raises(RuntimeError, match=r"takes up to 16 buffers"),
    ):
        bank(torch.randn(6, WIDTH, device=device))
    assert bank.all_free()
