# SPDX-License-Identifier: Apache-2.0
import dataclasses
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagraph import _C
from megagraph.decide.dispatch import Capacity, PackShape
from megagraph.decide.reasons import EagerReason

DIMENSIONS = ("tokens", "num_seqs", "max_seqlen")
# Few values, so that packs fit, exceed and equal capacities about as often.
numbers = st.integers(1, 4)
capacities = st.builds(Capacity, tokens=numbers, num_seqs=numbers, max_seqlen=numbers)
shapes = st.builds(
    PackShape, tokens=numbers, num_seqs=st.integers(0, 4), max_seqlen=numbers, cp_size=st.sampled_from([1, 2])
)
banks = st.dictionaries(st.sampled_from([1, 2, 4]), st.lists(capacities, max_size=5).map(tuple))


def decide(
    shape: PackShape | None, bank: Mapping[int, Sequence[Capacity]], *, extra_seqs: int = 0
) -> Capacity | EagerReason:
    """What the core decides for a pack of a shape, to which a tail adds further documents."""
    name = lambda capacity, *_: (capacity,)  # noqa: E731
    decider = _C.Decider(extra_seqs, False, False, list(EagerReason), name)
    decider.set_capacities({99: (), **bank})  # of none at all they would be yet to learn
    if shape is None:
        found = decider.decide(None, 1, False, lambda: 0)
    else:
        offsets = torch.empty(shape.num_seqs + 1, dtype=torch.int32)
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), shape.max_seqlen)
        pack = SimpleNamespace(qkv_format="thd", **dict.fromkeys(names, offsets), **longest)
        found = decider.decide(pack, shape.tokens, False, lambda: 0, shape.cp_size)
        reason = decider.eager_reason(pack, shape.tokens, shape.cp_size)
        assert reason is (found if isinstance(found, EagerReason) else None)
    decision: Capacity | EagerReason = found if isinstance(found, EagerReason) else found[0]
    return decision


def cheapest_by_search(shape: PackShape, bank: tuple[Capacity, ...]) -> Capacity | None:
    """The first member of the bank in a walk over every possible size, cheapest first."""
    for tokens, num_seqs, max_seqlen in product(range(1, 5), repeat=3):
        candidate = Capacity(tokens=tokens, num_seqs=num_seqs, max_seqlen=max_seqlen)
        needs = (shape.tokens, shape.num_seqs, shape.max_seqlen)
        has = (tokens, num_seqs, max_seqlen)
        if candidate in bank and all(need <= size for need, size in zip(needs, has, strict=True)):
            return candidate
    return None


def blame_by_search(shape: PackShape, bank: tuple[Capacity, ...]) -> EagerReason:
    """The reason of the capacity that gets furthest through tokens, documents and length."""
    reasons = (EagerReason.TOO_MANY_TOKENS, EagerReason.TOO_MANY_SEQUENCES, EagerReason.SEQUENCE_TOO_LONG)
    passed = []
    for capacity in bank:
        fits = [getattr(shape, name) <= getattr(capacity, name) for name in DIMENSIONS]
        passed.append(fits.index(False))
    return reasons[max(passed)]


@given(shape=shapes, bank=banks)
def test_a_decision_is_the_cheapest_fit_or_the_dimension_that_stops_the_best_capacity(
    shape: PackShape, bank: dict[int, tuple[Capacity, ...]]
) -> None:
    group = bank.get(shape.cp_size, ())
    cheapest = cheapest_by_search(shape, group)
    decision = decide(shape, bank)
    if not group:
        assert decision is EagerReason.CP_SIZE_NOT_CAPTURED
    elif cheapest is None:
        assert decision is blame_by_search(shape, group)
    else:
        assert decision == cheapest


