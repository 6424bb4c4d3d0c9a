# SPDX-License-Identifier: Apache-2.0
import copy
import gc
import pickle
import weakref
from collections.abc import Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import offsets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megagraph import _C
from megagraph._C import Capacity, PackForm, PackShape, VariantKey
from megagraph.reasons import EagerReason

DISABLED = EagerReason.DISABLED
DIMENSIONS = ("tokens", "num_seqs", "max_seqlen")
Bank = dict[int, tuple[Capacity, ...]]
# Few values, so that packs fit, exceed and equal capacities about as often.
numbers = st.integers(1, 4)
capacities = st.builds(Capacity, tokens=numbers, num_seqs=numbers, max_seqlen=numbers)
shapes = st.builds(PackShape, numbers, st.integers(0, 4), numbers, cp_size=st.sampled_from([1, 2]))
banks = st.dictionaries(st.sampled_from([1, 2, 4]), st.lists(capacities, max_size=5).map(tuple))


def dispatcher(
    bank: Mapping[int, Sequence[Capacity]] = {}, *, eager: Mapping[Any, EagerReason] = {}, **options: Any
) -> _C.Dispatcher:
    """Of a model without layers, which is in one state, and of which some variants stay `eager`."""
    asks = options.pop("asks", None)  # other ranks
    made = _C.Dispatcher(**options)
    made.set_capacities(bank)
    watch = _C.ModuleWatch(list, list)
    watch.set_state(_C.StateWatch([], weakref.ref(nn.Module()), (), bool))
    kwargs = {"num_slots": 1, "pools": [], "facing": [], "poison": False}
    core = _C.GraphBank(torch.device("cpu"), 1, **kwargs, run_eager_alike=asks)
    for state in (_C.BankState.CAPTURING, _C.BankState.SEALED):
        core.become(state)
    made.use(core, {}, eager, watch)
    made.states.agree(made.states.local_state(0, watch.state(True), 0))
    return made


def pack_of(shape: PackShape, **changes: Any) -> Any:
    ends = torch.empty(shape.num_seqs + 1, dtype=torch.int32)
    return offsets.pack_of(ends, ends, **{"max_seqlen_q": shape.max_seqlen, **changes})


def enter(made: _C.Dispatcher, pack: Any, tokens: int, *, settled: bool = True, **flags: Any) -> Any:
    """Of a model that is entered in Megatron's forwards."""
    given = {"mask": None, "is_mask_shared": True, "is_skipped": False, **flags}
    before = _C.set_skipped(given.pop("is_skipped"))
    try:
        return made.enter(pack, tokens, are_megatrons=True, is_settled=settled, **given)
    finally:
        _C.set_skipped(before)


def entered(made: _C.Dispatcher, pack: Any, tokens: int, **flags: Any) -> _C.MicroBatch:
    batch = enter(made, pack, tokens, **flags)
    assert isinstance(batch, _C.MicroBatch)
    return batch


def decide(shape: PackShape | None, bank: Mapping[int, Sequence[Capacity]], *, extra_seqs: int = 0) -> Any:
    """What the core decides for a pack of a shape, to which a tail adds further documents."""
    pack, tokens, cp_size = (None, 1, 1) if shape is None else (pack_of(shape), shape.tokens, shape.cp_size)
    # Of no capacities at all they would be yet to learn.
    made = dispatcher({99: (), **bank}, extra_seqs=extra_seqs, cp_size=cp_size)
    found = enter(made, pack, tokens)
    reason = made.eager_reason(pack, tokens, True)
    assert reason is (found if isinstance(found, EagerReason) else None)
    return found if reason else found.capacity


def held(shape: PackShape, capacity: Capacity) -> list[bool]:
    """Which dimensions. Some hosts declare a constant as the longest document, however short the pack."""
    needed = shape.replace(max_seqlen=min(shape.max_seqlen, shape.tokens * shape.cp_size))
    return [getattr(needed, name) <= getattr(capacity, name) for name in DIMENSIONS]


