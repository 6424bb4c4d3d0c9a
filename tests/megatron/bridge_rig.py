# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's own adapters, from an unpacked wheel: the package itself asks for far more than they do.

`MEGAGRAPH_TEST_BRIDGE` names the folder; `make test` unpacks the wheel and sets it.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from megagraph.demo.trainer import Trainer

FOLDER = os.environ.get("MEGAGRAPH_TEST_BRIDGE", "")
_PACKAGES = ("megatron.bridge", "megatron.bridge.peft", "megatron.bridge.utils")


def _import_from(folder: Path, module: str) -> Any:
    """A module of a package whose own `__init__` would import everything else."""
    for name in _PACKAGES:
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(folder.joinpath(*name.split(".")))]
            sys.modules[name] = package
    if importlib.util.find_spec("transformer_engine") is None and "transformer_engine" not in sys.modules:
        # Adapters of its own layers are classes of theirs; those of Megatron's layers know none.
        engine, layers = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
        vars(layers).update(Linear=nn.Linear, ops=SimpleNamespace(Sequential=nn.Sequential))
        vars(engine).update(pytorch=layers)
        sys.modules |= {"transformer_engine.pytorch": layers, "transformer_engine": engine}
        try:
            return importlib.import_module(module)
        finally:
            del sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"]
    return importlib.import_module(module)


def lora_linear() -> type[Any]:
    """Its `LoRALinear`; skips the test where there is no wheel."""
    if not Path(FOLDER, "megatron", "bridge", "peft").is_dir():
        pytest.skip("needs MEGAGRAPH_TEST_BRIDGE, a folder with an unpacked wheel of megatron-bridge")
    found: type[Any] = _import_from(Path(FOLDER), "megatron.bridge.peft.lora_layers").LoRALinear
    return found


def _adapted(linear: Any, config: Any) -> nn.Module:
    """As Megatron-Bridge's `LoRA.transform()` wraps a linear layer of which each rank has all columns."""
    wrapper_type = lora_linear()
    peft_utils = sys.modules["megatron.bridge.peft.utils"]
    adapter = peft_utils.ParallelLinearAdapter(
        linear.weight.shape[1],
        linear.weight.shape[0],
        4,
        base_linear_name="linear_fc2",
        activation="identity",
        column_init_method="xavier",
        row_init_method="normal",  # zero at first in a training: then the adapter would not matter
        input_is_parallel=True,
        model_parallel_config=config,
        alpha=8,
    )
    wrapped: nn.Module = wrapper_type(linear, adapter)
    return wrapped


def adapt(chunk: Any) -> None:
    """Trains adapters alone, around the second linear layer of each MLP."""
    chunk.requires_grad_(False)
    for layer in chunk.decoder.layers:
        layer.mlp.linear_fc2 = _adapted(layer.mlp.linear_fc2, chunk.config)


def wrappers(trainer: Trainer) -> list[Any]:
    """Of all layers."""
    return [layer.mlp.linear_fc2 for layer in trainer.chunk.decoder.layers]
