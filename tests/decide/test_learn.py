# SPDX-License-Identifier: Apache-2.0
"""Learned capacities would have held every pack of the warm-up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagraph.decide.dispatch import PackShape, capacities_for, needs_of

shapes = st.builds(
    PackShape,
    tokens=st.integers(1, 4096),
    num_seqs=st.integers(2, 300),
    max_seqlen=st.integers(1, 4096),
    cp_size=st.just(1),
).filter(lambda shape: shape.max_seqlen <= shape.tokens)


@given(st.lists(shapes, min_size=1, max_size=20), st.sampled_from([0, 1]))
def test_every_observed_pack_fits(observed: list[PackShape], extra_seqs: int) -> None:
    learned = capacities_for(needs_of(observed, extra_seqs), extra_seqs)
    assert 1 <= len(learned) <= 2
    assert all(any(shape.exceeds(held) is None for held in learned) for shape in observed)


def test_most_packs_get_a_capacity_of_their_own() -> None:
    observed = [PackShape(100, count, 40) for count in (3, 4, 4, 4, 30)]
    assert [capacity.num_seqs for capacity in capacities_for(needs_of(observed))] == [4, 32]


@given(st.lists(st.lists(shapes, max_size=20), min_size=1, max_size=4), st.sampled_from([0, 1]))
def test_the_largest_of_each_number_holds_what_any_rank_has_observed(
    observed: list[list[PackShape]], extra_seqs: int
) -> None:
    """Also where one has observed nothing."""
    packs = [shape for of_rank in observed for shape in of_rank]
    needs = [needs_of(of_rank, extra_seqs) for of_rank in observed]
    agreed = [*map(max, zip(*needs, strict=True))]
    learned = capacities_for(agreed, extra_seqs) if packs else ()
    assert all(any(shape.exceeds(held) is None for held in learned) for shape in packs)


def test_nothing_is_learned_where_nobody_has_met_a_pack() -> None:
    with pytest.raises(ValueError, match="there were none"):
        capacities_for(needs_of([]))