def blame_by_search(shape: PackShape, bank: tuple[Capacity, ...]) -> EagerReason:
    """The reason of the capacity that gets furthest through tokens, documents and length."""
    reasons = (EagerReason.TOO_MANY_TOKENS, EagerReason.TOO_MANY_SEQUENCES, EagerReason.SEQUENCE_TOO_LONG)
    return reasons[max(held(shape, capacity).index(False) for capacity in bank)]


@given(shape=shapes, bank=banks)
def test_a_decision_is_the_cheapest_fit_or_what_stops_the_best_capacity(shape: PackShape, bank: Bank) -> None:
    assert decide(None, bank) is EagerReason.NO_PACK_METADATA
    group = bank.get(shape.cp_size, ())
    for capacity in group:
        fits = all(held(shape, capacity))
        assert shape.exceeds(capacity) is (None if fits else blame_by_search(shape, (capacity,)))
    fitting = [it for it in group if shape.exceeds(it) is None]
    cheapest = min(fitting, key=lambda it: (it.tokens, it.num_seqs, it.max_seqlen), default=None)
    decision = decide(shape, bank)
    if not group:
        assert decision is EagerReason.CP_SIZE_NOT_CAPTURED
    elif cheapest is None:
        assert decision is blame_by_search(shape, group)
    else:
        assert decision == cheapest


@given(shape=shapes, bank=banks, extra_seqs=st.integers(1, 2))
def test_documents_of_the_tail_take_places(shape: PackShape, bank: Bank, extra_seqs: int) -> None:
    with_tail = shape.replace(num_seqs=shape.num_seqs + extra_seqs)
    assert decide(shape, bank, extra_seqs=extra_seqs) == decide(with_tail, bank)


@pytest.mark.parametrize("name", DIMENSIONS)
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_a_capacity_of_anything_but_positive_integers_is_refused(name: str, value: object) -> None:
    sizes: dict[str, object] = {"tokens": 1, "num_seqs": 1, "max_seqlen": 1, name: value}
    said = f"a capacity's {name} must be an integer from 1 to 2147483647, got {value!r}"
    with pytest.raises(ValueError, match=said):
        Capacity(**sizes)


def test_reasons_are_the_cores_in_name_and_order() -> None:
    assert [(it.value, it.name) for it in EagerReason] == [*enumerate(_C.EAGER_REASON_NAMES)]


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
    pack = pack_of(PackShape(8, num_seqs, 1), **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max_seqlen))
    for depends in (True, False):
        made = dispatcher(depends_on_longest=depends, cuts_tables=are_cut, cp_size=cp_size, extra_seqs=1)
        assert (enter(made, pack, 8) is EagerReason.SIGNATURE_CHANGED) == (depends and goes_on)


# -- beside the capacity ---------------------------------------------------------------------------

BANK = {1: (Capacity(tokens=8, num_seqs=3, max_seqlen=8),)}
PACK = pack_of(PackShape(6, 2, 4))
MASK = torch.zeros(1, 6, dtype=torch.bool)


def test_what_makes_a_variant_beside_the_capacity_is_in_its_key_which_is_one_object() -> None:
    made = dispatcher(BANK)
    for grad, has_mask in product((True, False), (True, False)):
        with torch.set_grad_enabled(grad):
            batch = entered(made, PACK, 6, mask=MASK if has_mask else None)
        assert batch.key == VariantKey(BANK[1][0], PackForm.of(PACK), grad, has_mask=has_mask)
        assert batch.reason is None and not batch.is_as_given
        assert batch.sources[0] is PACK.cu_seqlens_q and batch.params is PACK
    first, second = (entered(made, PACK, 6) for _ in range(2))
    assert first is not second and first.key is second.key


