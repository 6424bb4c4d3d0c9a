# SPDX-License-Identifier: Apache-2.0
"""Attention of ranks that share a pack agrees with that of one process."""

import context_jobs
import pytest
import torch
from context_jobs import Heads
from worlds import Worlds

pytestmark = pytest.mark.megatron

# Over the largest entry: sums in another order, in float32 on the CPU; in bfloat16 on a GPU, where partial
# gradients are rounded before they travel.
BOUND = 2e-2 if torch.cuda.is_available() else 2e-6
GROUPED = Heads(8, 4, 16, 16)
MLA = Heads(4, 4, 48, 32)
PACKS = {
    "one document": ((64,), 0),
    "some, of which a few are empty": ((8, 0, 40, 16, 0), 0),
    "rows past the end": ((16, 8), 24),
}


CASES = {
    f"{pack}, {name}, {comm_type}": {"comm_type": comm_type, "heads": heads, "lengths": lengths, "tail": tail}
    for pack, (lengths, tail) in PACKS.items()
    for name, heads in {"grouped queries": GROUPED, "mla": MLA}.items()
    for comm_type in (None, "a2a")
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_has_its_rows_of_the_whole(worlds: Worlds, ranks: int) -> None:
    for answers in worlds.of(ranks).run(context_jobs.attend_in_each, cases=CASES):
        for case, answer in answers.items():
            for name, (distance, recurs) in answer.items():
                assert recurs, f"{name} of {case}"
                assert distance <= BOUND, f"{name} of {case}"
