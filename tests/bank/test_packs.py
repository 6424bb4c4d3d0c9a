# SPDX-License-Identifier: Apache-2.0
"""Packs of changing lengths in one captured capacity: metadata, what is made of it, rows past the end."""

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace as Params
from typing import Any

import pytest
import torch
from bank_pair import PACKS, TOKENS, WIDTH, Kind, PackPair, RunningBank, canonical, new_bank, variant
from offsets import offsets
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph._C import MetadataSpec
from megagraph.packs import ops
from megagraph.reasons import EagerReason


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


def test_the_bank_takes_fewer_rows_and_no_more_and_so_many_has_the_gradient(device: str) -> None:
    pair = PackPair(device).capture()
    leaf = torch.randn(6, WIDTH, device=device, requires_grad=True)
    out = pair.bank.run(leaf * 2, [offsets([2, 3], device)])
    out.sum().backward()
    assert leaf.grad is not None and leaf.grad.shape == (6, WIDTH)
    assert leaf.grad[:5].all() and not leaf.grad[5:].any()
    del out
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


NO_ENDS, NO_ROWS = torch.zeros(5, dtype=torch.int32), torch.zeros(8, dtype=torch.bool)
# kind, source, example, contents after packs of [3, 2] and of [6], and what else is specified
METADATA: dict[str, tuple[Kind, int, Tensor, list[list[int]], dict[str, Any]]] = {
    "repeat the last": (Kind.OFFSETS, 0, NO_ENDS, [[0, 3, 5, 5, 5], [0, 6, 6, 6, 6]], {}),
    "fill": (Kind.OFFSETS, 0, NO_ENDS[1:], [[0, 3, 5, 9], [0, 6, 9, 9]], {"fill": 9}),
    "mask of the end": (Kind.MASK, -1, NO_ROWS, [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]], {}),
    "mask": (Kind.MASK, 1, NO_ROWS, [[0, 1, 0, 0, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0, 1, 1]], {}),
    "copy": (Kind.COPY, 2, torch.full((3,), 7), [[4, 5, 0], [4, 5, 0]], {}),
    "count": (Kind.COUNT, 0, torch.full((1,), 100), [[105], [111]], {"shared": True}),
    "constant": (Kind.COPY, -1, torch.tensor([1, 2]), [[1, 2], [1, 2]], {}),
}


@pytest.mark.parametrize("name", METADATA)
def test_staging_and_calls_that_run_eager_have_metadata_as_it_was_specified(device: str, name: str) -> None:
    kind, source, example, contents, others = METADATA[name]
    example = example.clone().to(device)
    buffers: list[Tensor] = []

    def look(given: Mapping[str, Tensor]) -> Mapping[str, Any]:
        buffers.append(given["it"])
        return {}

    bank = new_bank([TAKES], device)
    spec = MetadataSpec(kind=kind, example=example, source=source, **others)
    own, before = spec.buffer(), spec.buffer().clone()
    bank.capture([variant(rows=TOKENS, metadata={"it": spec}, end_source=0, fewer_rows=True, arguments=look)])
    mask = torch.tensor([0, 1, 0, 0, 0, 0, 0], dtype=torch.bool, device=device)
    is_own = spec.is_staged and name != "count"
    for lengths, content in zip(([3, 2], [6]), contents, strict=True):
        sources = [offsets(lengths, device), mask, torch.tensor([4, 5], device=device)]
        if is_own:
            assert torch.equal(own, before)
        eager = spec.content(own, sources, 0)
        assert eager.dtype == own.dtype and eager.shape == own.shape and (eager is not own) == is_own
        assert not is_own or eager.long().tolist() == content
        bank.run(torch.randn(7, WIDTH, device=device), sources)
        assert buffers[0].long().tolist() == content
    assert (buffers[0] is example) == others.get("shared", False)


def test_what_staging_cannot_do_is_an_error(device: str) -> None:
    """A mask without an end read through a null pointer; one launch stages a limited number of buffers."""
    bank = new_bank([TAKES], device)
    mask = MetadataSpec(kind=Kind.MASK, example=torch.zeros(6, dtype=torch.bool, device=device), source=0)
    with pytest.raises(ValueError, match=r"a mask needs the pack's end"):
        bank.capture([variant(metadata={"mask": mask})])
    spec = MetadataSpec(kind=Kind.OFFSETS, example=offsets([0, 0], device), source=0)
    bank.capture([variant(metadata={str(i): spec for i in range(16)})])
    with pytest.raises(RuntimeError, match=r"takes up to 16 buffers"):
        bank.run(torch.randn(6, WIDTH, device=device), [offsets([2], device)])
    assert bank.all_free()