@given(shape=shapes, bank=st.lists(capacities, max_size=5), data=st.data())
def test_a_decision_ignores_the_order_of_capacities_and_repeated_ones(
    shape: PackShape, bank: list[Capacity], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(bank + bank[:2]))
    group = {shape.cp_size: tuple(bank)}
    assert decide(shape, group) == decide(shape, {shape.cp_size: tuple(shuffled)})


@given(shape=shapes, capacity=capacities)
def test_a_pack_fits_where_no_dimension_exceeds_the_capacity(shape: PackShape, capacity: Capacity) -> None:
    exceeding = [name for name in DIMENSIONS if getattr(shape, name) > getattr(capacity, name)]
    expected = blame_by_search(shape, (capacity,)) if exceeding else None
    assert shape.exceeds(capacity) is expected


@given(capacity=capacities)
def test_a_pack_that_fills_its_capacity_fits(capacity: Capacity) -> None:
    shape = PackShape(**dataclasses.asdict(capacity))
    assert decide(shape, {1: (capacity,)}) is capacity


@given(shape=shapes, bank=banks, extra_seqs=st.integers(1, 2))
def test_documents_of_the_tail_take_places_of_a_capacity(
    shape: PackShape, bank: dict[int, tuple[Capacity, ...]], extra_seqs: int
) -> None:
    with_tail = shape._replace(num_seqs=shape.num_seqs + extra_seqs)
    assert decide(shape, bank, extra_seqs=extra_seqs) == decide(with_tail, bank)


def test_a_pack_that_fills_its_capacity_leaves_no_place_for_a_document_of_the_tail() -> None:
    bank = {1: (Capacity(tokens=100, num_seqs=4, max_seqlen=100),)}
    for documents, found in ((3, bank[1][0]), (4, EagerReason.TOO_MANY_SEQUENCES)):
        assert decide(PackShape(60, documents, 20), bank, extra_seqs=1) is found
    assert decide(PackShape(60, 4, 20), bank) is bank[1][0]


@given(bank=banks)
def test_a_micro_batch_without_a_pack_runs_eager_whatever_is_captured(
    bank: dict[int, tuple[Capacity, ...]],
) -> None:
    assert decide(None, bank) is EagerReason.NO_PACK_METADATA


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"tokens": 101}, EagerReason.TOO_MANY_TOKENS),
        ({"num_seqs": 9}, EagerReason.TOO_MANY_SEQUENCES),
        ({"max_seqlen": 51}, EagerReason.SEQUENCE_TOO_LONG),
        ({"cp_size": 2}, EagerReason.CP_SIZE_NOT_CAPTURED),
        ({"cp_size": 4}, EagerReason.CP_SIZE_NOT_CAPTURED),
        ({"tokens": 101, "num_seqs": 9, "max_seqlen": 51}, EagerReason.TOO_MANY_TOKENS),
        ({"num_seqs": 9, "max_seqlen": 51}, EagerReason.TOO_MANY_SEQUENCES),
        # Each need is met by one of the two capacities, but by none together.
        ({"tokens": 100, "num_seqs": 8}, EagerReason.TOO_MANY_SEQUENCES),
        ({"tokens": 100, "max_seqlen": 50}, EagerReason.SEQUENCE_TOO_LONG),
    ],
)
def test_each_reason_names_what_stood_in_the_way(shape: dict[str, int], reason: EagerReason) -> None:
    bank = {
        1: (Capacity(tokens=100, num_seqs=4, max_seqlen=10), Capacity(tokens=60, num_seqs=8, max_seqlen=50)),
        4: (),
    }
    fitting = {"tokens": 1, "num_seqs": 1, "max_seqlen": 1}
    assert isinstance(decide(PackShape(**fitting), bank), Capacity)
    assert decide(PackShape(**(fitting | shape)), bank) is reason


