# SPDX-License-Identifier: Apache-2.0
"""Adapters: the reference is the policy with them off. Ours, and Megatron-Bridge's if its wheel is there."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import megatron_rig as rig
import pytest
import torch
from host_rig import PeftLinear, SwiftLinear, adapt, without_adapters
from same_bits import assert_same_bits
from torch import nn

FOLDER = os.environ.get("MEGAGRAPH_TEST_BRIDGE", "")


def _import_lora() -> Any:
    """Megatron-Bridge's, of a package whose own `__init__` would import everything else."""
    for name in ("megatron.bridge", "megatron.bridge.peft", "megatron.bridge.utils"):
        if name not in sys.modules:
            sys.modules[name] = package = ModuleType(name)
            package.__path__ = [str(Path(FOLDER, *name.split(".")))]
    stand_in = {}
    if importlib.util.find_spec("transformer_engine") is None:
        # Adapters of its own layers are classes of theirs; those of Megatron's layers know none.
        engine, layers = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
        vars(layers).update(Linear=nn.Linear, ops=SimpleNamespace(Sequential=nn.Sequential))
        vars(engine).update(pytorch=layers)
        stand_in = {"transformer_engine.pytorch": layers, "transformer_engine": engine}
    sys.modules |= stand_in
    try:
        return importlib.import_module("megatron.bridge.peft.lora_layers")
    finally:
        for name in stand_in:
            del sys.modules[name]


def _adapt_as_bridge(chunk: Any) -> None:
    """As Megatron-Bridge's `LoRA.transform()`: trains adapters around the second linear of each MLP."""
    wrapper_type = _import_lora().LoRALinear
    how = {
        **{"base_linear_name": "linear_fc2", "activation": "identity", "column_init_method": "xavier"},
        "row_init_method": "normal",  # zero at first in a training: then the adapter would not matter
        **{"input_is_parallel": True, "model_parallel_config": chunk.config, "alpha": 8},
    }
    chunk.requires_grad_(False)
    for layer in chunk.decoder.layers:
        rows, columns = layer.mlp.linear_fc2.weight.shape
        adapter = sys.modules["megatron.bridge.peft.utils"].ParallelLinearAdapter(columns, rows, 4, **how)
        layer.mlp.linear_fc2 = wrapper_type(layer.mlp.linear_fc2, adapter)


ROUNDS = 50 if rig.ON_GPU else 4

_ADAPT = {
    "ours": adapt,
    "PEFT's": partial(adapt, kind=PeftLinear),
    "mcore-bridge's": partial(adapt, kind=SwiftLinear),
    "Megatron-Bridge's": _adapt_as_bridge,
}


@pytest.fixture(params=_ADAPT)
def pair(request: pytest.FixtureRequest) -> rig.Pair:
    is_bridges = request.param == "Megatron-Bridge's"
    if is_bridges and not Path(FOLDER, "megatron", "bridge", "peft").is_dir():
        pytest.skip("needs MEGAGRAPH_TEST_BRIDGE, a folder with an unpacked wheel of megatron-bridge")
    return rig.Pair(prepare=_ADAPT[request.param])


def test_a_reference_without_adapters_beside_a_policy_with_them(pair: rig.Pair) -> None:
    """Every pass has the bits of eager, and replays from the second round on."""
    left, packs = [], iter(rig.steps_of(2 * ROUNDS))
    for mini_batches in zip(packs, packs, strict=True):
        pair.evaluate(*mini_batches[0], *mini_batches[1])
        with without_adapters(*(trainer.chunk for trainer in pair.both)):
            pair.evaluate(*mini_batches[0], *mini_batches[1])
        for mini_batch in mini_batches:
            pair.step(*mini_batch)
        report = pair.report()
        left.append((report["eager"], report["capture_seconds"]))
    assert left[2:] == left[2:3] * (ROUNDS - 2) and set(report["eager"]) <= {"WARMING_UP", "STATE_CHANGED"}
    # Training, and both modes of evaluation; training once more, if replays' Python leaves it another flag.
    has_flags = any(isinstance(module, SwiftLinear) for module in pair.graphed.chunk.modules())
    again = int(has_flags and not rig.ON_GPU)
    assert len(report["states"]) == 3 + again
    assert report["graphs"] == (2 + 1 + 1 + 2 * again) * rig.LAYERS
    assert report["failures"] == [] and report["verification"]["unverified"] == 0
    # Adapters matter.
    with without_adapters(pair.eager.chunk):
        without = rig.evaluate(pair.eager, [rig.ONE], eager=True)
    assert not torch.equal(without[0], rig.evaluate(pair.eager, [rig.ONE], eager=True)[0])


def test_a_reference_inside_of_a_step_is_never_the_policy(pair: rig.Pair) -> None:
    """As DPO asks for it; no step begins without adapters, nor with a flag that a call without them left."""

    def micros(trainer: Any, references: list[torch.Tensor]) -> Iterator[rig.Micro]:
        """Each twice, first without adapters and without gradients."""
        for micro in (rig.ONE, rig.TWO):
            with without_adapters(trainer.chunk), torch.no_grad():
                references.append(rig.forward(trainer.model, micro, trainer.device)[0])
            yield micro

    for _ in range(4):
        assert_same_bits(*pair.each(lambda it: (rig.step(it, micros(it, found := []), 2), found)))
    pair.ran(3 * 2 * 2 * rig.LAYERS, unverified=0, WARMING_UP=2 * 2 * rig.LAYERS)