# -- arguments of a variant --------------------------------------------------------------------------

Arguments = Callable[[Mapping[str, Tensor]], Mapping[str, Any]]


class Takes(nn.Module):
    """Scales by a constant, whatever else it is given."""

    def forward(self, hidden: Tensor, factor: Any = 2, **_others: Any) -> Tensor:
        return hidden * factor


TAKES = Takes()


def captured(device: str, arguments: Arguments) -> RunningBank:
    bank = new_bank([TAKES], device, num_slots=2)
    metadata = {
        "cu": MetadataSpec(kind=Kind.OFFSETS, example=offsets([3, 4, 0], device), source=0),
        "mask": MetadataSpec(kind=Kind.MASK, example=torch.zeros(TOKENS, dtype=torch.bool, device=device)),
        "table": MetadataSpec(kind=Kind.COPY, example=torch.arange(WIDTH, device=device).float()),
    }
    given: dict[str, Any] = {"metadata": metadata, "arguments": arguments, "end_source": 0}
    bank.capture([variant(training=False, rows=TOKENS, fewer_rows=True, **given)])
    return bank


DERIVED: dict[str, tuple[Arguments, str]] = {
    "what bears one content only": (lambda given: {7: {}}[int(given["cu"][-1])], "raise KeyError: 0"),
    "a copy": (lambda given: {"starts": given["cu"][:-1].clone()}, "starts"),
    "inside a list": (lambda given: {"all": [given["cu"], given["cu"] + 1]}, r"all\[1\]"),
    "inside a dictionary": (lambda given: {"all": {"a": given["cu"].float()}}, r"all\['a'\]"),
    "inside an object": (lambda given: {"params": Params(ends=given["cu"] * 2)}, r"params\.ends"),
    "a number": (lambda given: {"params": Params(longest=int(given["cu"].max()))}, r"params\.longest"),
    "a mask whose example is empty": (lambda given: {"valid": ~given["mask"]}, "valid"),
    "a shape": (lambda given: {"rows": torch.zeros(int(given["cu"][-1]))}, "rows"),
    "a choice": (lambda given: {"some": 1} if given["cu"][1] else {}, "some"),
}


@pytest.mark.parametrize(("arguments", "name"), DERIVED.values(), ids=DERIVED.keys())
def test_an_argument_computed_from_metadata_is_an_error(device: str, arguments: Arguments, name: str) -> None:
    """It kept the example's value in every replay, and its memory was freed after the capture."""
    derived = rf"argument {name} is computed from the content of a metadata buffer"
    said = rf"depend on the content of .* {name}" if "raise" in name else derived
    with pytest.raises(ValueError, match=said):
        captured(device, arguments)


def test_buffers_views_constants_and_what_comes_of_constants_are_no_error(device: str) -> None:
    table = torch.randn(WIDTH, device=device)

    def arguments(given: Mapping[str, Tensor]) -> Mapping[str, Any]:
        assert given["table"].tolist() == list(range(WIDTH))
        return {
            "factor": table,
            "params": Params(ends=given["cu"], longest=4),
            "views": (given["cu"][1:], given["mask"].view(2, -1), torch.full((), torch.nan)),
            "others": {"rows": given["cu"].numel(), "name": "a name", "none": None, "made": table * 2},
            "of_a_constant": given["table"] + 1,
            "meta": torch.empty(3, device="meta"),
        }

    seen: list[Mapping[str, Tensor]] = []
    bank = captured(device, lambda given: seen.append(given) or arguments(given))
    assert not bank.failures
    assert seen[0]["cu"].tolist() == [0, 3, 7, 7] and not seen[0]["mask"].any()
    x = torch.randn(7, WIDTH, device=device)
    with torch.no_grad():
        assert_same_bits(bank.run(x, [offsets([5, 2], device)])[:7].clone(), x * table, "output")


