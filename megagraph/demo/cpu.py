# SPDX-License-Identifier: Apache-2.0
"""Runs megatron-core on the CPU, for the demo, the tests and `megagraph run --cpu` if there is no GPU.

megatron-core and scripts name the CUDA device throughout; inside this context such names mean the CPU, its
random numbers, streams and events included, and NCCL means gloo. Dense models, tensor parallelism, recompute,
schedules and DDP work; the distributed optimizer does not. Makes no claim of speed.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["megatron_on_cpu"]

# What megatron-core calls with a device by name. A mode of torch's functions would see every call of torch,
# and take a tenth of all time.
_OF_TORCH = (
    *("arange", "as_tensor", "empty", "empty_like", "eye", "full", "ones", "rand", "randint", "randn"),
    *("tensor", "triu", "zeros", "zeros_like"),
)
_OF_TENSORS = ("new_empty", "new_zeros")
_NAMES = str, torch.device  # of devices


class _HostStream:
    """A stream and event of the host's, where everything runs in order."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **options: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def record_event(self) -> "_HostStream":
        return self

    def synchronize(self) -> None: ...


def _is_cuda(value: Any) -> bool:
    return isinstance(value, _NAMES) and str(value).startswith("cuda")


def _cuda_means_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch for which `device="cuda..."` is the CPU."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)  # for a copy to the device
        return function(*args, **kwargs)

    return on_cpu


def _moved_to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`to()`, whose device may be named by its place."""
    by_name = _cuda_means_cpu(function)

    @functools.wraps(function)
    def to(moved: Any, *args: Any, **kwargs: Any) -> Any:
        return by_name(moved, *("cpu" if _is_cuda(it) else it for it in args), **kwargs)

    return to


def _nccl_means_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a process group, of a backend by name or by default."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if isinstance(it, str) and "nccl" in it else it for it in args)
        if "nccl" in str(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        return function(*args, **kwargs)

    return make


def _optimizer_without_kernels() -> Iterator[tuple[Any, str, Any]]:
    """What Megatron's optimizer takes from Transformer Engine or Apex if they are installed.

    Theirs need a GPU. These are what it takes without them (`megatron/core/optimizer`, 0.16.1 and 0.19.2).
    """
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as steps

    of_torch = {
        "Adam": torch.optim.AdamW,
        "SGD": torch.optim.SGD,
        "USING_PYTORCH_OPTIMIZER": True,
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "l2_norm_impl": utils.local_multi_tensor_l2_norm,
        "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
        "multi_tensor_scale_tensor_impl": None,
    }
    for module in (optimizer, clip_grads, steps):
        yield from ((module, name, taken) for name, taken in of_torch.items() if hasattr(module, name))


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Lets megatron-core run on the CPU inside. Does nothing if there is a GPU."""
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.tensor_parallel import random as streams

    def rng_state(*args: Any, **kwargs: Any) -> Tensor:
        return torch.get_rng_state()

    replaced: Sequence[tuple[Any, str, Any]] = (
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "current_stream", lambda *args: torch.cpu.current_stream()),
        (torch.cuda, "synchronize", lambda *args, **kwargs: None),
        (torch.cuda, "Stream", _HostStream),
        (torch.cuda, "Event", _HostStream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda.nvtx, "range_push", lambda *args: None),
        (torch.cuda.nvtx, "range_pop", lambda *args: None),
        (Tensor, "record_stream", lambda *args: None),
        (torch.cuda, "get_rng_state", rng_state),
        (torch.cuda.random, "get_rng_state", rng_state),
        (Tensor, "to", _moved_to_cpu(Tensor.to)),
        (torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        (nn.Module, "to", _moved_to_cpu(nn.Module.to)),
        (torch.distributed, "init_process_group", _nccl_means_gloo(torch.distributed.init_process_group)),
        (torch.distributed, "new_group", _nccl_means_gloo(torch.distributed.new_group)),
        (torch.cuda, "manual_seed", torch.default_generator.manual_seed),
        (torch.cuda, "default_generators", {torch.device("cpu"): torch.default_generator}),
        # Megatron swaps streams of random numbers as soon as CUDA is there, which it never is.
        (streams, "_lazy_call", lambda call, **kwargs: call()),
        *_optimizer_without_kernels(),
        *((torch, name, _cuda_means_cpu(getattr(torch, name))) for name in _OF_TORCH),
        *((Tensor, name, _cuda_means_cpu(getattr(Tensor, name))) for name in _OF_TENSORS),
    )
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, stand_in in replaced:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