def test_sources_are_what_staging_reads_of_a_pack() -> None:
    actual, padded = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 4, 10], [0, 4, 12]))
    queries, keys = {"cu_seqlens_q": actual, "cu_seqlens_kv": actual}, actual.view(-1)
    of_padded = dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), padded)
    index = torch.zeros(1, 6, dtype=torch.int32)
    bank = {2: BANK[1]}
    for changes, cp_size, expected in (
        (dict.fromkeys(of_padded), 1, [[0, 4, 10]]),
        (of_padded, 1, [[0, 4, 10], [0, 4, 12]]),
        ({"cu_seqlens_q_padded": keys, "cu_seqlens_kv_padded": keys}, 1, [[0, 4, 10]] * 2),
        (of_padded, 2, [[0, 4, 10], [0, 4, 12], [0, 2, 6]]),
        ({**of_padded, "seq_idx": index}, 2, [[0, 4, 10], [0, 4, 12], index.tolist(), [0, 2, 6]]),
    ):
        made = dispatcher({**BANK, **bank}, cp_size=cp_size)
        batch = entered(made, pack_of(PackShape(6, 2, 4), **queries, **changes), 6)
        assert [source.tolist() for source in batch.sources] == expected


def test_what_a_pack_needs_is_no_more_than_it_can_hold() -> None:
    """Bug: the advice was a constant that hosts declare, which no capacity of these tokens may have."""
    made = dispatcher({1: (Capacity(tokens=9, num_seqs=2, max_seqlen=4),)})
    assert enter(made, pack_of(PackShape(6, 1, 4096)), 6) is EagerReason.SEQUENCE_TOO_LONG
    assert made.most_needed == Capacity(tokens=6, num_seqs=1, max_seqlen=6)


def test_a_pack_of_other_ranks_or_of_offsets_that_no_op_takes_runs_as_given() -> None:
    """Bug: of ranks that share packs, one with the whole of its own replayed as if it were a share."""
    made = dispatcher({2: BANK[1]}, cp_size=2)
    for own, is_taken in ((None, True), (2, True), (1, False), (0, False)):
        found = enter(made, pack_of(PackShape(6, 2, 4), local_cp_size=own), 6)
        assert isinstance(found, _C.MicroBatch) if is_taken else found is EagerReason.CP_SIZE_NOT_CAPTURED
    pack = pack_of(PackShape(6, 2, 4), cu_seqlens_q=(0, 4, 6), cu_seqlens_kv=(0, 4, 6))
    assert enter(made, pack, 6) is EagerReason.SIGNATURE_CHANGED


@pytest.mark.parametrize(
    ("options", "flags", "reason"),
    [({}, {}, None), ({}, {"is_skipped": True}, DISABLED), ({"is_eager": True}, {}, DISABLED)],
)
def test_a_step_without_graphs_comes_before_what_keeps_it_eager(
    options: dict[str, Any], flags: dict[str, bool], reason: EagerReason | None
) -> None:
    made = dispatcher(BANK, **options)

    def found(*, grad: bool = True) -> EagerReason | None:
        with torch.set_grad_enabled(grad):
            return entered(made, PACK, 6, **flags).reason

    moved, disagreed = EagerReason.ADDRESS_MOVED, EagerReason.GROUP_DISAGREED
    assert found() is reason
    for kept, expected in (((None, moved), (moved, None)), ((disagreed, moved), (moved, disagreed))):
        made.keep_eager(*kept)
        assert (found(), found(grad=False)) == (expected if reason is None else (reason, reason))
    made.set_suspended(True)
    assert found() is (EagerReason.SUSPENDED if reason is None else reason)
    made.set_suspended(False)
    made.keep_eager(None, None)
    assert found() is reason


