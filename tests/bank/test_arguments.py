# SPDX-License-Identifier: Apache-2.0
"""Arguments of a variant: those that would go stale are errors, and a call that runs eager has its own."""

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from bank_pair import PACKS, TOKENS, WIDTH, Kind, PackPair, RunningBank, canonical, new_bank, variant
from offsets import offsets
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph import _C
from megagraph.decide.reasons import EagerReason

Arguments = Callable[[Mapping[str, Tensor]], Mapping[str, Any]]


@dataclass
class Params:
    """As Megatron's packs: tensors and numbers in one object."""

    cu_seqlens: Tensor
    longest: Any = 4


class Takes(nn.Module):
    """Scales by a constant, whatever else it is given."""

    def forward(self, hidden: Tensor, factor: Tensor | None = None, **_others: Any) -> Tensor:
        return hidden * 2 if factor is None else hidden * factor


TAKES = Takes()


def captured(device: str, arguments: Arguments) -> RunningBank:
    bank = new_bank([TAKES], device, num_slots=2)
    metadata = {
        "cu": _C.MetadataSpec(kind=Kind.OFFSETS, example=offsets([3, 4, 0], device), source=0),
        "mask": _C.MetadataSpec(kind=Kind.MASK, example=torch.zeros(TOKENS, dtype=torch.bool, device=device)),
        "table": _C.MetadataSpec(kind=Kind.COPY, example=torch.arange(WIDTH, device=device).float()),
    }
    spec = variant(
        training=False, rows=TOKENS, metadata=metadata, end_source=0, fewer_rows=True, arguments=arguments
    )
    bank.capture([spec])
    return bank


DERIVED: dict[str, tuple[Arguments, str]] = {
    "a copy": (lambda given: {"starts": given["cu"][:-1].clone()}, "starts"),
    "inside a list": (lambda given: {"all": [given["cu"], given["cu"] + 1]}, r"all\[1\]"),
    "inside a dictionary": (lambda given: {"all": {"a": given["cu"].float()}}, r"all\['a'\]"),
    "inside an object": (lambda given: {"params": Params(given["cu"] * 2)}, r"params\.cu_seqlens"),
    "a number": (lambda given: {"params": Params(given["cu"], int(given["cu"].max()))}, r"params\.longest"),
    "a mask whose example is empty": (lambda given: {"valid": ~given["mask"]}, "valid"),
    "a shape": (lambda given: {"rows": torch.zeros(int(given["cu"][-1]))}, "rows"),
    "a choice": (lambda given: {"some": 1} if given["cu"][1] else {}, "some"),
}


@pytest.mark.parametrize(("arguments", "name"), DERIVED.values(), ids=DERIVED.keys())
def test_an_argument_that_was_computed_from_metadata_is_an_error(
    device: str, arguments: Arguments, name: str
) -> None:
    """It kept the example's value in every replay, and its memory was freed after the capture."""
    with pytest.raises(
        ValueError, match=rf"argument {name} is computed from the content of a metadata buffer"
    ):
        captured(device, arguments)


def test_arguments_that_bear_one_content_only_are_an_error(device: str) -> None:
    def arguments(given: Mapping[str, Tensor]) -> Mapping[str, Any]:
        assert given["cu"][-1] == 7, "another pack"
        return {}

    with pytest.raises(ValueError, match=r"depend on the content of .* raise AssertionError: another pack"):
        captured(device, arguments)


def test_buffers_views_constants_and_what_comes_of_constants_are_no_error(device: str) -> None:
    table = torch.randn(WIDTH, device=device)

    def arguments(given: Mapping[str, Tensor]) -> Mapping[str, Any]:
        assert given["table"].tolist() == list(range(WIDTH))
        return {
            "factor": table,
            "params": Params(given["cu"]),
            "views": (given["cu"][1:], given["mask"].view(2, -1), torch.full((), torch.nan)),
            "others": {"rows": given["cu"].numel(), "name": "a name", "none": None, "made": table * 2},
            "of_a_constant": given["table"] + 1,
            "meta": torch.empty(3, device="meta"),
        }

    seen: list[Mapping[str, Tensor]] = []
    bank = captured(device, lambda given: seen.append(given) or arguments(given))  # type: ignore[func-returns-value]
    assert not bank.failures
    assert seen[0]["cu"].tolist() == [0, 3, 7, 7] and not seen[0]["mask"].any()
    x = torch.randn(7, WIDTH, device=device)
    with torch.no_grad(), bank.micro_batch("train", [offsets([5, 2], device)]) as reason:
        assert reason is None
        assert_same_bits(bank(x)[:7].clone(), x * table, "output")