def test_constants_live_as_long_as_graphs_that_read_them_and_no_pack_as_long_as_the_bank(device: str) -> None:
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
    with torch.no_grad():
        sources = [offsets([7], device)]
        source = weakref.ref(sources[0])
        assert_same_bits(bank.run(x, sources)[:7].clone(), x * 3, "output")
    del strangers, alive, sources
    gc.collect()
    assert source() is None
    bank.release()
    gc.collect()
    assert all(ref() is None for ref in made) and not bank.captured


@pytest.mark.parametrize("eager_sites", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_modules_of_a_pack_have_the_same_bits_if_eager(device: str, eager_sites: tuple[int, ...]) -> None:
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
    eager = calls * len(eager_sites)
    assert pair.counts() == {"calls": 3 * calls, "replays": 3 * calls - eager, "CAPTURE_FAILED": eager}


@pytest.mark.parametrize("has_end", [True, False], ids=["a pack", "no pack"])
def test_an_input_that_no_graph_takes_has_its_variants_arguments_and_rows(device: str, has_end: bool) -> None:
    """An argument's default took the place of the variant's, without a word."""
    modules = [Takes(), Takes()]
    bank = new_bank(modules, device)
    spec = variant(training=False, rows=TOKENS, fewer_rows=True, arguments=lambda _given: {"factor": 3.0})
    bank.capture([dataclasses.replace(spec, end_source=0 if has_end else -1)])
    x = torch.randn(WIDTH, 6, device=device).t()  # in a layout that was not captured
    with torch.no_grad():
        outs = [bank.run(given, [offsets([4], device)]).clone() for given in (x, x.contiguous())]
    assert bank.counters()["SIGNATURE_CHANGED"] == 1 and bank.counters()["replays"] == 3
    assert_same_bits(*outs)
    assert_same_bits(outs[0], canonical(x, 4 if has_end else 6) * 3 * 3, "output")


# -- attention captured for many documents is launched for those that a pack has ---------------------

ATTENDED, MOST_SEQS, HEADS, DIM = 1024, 16, 2, 32
FEATURES = HEADS * DIM
LAYERS, KERNELS = 2, 4  # of FlashAttention, one forward and three backward

# From one document to another of every kind, so that grids shrink and grow again.
DOCUMENTS = [[ATTENDED], [1], [5, 500, 3], [64] * MOST_SEQS, [0, 0, 9, 0, 900], [0], [700, 300], [3] * 7]
DOCUMENTS += [[128, 256, 129], [ATTENDED]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(FEATURES, 3 * FEATURES, bias=False)

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.project(hidden).view(-1, 3, HEADS, DIM).unbind(1)
        return hidden + ops.varlen_attention(q, k, v, cu_seqlens, ATTENDED, causal=True).flatten(1)


@pytest.mark.gpu
def test_packs_of_all_kinds_have_the_bits_of_attention_over_every_slot() -> None:
    """Each variant and slot has its grids. Forwards stage offsets before earlier backwards read theirs."""
    sizes: dict[str, Any] = {"tokens": ATTENDED, "num_seqs": MOST_SEQS, "width": FEATURES, "num_slots": 3}
    pair = PackPair("cuda", [Attention() for _ in range(LAYERS)], dtype=torch.bfloat16, **sizes)
    bank = pair.capture(pair.variant(), pair.variant("eval", training=False)).bank
    for slot in range(3):
        assert bank.num_document_grids(bank.variants["train"], slot) == LAYERS * KERNELS
        assert bank.num_document_grids(bank.variants["eval"], slot) == LAYERS
    for packs in zip(DOCUMENTS, DOCUMENTS[3:], DOCUMENTS[6:], strict=False):
        for lengths in packs:
            with torch.no_grad():
                assert pair.pack(lengths, key="eval", requires_grad=False).reason is None
        running = [pair.pack(lengths) for lengths in packs]
        for index in (1, 0, 2):
            running[index].backward()
        pair.check_state()
        del running


@pytest.mark.gpu
def test_attention_captured_by_others_is_left_as_it_is() -> None:
    q = torch.randn(ATTENDED, HEADS, DIM, device="cuda").to(torch.bfloat16)
    cu_seqlens = offsets([64] * MOST_SEQS, "cuda")
    expected = ops.varlen_attention(q, q, q, cu_seqlens, ATTENDED, causal=True)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        out = ops.varlen_attention(q, q, q, cu_seqlens, ATTENDED, causal=True)
    for _ in range(2):  # a second instantiation is refused where a node is marked
        graph.instantiate()
        graph.replay()
        assert_same_bits(out, expected, "output")