def test_a_variant_that_stays_eager_runs_as_given_unless_it_is_the_reference() -> None:
    key = VariantKey(BANK[1][0], PackForm.of(PACK), grad=True)
    failed = EagerReason.CAPTURE_FAILED
    for options, flags, reason, is_as_given in (
        ({}, {}, failed, True),
        ({}, {"is_skipped": True}, DISABLED, False),
        ({"ranks": 2}, {"is_skipped": True}, DISABLED, True),
        ({"is_eager": True}, {}, DISABLED, False),
        ({"needs_equal_rows": True}, {}, None, False),
    ):
        for depends_on_longest in (False, True):
            kept = {key.replace(state=-1): failed, key: failed}
            made = dispatcher(BANK, eager=kept, depends_on_longest=depends_on_longest, **options)
            found = enter(made, PACK, 6, **flags)
            if is_as_given and not depends_on_longest:
                assert found is reason
                continue
            assert isinstance(found, _C.MicroBatch)
            assert (found.reason, found.is_as_given) == (reason, is_as_given)
            assert is_as_given == _C.is_canonical(found.params.cu_seqlens_q)  # whose RoPE is ours


def test_what_cannot_be_staged_or_is_not_settled_is_not_noted() -> None:
    made = dispatcher(BANK)
    for cannot in ({"mask": MASK[:, :5]}, {"mask": MASK.int()}, {"mask": MASK, "is_mask_shared": False}):
        assert enter(made, PACK, 6, **cannot) is EagerReason.SIGNATURE_CHANGED
    assert enter(made, PACK, 6, settled=False) is EagerReason.WARMING_UP
    made.due.end_step()
    assert not made.due.due and not made.due.warmed_up
    enter(made, PACK, 6)
    made.due.end_step()
    assert made.due.due


def test_packs_are_observed_until_there_are_capacities() -> None:
    made = dispatcher()
    batch = entered(made, PACK, 6, mask=MASK)
    assert batch.capacity is None and batch.reason is EagerReason.WARMING_UP
    assert batch.sources[-1] is MASK  # what graphs are verified on is to have it, too
    assert made.observed == {PackShape(6, 2, 4): 1}
    assert made.eager_reason(None, 6, True) is EagerReason.NO_PACK_METADATA
    assert dispatcher(needs_equal_rows=True).eager_reason(None, 6, True) is None  # others may read theirs


def test_what_evaluations_say_and_teach_counts_until_somebody_trains() -> None:
    """Bugs: the step that learned was an evaluation, of longer packs; twenty before training fixed all."""
    made = dispatcher()
    entered(made, PACK, 6)
    for tokens, trains, needed in ((32, False, 32), (16, True, 16), (256, False, 16), (1, True, 6)):
        assert made.expect(tokens, trains=trains) is False
        assert made.needs()[0] == needed
    evaluated = dispatcher()
    with torch.no_grad():
        for _ in range(3):
            entered(evaluated, PACK, 6)
    assert evaluated.observed == {PackShape(6, 2, 4): 1}
    evaluated.due.end_step()
    assert [evaluated.has_seen_enough() for _ in range(21)] == [False] * 19 + [True] * 2
    assert not evaluated.has_trained()
    evaluated.set_capacities(BANK, of_evaluations=True)
    assert [evaluated.expect(1, trains=trains) for trains in (False, True, True)] == [False, True, False]
    assert evaluated.by_cp_size == {}


def test_packs_are_counted_on_request_whatever_becomes_of_them() -> None:
    made = dispatcher(BANK)
    fits, too_large = PackShape(6, 2, 4), PackShape(9, 2, 4)

    def see() -> None:
        for shape in (fits, too_large, too_large):
            enter(made, pack_of(shape), shape.tokens)
        assert isinstance(enter(made, None, 6), EagerReason)  # which is no pack

    see()
    assert made.observed == {}  # a long run would fill its memory
    made.count_packs()
    see()
    assert made.observed == {fits: 1, too_large: 2}
    made.refuse(DISABLED)  # as in a step that runs its packs as given
    see()
    assert made.observed == {fits: 2, too_large: 4}
    learning = dispatcher()
    learning.count_packs()
    for _ in range(3):
        entered(learning, PACK, 6)
    assert learning.observed == {fits: 3}


