# SPDX-License-Identifier: Apache-2.0
"""What all tests of the Megatron floor share: one process group, deterministic bits, a clean plugin."""

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_rig import OPTIONS, Install, Pair, forget_metrics, graph_config, metrics
from moe_rig import experts_on_cpu
from streams import seed_streams
from torch import distributed
from watched import every_graph_is_compared_or_named, forget_loss_scale, free_models, models_in_memory
from worlds import OnOneDevice, World, Worlds

import megagraph
from megagraph.demo.cpu import megatron_on_cpu
from megagraph.demo.trainer import Trainer, process_groups


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "worlds" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)


@pytest.fixture(scope="session")
def process_group() -> Iterator[None]:
    """torch.distributed and Megatron's groups of one process, for the whole session."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.distributed's own, of a group on the CPU
        logging.getLogger("megatron").setLevel(logging.ERROR)
        # Or the threads of sixty devices would look all the time.
        one_device = mock.patch.object(distributed.distributed_c10d, "ProcessGroupGloo", OnOneDevice)
        with megatron_on_cpu(), one_device:
            group = process_groups()
            group.__enter__()
    yield
    with megatron_on_cpu():
        group.__exit__(None, None, None)


@pytest.fixture(scope="module", autouse=True)
def megatron(process_group: None) -> Iterator[None]:
    """Megatron and its experts on the CPU where there is no GPU; only for the tests of this folder."""
    with megatron_on_cpu(), experts_on_cpu(), every_graph_is_compared_or_named():
        yield
        free_models()
    gc.freeze()  # what a file has imported, such as a compiler


@pytest.fixture(autouse=True)
def exact(poisoned_memory: None) -> None:
    """Deterministic algorithms, and fresh memory full of NaN."""


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    """Whatever a test installed is gone afterwards; its pools are memory that other processes can have."""
    yield
    megagraph.uninstall()
    forget_loss_scale()
    metrics()  # or the next model's first step would show what routers of this one have added
    torch.cuda.empty_cache()


@pytest.fixture
def install() -> Install:
    """Installs the plugin with the options of `graph_config()`, changed by keyword."""
    return lambda **changes: megagraph.install(graph_config(**changes))


@pytest.fixture
def pair() -> Pair:
    """Two plain models of the same weights, of which one runs eager and the other with graphs."""
    return Pair()


@pytest.fixture
def trainer(install: Install) -> Trainer:
    """A plain model, with the plugin installed."""
    install()
    return Trainer(OPTIONS)


@pytest.fixture
def experts() -> None:
    """Core's experts have recorded nothing."""
    forget_metrics()


@pytest.fixture
def deterministic_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's attention is told so when it is made, and its modules draw from new streams."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    seed_streams()


@pytest.fixture
def recompute_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's checkpoints save the state of the GPU's stream; without a GPU there is none."""
    if not torch.cuda.is_available():
        from megatron.core.tensor_parallel import random

        monkeypatch.setattr(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.zeros(1))
        monkeypatch.setattr(random, "_set_cuda_rng_state", lambda *args, **kwargs: None)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Ranks on GPUs or over gloo, as long as a file of tests: every process takes a gigabyte."""
    worlds = Worlds()
    yield worlds
    _ranks_end_well(worlds)  # where the test that says so runs elsewhere


@pytest.fixture(scope="module")
def world2(worlds: Worlds) -> World:
    return worlds.of(2)


@pytest.fixture(scope="module")
def world4(worlds: Worlds) -> World:
    return worlds.of(4)


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Figures of a file of tests, written at its end if OUT names a folder."""
    figures: list[Any] = []
    yield figures
    if figures and "OUT" in os.environ:
        from benchmarks.measuring.results import publish  # which such a file has made importable

        publish(Path(os.environ["OUT"], f"{request.path.stem.removeprefix('test_')}.json"), figures)


def _ranks_end_well(worlds: Worlds) -> None:
    """Every process of ranks that the tests above have used ends by itself, with exit code 0."""
    assert [code for code in worlds.close() if code != 0] == []


def _models_are_gone() -> None:
    """Every model that the tests above have trained, or a fixture that they had to themselves."""
    free_models()
    assert models_in_memory() == []


class _FileOfTests(pytest.Module):
    """A file whose last tests are that models are gone and, where any of them uses ranks, how these end."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        uses_ranks = False
        for found in super().collect():
            uses_ranks = uses_ranks or "worlds" in getattr(found, "fixturenames", ())
            yield found
        yield pytest.Function.from_parent(self, name="test_models_are_gone", callobj=_models_are_gone)
        if uses_ranks:
            yield pytest.Function.from_parent(self, name="test_ranks_end_well", callobj=_ranks_end_well)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    found: pytest.Module = _FileOfTests.from_parent(parent, path=module_path)
    found.add_marker(pytest.mark.megatron)
    return found
