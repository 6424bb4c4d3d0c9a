# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks, over NCCL, in processes of their own."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.multiprocessing.spawn import spawn

from benchmarks.measuring.children import Answer


def on_ranks(number: int, function: Callable[..., Answer], *arguments: Any) -> Sequence[Answer]:
    """What each rank answers, in their order.

    The ranks share the GPUs that there are; where they are too few, NCCL takes each rank for a host, and what
    they send goes over sockets.

    Args:
        number: of ranks.
        function: is called with `arguments` on each of them, in a process group of them all.
    """
    # Listens from here on, at a port that nobody else on this machine can be given meanwhile.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with multiprocessing.Manager() as manager:
        found = manager.dict()
        spawn(_rank, args=(number, store.port, found, function, arguments), nprocs=number)
        return [found[rank] for rank in range(number)]


def _rank(
    rank: int, number: int, port: int, found: Any, function: Callable[..., Answer], arguments: Sequence[Any]
) -> None:
    num_gpus = torch.cuda.device_count()
    if num_gpus < number:
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(rank % num_gpus)
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    distributed.init_process_group("nccl", store=store, rank=rank, world_size=number)
    found[rank] = function(*arguments)
    distributed.destroy_process_group()
