# SPDX-License-Identifier: Apache-2.0
"""The capacities that pad packs least, against every choice that there is."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagraph._C import Capacity, PackShape, best_capacities

Packs = Mapping[PackShape, int]
# Few values, so that packs share tokens and documents.
shapes = st.builds(PackShape, st.integers(1, 7), st.integers(0, 4), st.integers(1, 7))
packs_seen = st.dictionaries(shapes, st.integers(1, 5), min_size=1, max_size=7)
rooms = st.tuples(st.integers(1, 9), st.integers(1, 5))


def padded(packs: Packs, capacities: Sequence[Capacity]) -> tuple[int, int] | None:
    """Tokens and documents; None if a pack fits none."""
    tokens = documents = 0
    for shape, count in packs.items():
        fitting = [it for it in capacities if shape.exceeds(it) is None]
        if not fitting:
            return None
        chosen = min(fitting)
        tokens += count * (chosen.tokens - shape.tokens)
        documents += count * (chosen.num_seqs - max(shape.num_seqs, 1))
    return tokens, documents


def every_choice(packs: Packs, room: tuple[int, int], multiple: int, most: int) -> Iterator[list[Capacity]]:
    """That has room for larger packs."""
    tokens = {-(-number // multiple) * multiple for number in (*(it.tokens for it in packs), room[0])}
    documents = {max(it.num_seqs, 1) for it in packs} | {room[1]}
    sizes = product(tokens, documents)
    all_of_them = sorted(Capacity(tokens=rows, num_seqs=it, max_seqlen=rows) for rows, it in sizes)
    for size in range(1, most + 1):
        for some in combinations(all_of_them, size):
            if any(it.tokens == max(tokens) and it.num_seqs >= room[1] for it in some):
                yield [*some]


def finds_all(packs: Packs, capacities: Sequence[Capacity]) -> bool:
    """Whether each pack fits the one of most documents, of each number of tokens that is enough for it."""
    most = {it.tokens: it.num_seqs for it in sorted(capacities)}
    return all(
        shape.num_seqs <= count
        for shape, (tokens, count) in product(packs, most.items())
        if shape.tokens <= tokens
    )


@settings(max_examples=60, deadline=None)
@given(packs=packs_seen, room=rooms, multiple=st.sampled_from([1, 2, 3]))
def test_no_other_choice_pads_fewer_tokens_nor_as_many_with_fewer_documents(
    packs: dict[PackShape, int], room: tuple[int, int], multiple: int
) -> None:
    # In pack_reader.cpp no document is longer than its pack.
    packs = {it.replace(max_seqlen=min(it.max_seqlen, it.tokens)): count for it, count in packs.items()}
    others = [(it, cost) for it in every_choice(packs, room, multiple, 3) if (cost := padded(packs, it))]
    choices = best_capacities(packs, room=room, multiple=multiple, captures=3)
    for most, (capacities, tokens) in enumerate(choices, start=1):
        cost = padded(packs, capacities)
        assert cost is not None and cost[0] == tokens
        assert 1 <= len(capacities) <= most and capacities == sorted(capacities)
        assert all(it.tokens % multiple == 0 and it.max_seqlen == it.tokens for it in capacities)
        assert capacities[-1].tokens >= room[0] and capacities[-1].num_seqs >= room[1]
        assert finds_all(packs, capacities)
        as_large = [(it, other) for it, other in others if len(it) <= most]
        assert tokens == min(other[0] for _it, other in as_large)
        assert cost == min(other for it, other in as_large if finds_all(packs, it))


def test_many_packs_take_no_longer_than_somebody_waits() -> None:
    packs = {PackShape(1 + it * 37 % 30_011, 1 + it % 50, 1): 1 + it % 3 for it in range(4000)}
    choices = best_capacities(packs, room=(32_768, 64), multiple=1, captures=4)
    paddings = [padded for _capacities, padded in choices]
    assert paddings == sorted(paddings, reverse=True) and len({*paddings}) == 4


def test_empty_packs_get_no_capacity_of_no_tokens() -> None:
    """Bug: they got one, which took a capture."""
    packs = {PackShape(0, 0, 1): 3, PackShape(64, 4, 64): 5}
    choices = best_capacities(packs, room=(64, 4), multiple=1, captures=3)
    assert all(it.tokens > 0 for capacities, _padded in choices for it in capacities)


def test_what_makes_no_sense_is_refused() -> None:
    one = PackShape(4, 1, 4)
    for packs, multiple, captures, message in (
        ({}, 1, 1, "and there were none"),
        ({one: 0}, 1, 1, "expected counts of at least 1, got 0"),
        *(({one: 1}, *counts, "at least 1, got") for counts in ((0, 1), (1, 0))),
    ):
        with pytest.raises(ValueError, match=message):
            best_capacities(packs, room=(1, 1), multiple=multiple, captures=captures)
