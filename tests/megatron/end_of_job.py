# SPDX-License-Identifier: Apache-2.0
"""A rank of a job, as torchrun starts it: trains on packs of several sizes and ends, in each of some ways."""

import os
import sys

import sharing_jobs
import torch
import worlds
from torch import distributed

import megagraph
from megagraph.demo.cpu import megatron_on_cpu


def main(way: str) -> None:
    """Trains and ends; `way` is that of `sharing_jobs.end()`."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    megagraph.uninstall()  # of the way before
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        worlds.take_gpu(rank, size)
    if not distributed.is_initialized():
        # torchrun's, in which each job after another has names of its own.
        store = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(
            backend, store=distributed.PrefixStore(way, store), rank=rank, world_size=size
        )
    with megatron_on_cpu():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(7)
        sharing_jobs.end(way)
    print("has ended", flush=True)


if __name__ == "__main__":
    for way in sys.argv[1:]:
        main(way)
