# SPDX-License-Identifier: Apache-2.0
"""What all bank tests share: memory that starts as NaN, one seed, and banks that end with their test."""

from collections.abc import Iterator

import pytest
import torch
from bank_pair import Pair, banks, blocks


@pytest.fixture(autouse=True)
def surroundings(poisoned_memory: None) -> Iterator[None]:
    torch.manual_seed(0)
    yield
    for bank in list(banks):
        bank.release()
    banks.clear()


@pytest.fixture
def pair(device: str) -> Pair:
    """Blocks under a bank, captured for training, and eager beside it."""
    return Pair(device, blocks()).capture()
