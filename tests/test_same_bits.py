# SPDX-License-Identifier: Apache-2.0
"""The comparison of all tests of bits sees every difference, and says where it is."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from same_bits import BitsDiffer, assert_same_bits
from torch import Tensor


@dataclass
class Left:
    losses: list[Tensor]
    grads: dict[str, Tensor]
    report: dict[str, Any] = field(default_factory=dict, compare=False)


def left(**report: int) -> Left:
    return Left([torch.ones(2), torch.ones(3)], {"weight": torch.zeros(2, 2)}, report)


def test_what_is_equal_passes_whatever_is_not_compared() -> None:
    assert_same_bits(left(replays=1), left(replays=2))
    assert_same_bits([None, 3, "a", (1.0, 2.0)], [None, 3, "a", [1.0, 2.0]])


def test_the_place_of_each_difference_is_named() -> None:
    other = left()
    other.losses[1][2] = 2.0
    other.grads["weight"][1, 0] = -1.0
    with pytest.raises(BitsDiffer) as found:
        assert_same_bits(left(), other, "step 3")
    assert str(found.value).splitlines() == [
        "step 3.losses[1]: 1 of 3 entries differ, first 1.0 and 2.0 at [2]",
        "step 3.grads['weight']: 1 of 4 entries differ, first 0.0 and -1.0 at [1, 0]",
    ]


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (torch.ones(2), torch.ones(3), r"they: torch.float32 \[2\] and torch.float32 \[3\]"),
        (torch.ones(2), torch.ones(2).double(), "torch.float32 .* and torch.float64"),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), "1 of 1 entries differ, first nan and nan"),
        (torch.ones(2), None, "they: .* and None"),
        (torch.ones(()), 1.0, "they: .* and 1.0"),
        ([1], [1, 2], r"other parts: \[0\] and \[0, 1\]"),
        ({"a": 1}, {"b": 1}, r"other parts: \['a'\] and \['b'\]"),
        (1, 2, "they: 1 and 2"),
    ],
)
def test_whatever_differs_is_an_error(one: Any, other: Any, message: str) -> None:
    with pytest.raises(BitsDiffer, match=message):
        assert_same_bits(one, other)


def test_a_long_message_names_the_first_and_counts_the_others() -> None:
    with pytest.raises(BitsDiffer, match=r"\[7\]: 7 and 8\nand 12 more$"):
        assert_same_bits(list(range(20)), list(range(1, 21)))
