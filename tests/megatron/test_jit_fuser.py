# SPDX-License-Identifier: Apache-2.0
"""Megatron's fused functions are compiled, and compiled again for new shapes: bits stay those of eager."""

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import megatron_rig as rig
import pytest
import torch
import torch._inductor.config
from megatron_rig import LAYERS, OPTIONS, Micro, Pair, compare_runs, grads, graph_config, ran, step
from same_bits import assert_same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import megagraph
from megagraph._C import Capacity
from megagraph.demo.trainer import Trainer

FUSED = {"bias_dropout_fusion": True, "bias_activation_fusion": True}


@pytest.fixture(scope="module", autouse=True)
def compiler(megatron: None) -> Iterator[None]:
    """torch.compile, where it works at all, with nothing compiled before."""
    torch._dynamo.reset()
    # Processes of its own take longer to start, and so does asking which vector units there are.
    options = torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False})
    # Dynamo flushes the processor's caches to time the guards of each frame.
    untimed = mock.patch("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, create=True)
    with options, untimed:
        try:
            torch.compile(torch.sin)(torch.ones(3))
        except Exception as error:
            pytest.skip(f"torch.compile does not work here: {type(error).__name__}")
        yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # what a compiler says of itself
def test_fused_functions_inside_graphs_have_the_bits_of_eager() -> None:
    """Both see the canonical shape, also where packs of other shapes run between them."""
    bank = tuple(Capacity(tokens=tokens, num_seqs=4, max_seqlen=tokens) for tokens in (32, 64))
    misfit = Micro(lengths=(60, 20), seed=9)
    steps = [
        [Micro(lengths=(9, 20), seed=1), misfit],
        [Micro(lengths=(3, 30, 8), seed=2), Micro(lengths=(21,), seed=3)],
        [misfit, Micro(lengths=(50,), seed=4)],
        [Micro(lengths=(5, 6), seed=5), Micro(lengths=(40, 24), seed=6)],
    ]
    graphed = compare_runs(steps, plugin={"capacities": bank}, config={**FUSED, "hidden_dropout": 0.2})
    ran(graphed.report, 5 * LAYERS, WARMING_UP=LAYERS, TOO_MANY_TOKENS=2 * LAYERS)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_runs_as_its_compiler_has_it() -> None:
    """Bug: dynamo traced the plugin, and training ended in its errors."""
    pair = Pair(layers=1)  # each costs the compiler seconds
    pair.step(micro := Micro(lengths=(9, 20)), times=3)
    before = pair.report()

    compiled = torch.compile(pair.graphed.chunk, backend="eager")  # the other's bits are the same

    def train(trainer: Any) -> Any:
        trainer.zero_grad()
        loss = (compiled if trainer is pair.graphed else trainer.chunk)(**micro.given(trainer.device)).sum()
        loss.backward()
        return loss.detach(), grads(trainer.chunk)

    assert_same_bits(*pair.each(train))
    assert pair.report()["calls"] == before["calls"]


@pytest.mark.filterwarnings("ignore")
def test_layers_beside_a_compiled_module_replay() -> None:
    """Bug: a cycle of dynamo's kept an output of the verification, and with it the only slot."""
    steps = [[Micro(lengths=(9, 20), seed=seed)] for seed in range(4)]
    compiled = rig.around_mlps(partial(torch.compile, backend="eager"))
    ran(compare_runs(steps, prepare=compiled).report, 3 * LAYERS, WARMING_UP=LAYERS)


def test_a_model_that_goes_while_something_is_compiled_disturbs_nothing() -> None:
    """Bug: a model's graphs went inside garbage collection, and read the device in the middle of a trace."""
    megagraph.install(graph_config())
    trainer = Trainer(OPTIONS)
    step(trainer, [Micro(lengths=(9, 20))], times=2)
    layer = weakref.ref(trainer.chunk.decoder.layers[0])
    del trainer
    with FakeTensorMode():
        gc.collect()
    assert layer() is None
    (report,) = megagraph.reports()
    assert report["replays"] == LAYERS
