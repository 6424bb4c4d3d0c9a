# SPDX-License-Identifier: Apache-2.0
"""What all bank tests share: the device, and memory that starts as NaN."""

import os
from collections.abc import Iterator

import pytest
import torch
from bank_pair import release_banks

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS, read at its start


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def deterministic_and_poisoned() -> Iterator[None]:
    """Deterministic algorithms; fresh memory is filled with NaN, so that what nobody writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the shapes are small: more threads only wait for one another
    torch.manual_seed(0)
    yield
    release_banks()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(before)