def test_constants_live_as_long_as_the_graphs_that_read_them(device: str) -> None:
    """Nobody held one that `arguments` had made: a replay read freed memory."""
    made: list[weakref.ref[Tensor]] = []

    def arguments(_given: Mapping[str, Tensor]) -> Mapping[str, Any]:
        factor = torch.full((WIDTH,), 3.0, device=device)
        made.append(weakref.ref(factor))
        return {"factor": factor}

    bank = captured(device, arguments)
    gc.collect()
    alive = [ref() for ref in made]
    assert sum(it is not None for it in alive) == 2, "one for each slot"
    strangers = [torch.full((WIDTH,), torch.nan, device=device) for _ in range(50)]
    x = torch.randn(7, WIDTH, device=device)
    with torch.no_grad(), bank.micro_batch("train", [offsets([7], device)]):
        assert_same_bits(bank(x)[:7].clone(), x * 3, "output")
    del strangers, alive
    bank.release()
    gc.collect()
    assert all(ref() is None for ref in made)


@pytest.mark.parametrize("eager_sites", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_modules_of_a_pack_that_run_eager_have_the_bits_of_their_graphs(
    device: str, eager_sites: tuple[int, ...]
) -> None:
    """They were called without arguments, on the rows as given."""
    pair = PackPair(device, num_slots=2)
    for index in eager_sites:
        pair.bank.keep_eager(index, EagerReason.CAPTURE_FAILED)
    pair.capture()
    for packs in itertools.pairwise(PACKS):
        # The second one stages its offsets before the first one's backward has run.
        flights = [pair.pack(*pack) for pack in packs]
        while flights:
            flights.pop(0).backward()
        pair.check_state()
    calls = 2 * (len(PACKS) - 1)
    assert pair.bank.counters()["CAPTURE_FAILED"] == calls * len(eager_sites)
    assert pair.bank.counters()["replays"] == calls * (3 - len(eager_sites))


@pytest.mark.parametrize("has_end", [True, False], ids=["a pack", "no pack"])
def test_an_input_that_no_graph_takes_has_the_arguments_and_rows_of_its_variant(
    device: str, has_end: bool
) -> None:
    """An argument's default took the place of the variant's, without a word."""

    class Scales(nn.Module):
        def forward(self, hidden: Tensor, factor: float = 1.0) -> Tensor:
            return hidden * factor + 1

    modules = [Scales(), Scales()]
    bank = new_bank(modules, device)
    spec = variant(training=False, rows=TOKENS, fewer_rows=True, arguments=lambda _given: {"factor": 3.0})
    bank.capture([dataclasses.replace(spec, end_source=0 if has_end else -1)])
    x = torch.randn(WIDTH, 6, device=device).t()  # in a layout that was not captured
    outs = []
    for given in (x, x.contiguous()):
        with torch.no_grad(), bank.micro_batch("train", [offsets([4], device)]) as reason:
            assert reason is None
            outs.append(bank(given).clone())
    assert bank.counters()["SIGNATURE_CHANGED"] == 1 and bank.counters()["replays"] == 3
    assert_same_bits(*outs)
    assert_same_bits(outs[0], (canonical(x, 4 if has_end else 6) * 3 + 1) * 3 + 1, "output")


def test_a_variant_in_flight_is_not_held_by_the_bank(device: str) -> None:
    bank = captured(device, lambda _given: {})
    sources = [offsets([7], device)]
    source = weakref.ref(sources[0])
    with torch.no_grad(), bank.micro_batch("train", sources):
        pass
    del sources
    gc.collect()
    assert source() is None
    bank.release()
    assert not bank.captured
