# SPDX-License-Identifier: Apache-2.0
"""What all bank tests share: memory that starts as NaN, one seed, and banks that end with their test."""

import os
from collections.abc import Iterator

import pytest
import torch
from bank_pair import Pair, blocks, release_banks

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS, read at its start


@pytest.fixture(autouse=True)
def surroundings(poisoned_memory: None) -> Iterator[None]:
    torch.manual_seed(0)
    yield
    release_banks()


@pytest.fixture
def pair(device: str) -> Pair:
    """Blocks under a bank, captured for training, and eager beside it."""
    return Pair(device, blocks()).capture()
