# SPDX-License-Identifier: Apache-2.0
"""launch.py MODULE ARGUMENTS: as `python -m`, without a GPU. Keeps each step's weights in the file KEEP."""

import os
import runpy
import sys
import warnings

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from megagraph.demo.cpu import megatron_on_cpu

warnings.filterwarnings("ignore")
kept = []
name = sys.argv[1]
sys.argv = sys.argv[1:]


def keep(optimizer, args, kwargs):
    params = (param for group in optimizer.param_groups for param in group["params"])
    kept.append([param.detach().clone() for param in params])


def on_a_gpu(tensor, *args, type_of=torch.Tensor.type, **kwargs):
    """Megatron's optimizer asks where a parameter lies by the name of its type."""
    found = type_of(tensor, *args, **kwargs)
    return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found


nothing = dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "ipc_collect"), lambda *args: None)
memory = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
vars(torch.cuda).update(nothing, **dict.fromkeys(memory, lambda *args: 0), device_count=lambda: 1)
vars(torch.cuda).update(get_device_name=lambda *args: "CPU", mem_get_info=lambda *args: (0, 1))
torch.Tensor.type = on_a_gpu
torch.use_deterministic_algorithms(True)
register_optimizer_step_post_hook(keep)
if name.startswith("swift"):
    import swift.sequence_parallel  # noqa: F401  # compiles functions of torch, before they are wrapped
with megatron_on_cpu():
    if name.startswith("verl."):
        from verl.utils.checkpoint import CheckpointHandler

        # Its own needs the buffers of the distributed optimizer.
        CheckpointHandler.save_checkpoint = lambda self, step: None
    runpy.run_module(name, run_name="__main__", alter_sys=True)
torch.save(kept, os.environ["KEEP"])
