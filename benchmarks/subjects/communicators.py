# SPDX-License-Identifier: Apache-2.0
"""What NCCL's communicators of ranks that share packs take of a device's memory."""

from typing import Any

import torch
from torch import distributed

from benchmarks.measuring.children import Answer

MIB = 2**20


def measure_communicators(cp_sizes: tuple[int, ...]) -> Answer:
    """MiB that the groups of each size take on a rank, by size. On as many ranks as the largest has."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    together = distributed.new_group(backend="gloo")
    row = torch.zeros(2**20, device="cuda")
    on_device = -(-ranks // torch.cuda.device_count())
    found: Answer = {}
    free = _free(together)
    for size in sorted(cp_sizes, reverse=True):
        members = [list(range(first, first + size)) for first in range(0, ranks, size)]
        group = [distributed.new_group(each) for each in members][rank // size]
        distributed.all_gather_into_tensor(torch.empty(size * row.numel(), device="cuda"), row, group=group)
        distributed.reduce_scatter_tensor(torch.empty_like(row), row.repeat(size), group=group)
        torch.cuda.empty_cache()
        before, free = free, _free(together)
        found[str(size)] = (before - free) / on_device / MIB
    return found


def _free(together: Any) -> int:
    """Bytes that nobody has taken, once all ranks have done what came before."""
    torch.cuda.synchronize()
    distributed.barrier(group=together)
    free = torch.cuda.mem_get_info()[0]
    distributed.barrier(group=together)
    return free