def test_ranks_that_need_equal_rows_pad_what_no_capacity_holds() -> None:
    made = dispatcher({1: [Capacity(tokens=8, num_seqs=3, max_seqlen=4)]}, needs_equal_rows=True)
    for shape, capacity, reason in (
        (PackShape(6, 5, 4), (8, 5, 8), EagerReason.TOO_MANY_SEQUENCES),
        (PackShape(6, 2, 5), (8, 2, 8), EagerReason.SEQUENCE_TOO_LONG),
    ):
        batch = entered(made, pack_of(shape), shape.tokens)
        assert batch.capacity is not None
        assert [*batch.capacity.as_dict().values()] == [*capacity] and batch.reason is reason
    made.due.end_step()
    assert not made.due.due  # no graph of theirs is to be captured
    assert enter(made, pack_of(PackShape(9, 2, 4)), 9) is EagerReason.TOO_MANY_TOKENS


def began(made: _C.Dispatcher, batch: _C.MicroBatch, reason: EagerReason) -> EagerReason | None:
    """Why a micro-batch that is to run eager for a reason is said to do so."""
    batch.reason = reason
    assert made.begin(batch) is None
    return batch.reason


def test_what_other_ranks_may_not_know_of_inside_of_a_step_is_asked_of_them() -> None:
    """Whether a micro-batch that has no graph here may be one that others replay."""
    moved, disabled, warming_up = EagerReason.ADDRESS_MOVED, DISABLED, EagerReason.WARMING_UP
    full, failed = EagerReason.NO_FREE_SLOT, EagerReason.CAPTURE_FAILED
    key = VariantKey(BANK[1][0], PackForm.of(PACK), grad=True)
    for reason, run_alike, kept, grad, is_elsewhere, is_asked in (
        (full, True, (None, None), True, False, False),  # all have as many passes in flight
        (full, False, (None, None), True, False, True),
        (EagerReason.TOO_MANY_SEQUENCES, True, (None, None), True, False, False),  # of one pack
        (disabled, True, (None, None), True, False, True),
        (warming_up, True, (None, None), True, False, True),
        (warming_up, True, (moved, None), True, False, False),
        (warming_up, True, (None, moved), True, False, False),
        (warming_up, True, (None, moved), False, False, True),
        (failed, True, (None, None), True, False, False),
        (failed, True, (None, None), True, True, True),  # in a state in which others may have graphs
    ):
        asks, eager = mock.Mock(), {key: failed} if reason is failed else {}
        # Packs of one capacity that cannot run as given, so that each is a micro-batch.
        made = dispatcher(BANK, eager=eager, asks=asks, ranks=2, run_alike=run_alike, depends_on_longest=True)
        made.keep_eager(*kept)
        if is_elsewhere:
            made.states.agree(made.states.local_state(0, 99, 0))
        with torch.set_grad_enabled(grad):
            batch = entered(made, PACK, 6)
        assert batch.is_as_given is (reason is failed and not is_elsewhere)
        assert began(made, batch, reason) is reason and asks.called is is_asked


def test_settings_that_change_in_a_step_are_due_afterwards() -> None:
    made = dispatcher(BANK)
    entered(made, PACK, 6)
    batch = entered(made, PACK, 6)
    assert began(made, batch, EagerReason.NUMERICS_CHANGED) is EagerReason.NUMERICS_CHANGED
    made.due.end_step()
    key, other = batch.key, made.states.under(_C.numeric_settings(torch.device("cpu")))
    assert other != key.state and made.due.due == {key.kind, key.kind.replace(state=other)}
    assert made.counts() == {1: {"NUMERICS_CHANGED": 1}}


