# SPDX-License-Identifier: Apache-2.0
"""The world of ranks that tests run in: whoever fails or waits for ever is named, and soon."""

import os
import re
import signal
import subprocess
from multiprocessing.util import Finalize
from typing import Any

import pytest
import torch
from torch import distributed
from worlds import Worlds, patience

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the world of tests itself: shown on the CPU"),
]


def rank_of_each() -> int:
    """Its own rank, of all ranks that answer."""
    found = [torch.zeros(1) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, torch.tensor([float(distributed.get_rank())]), group=_gloo())
    assert [int(rank) for rank in found] == list(range(distributed.get_world_size()))
    return distributed.get_rank()


def _gloo() -> Any:
    return distributed.new_group(backend="gloo")


def waits_alone(*, rank: int) -> None:
    """One rank enters a collective that no other enters; it is stopped before, until somebody asks."""
    group, pid = _gloo(), os.getpid()
    if distributed.get_rank() == rank:
        subprocess.Popen(["sh", "-c", f"sleep {patience()}; kill -CONT {pid}"])
        os.kill(pid, signal.SIGSTOP)
        distributed.all_reduce(torch.zeros(1), group=group)


def fails_alone(*, rank: int) -> None:
    """One rank raises while the others wait for it."""
    group = _gloo()
    if distributed.get_rank() == rank:
        raise RuntimeError("of this rank alone")
    distributed.all_reduce(torch.zeros(1), group=group)


def will_end_badly(*, rank: int) -> None:
    """One rank answers, and ends with another exit code than 0."""
    if distributed.get_rank() == rank:
        Finalize(None, os._exit, (3,), exitpriority=0)


def test_ranks_that_hang_or_fail_or_end_badly_are_named_and_the_next_function_runs() -> None:
    """Bugs: a rank that waited for another was a test of ten minutes, which named no rank. How ranks ended
    was an error of whichever test came next, or had been the last one."""
    worlds = Worlds()
    world = worlds.of(2)
    world.run(will_end_badly, rank=1)
    assert world.close() == [0, 3]
    assert world.run(rank_of_each) == [0, 1]  # others
    with pytest.raises(AssertionError) as hung:
        world.run(waits_alone, rank=1, late_seconds=0.2)
    first, *rest = str(hung.value).splitlines()
    assert first == "answered: ranks [0]; did not answer in time: ranks [1]"
    assert re.match(r"rank 1: no answer after \d+ s\. It is at:", rest[0])
    assert any("in waits_alone" in line for line in rest) and any("in all_reduce" in line for line in rest)
    with pytest.raises(AssertionError, match=r"answered: ranks \[\]; .* ranks \[0\]") as failed:
        world.run(fails_alone, rank=1, late_seconds=0.2)
    assert "rank 1: Traceback" in str(failed.value) and "of this rank alone" in str(failed.value)
    assert "in fails_alone" in str(failed.value).partition("rank 1:")[0]  # where rank 0 waits for it
    assert worlds.close() == [0, 3]  # of those that nothing broke
