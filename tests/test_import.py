# SPDX-License-Identifier: Apache-2.0
"""A core that does not fit the installed torch says so in one sentence, before it is loaded."""

import contextlib
import importlib
import re
import sys
from importlib import metadata

import pytest
import torch

import megagraph

build_info = importlib.import_module("megagraph._build_info")
INSTALLED = metadata.version("torch")


def with_number(version: str, place: int) -> str:
    """The version with the number at `place` raised by one: 1 is its minor, 2 its patch."""
    numbers = version.split("+")[0].split(".")
    numbers[place] = str(int(re.match(r"\d+", numbers[place])[0]) + 1)
    return ".".join(numbers)


def test_a_core_for_another_release_of_torch_names_both_and_how_one_was_built_is_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another patch release was let in, and its objects may be laid out in another way."""
    for place in (1, 2):
        built = with_number(INSTALLED, place)
        monkeypatch.setattr(build_info, "TORCH_VERSION", built)
        expected = f"built against torch {built}, and torch {INSTALLED} is installed: reinstall"
        with pytest.raises(ImportError, match=re.escape(expected)):
            megagraph._check_torch()
    for suffix in ("", "+cpu", "+cu130"):
        monkeypatch.setattr(build_info, "TORCH_VERSION", INSTALLED.split("+")[0] + suffix)
        megagraph._check_torch()


@pytest.mark.parametrize(
    ("built", "installed", "message"),
    [
        ("12.8", "13.0", r"built for CUDA 12\.8, .* is for CUDA 13\.0: reinstall"),
        ("13.0", None, r"built for CUDA 13\.0, .* is without CUDA: reinstall"),
        ("13.0", "13.0", None),
        ("13.2", "13.0", None),
        (None, "13.0", None),
    ],
    ids=["another major", "torch without CUDA", "same", "another minor", "CPU-only"],
)
def test_a_core_goes_with_its_cuda_major(
    built: str | None, installed: str | None, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_info, "CUDA_VERSION", built)
    monkeypatch.setattr(torch.version, "cuda", installed)
    with pytest.raises(ImportError, match=message) if message else contextlib.nullcontext():
        megagraph._check_torch()


def test_the_cuda_of_torch_is_known_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.version.cuda
    monkeypatch.delitem(sys.modules, "torch")
    assert megagraph._cuda_of_torch() == expected
    assert "torch" not in sys.modules
