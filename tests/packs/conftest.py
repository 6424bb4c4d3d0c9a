# SPDX-License-Identifier: Apache-2.0
"""What all op tests share: memory that starts as NaN."""

import warnings

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def warnings_of_the_compiler() -> None:
    """The compiler's first import warns about torch's own code: let it do so before a test counts it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(lambda x: x + 1, backend="aot_eager")(torch.zeros(1))


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory: None) -> None:
    """In every test."""
