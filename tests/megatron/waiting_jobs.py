# SPDX-License-Identifier: Apache-2.0
"""What ranks run that answer, fail, or wait for one another for ever."""

import os
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import distributed


def rank_of_each() -> int:
    """Its own rank, of all ranks that answer."""
    found = [torch.zeros(1) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, torch.tensor([float(distributed.get_rank())]), group=_gloo())
    assert [int(rank) for rank in found] == list(range(distributed.get_world_size()))
    return distributed.get_rank()


def _gloo() -> Any:
    return distributed.new_group(backend="gloo")


def waits_alone(*, rank: int) -> None:
    """One rank enters a collective that no other enters."""
    group = _gloo()
    if distributed.get_rank() == rank:
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
