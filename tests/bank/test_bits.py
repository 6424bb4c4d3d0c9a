# SPDX-License-Identifier: Apache-2.0
"""How far runs are apart, without keeping each of them."""

import itertools

import pytest
import torch

from megagraph.bank import bits
from megagraph.bank.bits import Range, distance, has_bits

NAN, INF = float("nan"), float("inf")


def test_a_range_knows_what_keeping_every_run_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "_CHUNK", 7)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        runs = list(torch.randn(5, 3, 11, generator=generator))
        other = torch.randn(3, 11, generator=generator) * 2
        held = Range(runs[0])
        for run in runs[1:]:
            held.add(run)
        pairs = itertools.combinations(runs, 2)
        assert held.spread == max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
        assert held.largest(other) == max(float((other.double() - run.double()).abs().max()) for run in runs)
        assert held.holds(other) is (held.largest(other) <= 2 * held.spread)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, NAN], [3.0, NAN], 2.0),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([INF, 1.0], [INF, 1.5], 0.5),
        ([INF, 1.0], [-INF, 1.0], INF),
        ([], [], 0.0),
        ([1.0], [1.0, 2.0], INF),
    ],
)
def test_distances_of_what_is_no_number(one: list[float], other: list[float], expected: float) -> None:
    assert distance(torch.tensor(one), torch.tensor(other)) == expected


def test_whole_numbers_have_a_distance() -> None:
    assert distance(torch.tensor([1, 5]), torch.tensor([1, 2])) == 3.0
    assert distance(torch.tensor([True, False]), torch.tensor([True, True])) == 1.0


@pytest.mark.parametrize("strange", [torch.tensor([1.0, NAN]), torch.tensor([1.0])])
def test_runs_that_cannot_be_compared_lie_any_distance_apart(strange: torch.Tensor) -> None:
    held = Range(torch.tensor([1.0, 2.0]))
    held.add(strange)
    held.add(torch.tensor([1.0, 2.0]))
    assert held.spread == INF and held.holds(torch.tensor([7.0, 8.0]))


def test_a_negative_zero_has_a_bit() -> None:
    assert not has_bits(torch.zeros(3)) and has_bits(torch.tensor([0.0, -0.0]))
