# SPDX-License-Identifier: Apache-2.0
"""The comparison of all tests of bits sees every difference."""

from typing import Any

import pytest
import torch
from same_bits import BitsDiffer, assert_same_bits


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (torch.ones(2), torch.ones(3), r"they: torch.float32 \[2\] and torch.float32 \[3\]"),
        (torch.ones(2), torch.ones(2).double(), "torch.float32 .* and torch.float64"),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), "1 of 1 entries differ, first nan and nan"),
        (torch.ones(2), None, "they: .* and None"),
        ([1], [1, 2], r"other parts: \[0\] and \[0, 1\]"),
        ({"a": [torch.ones(2)]}, {"a": [torch.zeros(2)]}, r"\['a'\]\[0\]: 2 of 2 entries differ"),
        (1, 2, "they: 1 and 2"),
    ],
)
def test_whatever_differs_is_an_error(one: Any, other: Any, message: str) -> None:
    assert_same_bits([None, 3, "a", (1.0, torch.ones(2))], [None, 3, "a", [1.0, torch.ones(2)]])
    with pytest.raises(BitsDiffer, match=message):
        assert_same_bits(one, other)