def test_fewer_tokens_go_before_fewer_documents_and_these_before_a_shorter_longest_one() -> None:
    shape = PackShape(tokens=1, num_seqs=1, max_seqlen=1)
    ordered = [
        Capacity(tokens=10, num_seqs=90, max_seqlen=90),
        Capacity(tokens=20, num_seqs=10, max_seqlen=90),
        Capacity(tokens=20, num_seqs=20, max_seqlen=10),
        Capacity(tokens=20, num_seqs=20, max_seqlen=20),
    ]
    for first in range(len(ordered)):
        assert decide(shape, {1: ordered[first:][::-1]}) == ordered[first]
    assert decide(shape, {1: []}) is EagerReason.CP_SIZE_NOT_CAPTURED


@pytest.mark.parametrize("name", DIMENSIONS)
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_a_capacity_of_anything_but_positive_integers_is_refused(name: str, value: object) -> None:
    sizes: dict[str, object] = {"tokens": 1, "num_seqs": 1, "max_seqlen": 1, name: value}
    with pytest.raises(
        ValueError, match=f"a capacity's {name} must be an integer of at least 1, got {value!r}"
    ):
        Capacity(**sizes)  # type: ignore[arg-type]


def test_a_capacity_reads_as_a_sentence() -> None:
    capacity = Capacity(tokens=512, num_seqs=16, max_seqlen=256)
    assert str(capacity) == "512 tokens, 16 documents of up to 256"


def test_capacities_and_shapes_are_immutable_keys() -> None:
    capacity = Capacity(tokens=1, num_seqs=1, max_seqlen=1)
    shape = PackShape(tokens=1, num_seqs=1, max_seqlen=1)
    assert len({capacity, dataclasses.replace(capacity)}) == 1
    assert len({shape, shape._replace(), shape._replace(cp_size=2)}) == 2
    for value in (capacity, shape):
        with pytest.raises(AttributeError):
            value.tokens = 2  # type: ignore[misc]


def test_reasons_are_the_cores_in_name_and_order() -> None:
    assert [reason.name for reason in EagerReason] == list(_C.EAGER_REASON_NAMES)
    assert [reason.value for reason in EagerReason] == list(range(len(_C.EAGER_REASON_NAMES)))


def test_the_decision_is_imported_without_torch() -> None:
    check = (
        "import sys, megagraph.decide.dispatch, megagraph.decide.due, megagraph.decide.learn; "
        "print({'torch', 'numpy', 'megagraph._C'} & sys.modules.keys())"
    )
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("num_seqs", "max_seqlen", "cp_size", "are_cut", "goes_on"),
    [
        (2, 8, 1, False, True),
        (2, 7, 1, False, False),
        (2, 9, 1, False, False),  # a longer table begins anew in each document
        (2, 9, 1, True, True),  # unless it is cut
        (2, 7, 1, True, False),
        (1, 8, 1, False, False),
        (1, 8, 1, True, False),
        (2, 16, 2, False, True),
        (2, 8, 2, True, False),
        (2, 17, 2, True, False),  # no shared pack's is cut
        (2, torch.tensor(8), 1, False, True),
        (2, torch.tensor(7), 1, False, False),
        (2, None, 1, False, True),  # nobody knows
        (1, None, 1, False, False),
    ],
)
def test_packs_whose_positions_may_go_on_from_document_to_document_have_no_graph(
    num_seqs: int, max_seqlen: int | torch.Tensor | None, cp_size: int, are_cut: bool, goes_on: bool
) -> None:
    """Of 8 rows on each rank, where a rotary table has the rows of the longest document."""
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), torch.empty(num_seqs + 1, dtype=torch.int32))
    padded = dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"))
    longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max_seqlen)
    pack = SimpleNamespace(qkv_format="thd", **offsets, **padded, **longest)
    for depend in (True, False):
        decider = _C.Decider(0, depend, are_cut, list(EagerReason), lambda *key: key)
        found = decider.decide(pack, 8, False, lambda: 0, cp_size)
        assert (found is EagerReason.SIGNATURE_CHANGED) == (depend and goes_on)
