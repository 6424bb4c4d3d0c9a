# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagraph.demo.lengths import lognormal_lengths

ARGUMENTS = {"num": 64, "mean": 1000.0, "sigma": 1.0, "minimum": 16, "maximum": 8192, "seed": 7}


def draw(**changed: Any) -> torch.Tensor:
    return lognormal_lengths(**{**ARGUMENTS, **changed})  # type: ignore[arg-type]


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
)
def test_no_length_leaves_the_bounds(mean: float, sigma: float, bounds: list[int]) -> None:
    minimum, maximum = bounds
    lengths = draw(mean=mean, sigma=sigma, minimum=minimum, maximum=maximum)
    assert minimum <= lengths.min().item() <= lengths.max().item() <= maximum


def test_an_argument_out_of_range_is_refused_by_name() -> None:
    wrong = {"num": [0], "mean": [0.0, math.inf, math.nan], "sigma": [-1.0, math.nan]}
    for name, values in (wrong | {"minimum": [0], "maximum": [15], "seed": [-1]}).items():
        for value in values:
            with pytest.raises(ValueError, match=rf"^expected (a finite )?{name} .*, got {value}$"):
                draw(**{name: value})
