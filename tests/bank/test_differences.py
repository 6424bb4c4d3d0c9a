# SPDX-License-Identifier: Apache-2.0
"""Which differences of graphs from their modules are forgiven as chance, and which are not."""

import random

import pytest
import torch
from test_verify import Baked, captured, example
from torch import Tensor, nn

from megagraph.bank.verify import verify


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replayed CUDA graph runs no Python")
def test_what_is_no_chance_stays_a_difference_where_it_does_not_recur() -> None:
    """Something else is verified once more, and a module that is always alike excuses nothing."""

    class Once(nn.Module):
        """Its graph lies far off once; its own calls differ a little, or not at all."""

        def __init__(self, spread: float) -> None:
            super().__init__()
            self.spread, self.far = spread, [5.0]

        def forward(self, hidden: Tensor) -> Tensor:
            if Baked.is_captured:
                return hidden * (self.far.pop() if is_verified and self.far else 1.5)
            return hidden * random.uniform(1.5 - self.spread, 1.5 + self.spread)

    random.seed(3)
    is_verified = False
    layers = [Once(0.1), Once(0.0)]
    bank = captured(layers, "cpu", training=False)
    is_verified = True
    verified = verify(bank, "it", example("cpu"))
    assert {found.index for found in verified.differences} == {1} and verified.within_spread == {0}
    assert all(layer.far == [] for layer in layers)
