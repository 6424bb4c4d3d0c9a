# SPDX-License-Identifier: Apache-2.0
"""Runs megatron-core on the CPU, for the demo and the tests where there is no GPU.

megatron-core names the CUDA device throughout; inside this context such names mean the CPU. Dense
models, schedules and DDP work; the distributed optimizer does not. Makes no claim of speed.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["megatron_on_cpu"]


class _CudaMeansCpu(TorchFunctionMode):
    """Turns `device="cuda..."` into the CPU in every call of torch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Lets megatron-core run on the CPU inside. Does nothing where there is a GPU."""
    if torch.cuda.is_available():
        yield
        return
    replaced: dict[str, Callable[..., Any]] = {
        "current_device": lambda: torch.device("cpu"),
        "current_stream": lambda *args: torch.cpu.current_stream(),
        "synchronize": lambda *args, **kwargs: None,
    }
    originals = {name: getattr(torch.cuda, name) for name in replaced}
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)
    try:
        with _CudaMeansCpu():
            yield
    finally:
        for name, function in originals.items():
            setattr(torch.cuda, name, function)
