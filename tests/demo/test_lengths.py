# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagraph.demo.lengths import lognormal_lengths

ARGUMENTS: dict[str, Any] = {
    "num": 64,
    "mean": 1000.0,
    "sigma": 1.0,
    "minimum": 16,
    "maximum": 8192,
    "seed": 7,
}


def draw(**changed: Any) -> torch.Tensor:
    return lognormal_lengths(**{**ARGUMENTS, **changed})


def test_a_seed_alone_gives_as_many_lengths_as_are_asked_for() -> None:
    before, lengths = torch.get_rng_state(), draw(num=33)
    assert lengths.dtype == torch.int64 and lengths.shape == (33,)
    assert torch.equal(draw(), draw()) and not torch.equal(draw(), draw(seed=8))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_mean_is_that_of_the_lognormal_itself(sigma: float) -> None:
    """Not its median: taking mu as ln(mean) would be off by exp(sigma**2 / 2), 65% at sigma 1."""
    lengths = draw(num=200_000, sigma=sigma, minimum=1, maximum=2**40).double()
    assert lengths.mean().item() == pytest.approx(1000, rel=0.02)
    assert lengths.log().std().item() == pytest.approx(sigma, rel=0.02)
    assert lengths.median().item() == pytest.approx(1000 * math.exp(-(sigma**2) / 2), rel=0.02)


def test_extremes() -> None:
    assert set(draw(sigma=0).tolist()) == {1000}
    assert set(draw(sigma=500.0, mean=1e300).tolist()) <= {16, 8192}


@given(
    mean=st.floats(0.1, 1e6),
    sigma=st.floats(0, 5),
    bounds=st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)).map(sorted),
    seed=st.integers(0, 2**32),
)
def test_no_length_leaves_the_bounds(mean: float, sigma: float, bounds: list[int], seed: int) -> None:
    minimum, maximum = bounds
    lengths = draw(mean=mean, sigma=sigma, minimum=minimum, maximum=maximum, seed=seed)
    assert minimum <= lengths.min().item() <= lengths.max().item() <= maximum


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num": 0}, r"^expected num of at least 1, got 0$"),
        ({"mean": 0.0}, r"^expected a finite mean above 0, got 0\.0$"),
        ({"mean": math.inf}, r"^expected a finite mean above 0, got inf$"),
        ({"mean": math.nan}, r"^expected a finite mean above 0, got nan$"),
        ({"sigma": -1.0}, r"^expected a finite sigma of at least 0, got -1\.0$"),
        ({"sigma": math.nan}, r"^expected a finite sigma of at least 0, got nan$"),
        ({"minimum": 0}, r"^expected minimum of at least 1, got 0$"),
        ({"maximum": 15}, r"^expected maximum of at least minimum \(16\), got 15$"),
        ({"seed": -1}, r"^expected seed of at least 0, got -1$"),
    ],
)
def test_an_argument_out_of_range_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(**changed)
