# SPDX-License-Identifier: Apache-2.0
"""A core that does not fit the installed torch says so in one sentence, before it is loaded."""

import importlib
import re
import sys
from importlib import metadata

import pytest
import torch

import megagraph

build_info = importlib.import_module("megagraph._build_info")
INSTALLED = metadata.version("torch")


@pytest.fixture
def cuda_13(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed torch is one for CUDA 13."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_the_core_that_is_installed_fits() -> None:
    megagraph._check_torch()


def with_number(version: str, place: int) -> str:
    """The version with the number at `place` raised by one: 1 is its minor, 2 its patch."""
    numbers = version.split("+")[0].split(".")
    numbers[place] = str(int(re.match(r"\d+", numbers[place])[0]) + 1)
    return ".".join(numbers)


@pytest.mark.parametrize("place", [1, 2], ids=["minor", "patch"])
def test_a_core_for_another_release_of_torch_names_both(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another patch release was let in, and its objects may be laid out in another way."""
    built = with_number(INSTALLED, place)
    monkeypatch.setattr(build_info, "TORCH_VERSION", built)
    expected = f"built against torch {built}, and torch {INSTALLED} is installed: reinstall"
    with pytest.raises(ImportError, match=re.escape(expected)):
        megagraph._check_torch()


@pytest.mark.parametrize("suffix", ["", "+cpu", "+cu130"])
def test_how_the_same_release_was_built_is_no_other_release(
    suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_info, "TORCH_VERSION", INSTALLED.split("+")[0] + suffix)
    megagraph._check_torch()


def test_a_core_for_another_cuda_names_both(monkeypatch: pytest.MonkeyPatch, cuda_13: None) -> None:
    monkeypatch.setattr(build_info, "CUDA_VERSION", "12.8")
    with pytest.raises(ImportError, match=r"built for CUDA 12\.8, .* is for CUDA 13\.0: reinstall"):
        megagraph._check_torch()


def test_a_core_with_cuda_refuses_a_torch_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_info, "CUDA_VERSION", "13.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ImportError, match=r"built for CUDA 13\.0, .* is without CUDA: reinstall"):
        megagraph._check_torch()


@pytest.mark.parametrize("built", ["13.0", "13.2", None], ids=["same", "another minor", "CPU-only"])
def test_a_core_goes_with_its_cuda_major(
    built: str | None, monkeypatch: pytest.MonkeyPatch, cuda_13: None
) -> None:
    monkeypatch.setattr(build_info, "CUDA_VERSION", built)
    megagraph._check_torch()


def test_the_cuda_of_torch_is_known_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.version.cuda
    monkeypatch.delitem(sys.modules, "torch")
    assert megagraph._cuda_of_torch() == expected
    assert "torch" not in sys.modules