def test_a_block_that_is_called_again_has_the_later_mask() -> None:
    """Bug: the first one stayed among what staging reads."""
    made, hidden_states = dispatcher(BANK, is_own_table=lambda *_: False), torch.zeros(6, 1, 4)
    batch = entered(made, PACK, 6, mask=MASK)
    for seed in range(2):
        mask = torch.rand(1, 6, generator=torch.Generator().manual_seed(seed)) < 0.5
        assert made.take(batch, hidden_states, None, mask)
        assert batch.sources[0] is PACK.cu_seqlens_q and torch.equal(batch.sources[1], mask)
        assert len(batch.sources) == 2 and batch.mask is mask
    for other in (MASK[:, :5], None):
        batch = entered(made, PACK, 6, mask=MASK)
        assert not made.take(batch, hidden_states, None, other) and batch.is_as_given


def test_what_a_micro_batch_holds_is_collected_with_it() -> None:
    pack, owner = pack_of(PackShape(6, 2, 4)), nn.Identity()
    pack.owner, owner.batch = owner, entered(dispatcher(BANK), pack, 6)
    gone = weakref.ref(owner)
    del pack, owner
    gc.collect()
    assert gone() is None


def test_frequencies_of_each_token_are_sources_between_offsets_and_mask() -> None:
    made = dispatcher(BANK, depends_on_longest=True, may_be_by_token=True)
    assert entered(made, PACK, 6).key.by_token is False
    made.due.end_step()
    assert made.due.due and made.freqs is None
    for table, longest in ((None, 4), (torch.ones(4), 4), (torch.ones(()), 4)):
        assert made.look_for_freqs(table, pack_of(PackShape(6, 2, longest)), 6) is False
    for longest in (6, None):  # it may be a table
        assert made.look_for_freqs(torch.ones(6), SimpleNamespace(max_seqlen_q=longest), 6) is None
    assert dispatcher(BANK).look_for_freqs(torch.ones(6), PACK, 6) is False
    assert made.look_for_freqs(torch.ones(6), PACK, 6) is True
    assert not made.due.due  # kinds with a table are none any more
    batch = entered(made, PACK, 6, mask=MASK)
    assert batch.key.by_token is True
    assert not any(map(batch.take_freqs, (None, (), torch.ones(5, 2), torch.ones(()), MASK.expand(6, 6).T)))
    freqs = torch.rand(6, 2), torch.rand(6, 3)
    assert made.take(batch, torch.empty(6), freqs, MASK)
    given = [PACK.cu_seqlens_q, *freqs, MASK]
    assert all(map(torch.equal, batch.sources, given)) and len(batch.sources) == len(given)
    assert [each.shape for each in made.freqs or ()] == [(0, 2), (0, 3)]
    assert not batch.take_freqs(freqs[0])
    assert not isinstance(enter(made, pack_of(PackShape(6, 2, 6)), 6), EagerReason)


def test_every_value_of_a_key_makes_another_one() -> None:
    key = VariantKey(None, PackForm(False, False, None), grad=True)
    others: dict[str, Any] = {"capacity": BANK[1][0], "form": PackForm(True, False, None), "grad": False}
    others |= {"state": 1, "has_mask": True, "cp_size": 2, "by_token": True}
    made = [key.replace(**{name: value}) for name, value in others.items()]
    assert len({key, *made}) == len(made) + 1
    forms = [key.form.replace(**{name: True}) for name in key.form.as_dict()]
    assert len({key.form, *forms, key.form.replace(pad_between_seqs=False)}) == len(forms) + 2


def test_names_and_sizes_are_immutable_and_can_be_copied_and_sent() -> None:
    key = VariantKey(BANK[1][0], PackForm(True, False, None, True), grad=True, state=3)
    shape = PackShape(6, 2, 4)
    assert str(key.capacity) == "8 tokens, 3 documents of up to 8"
    for value in (key, key.form, key.capacity, shape):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
        assert len({value, value.replace()}) == 1
    assert len({shape, shape.replace(cp_size=2)}) == 2
    for sizes in (key.capacity, shape):
        with pytest.raises(AttributeError):
            sizes.tokens = 2
    with pytest.raises(TypeError):
        key.replace(nothing=1)
