# SPDX-License-Identifier: Apache-2.0
"""What all op tests share: the device, and memory that starts as NaN."""

import os
import warnings
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS, read at its start


# opcheck of torch 2.15 reads .grad of the copies that it makes of our tensors, and is told off by torch.
_OPCHECK_WARNING = "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.startswith("test_opcheck["):
            item.add_marker(pytest.mark.filterwarnings(_OPCHECK_WARNING))


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session", autouse=True)
def warnings_of_the_compiler() -> None:
    """The compiler's first import warns about torch's own code: let it do so before a test counts it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(lambda x: x + 1, backend="aot_eager")(torch.zeros(1))


@pytest.fixture
def host_waits_for_nothing() -> Iterator[None]:
    """Inside the test, a call that waits for the device is an error."""

    def set_mode(mode: str) -> None:
        with warnings.catch_warnings():  # the first call says that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode(mode)

    set_mode("error")
    yield
    set_mode("default")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill fresh memory with NaN (integers with their maximum), so that a row nobody writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)
