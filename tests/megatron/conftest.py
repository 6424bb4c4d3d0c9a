# SPDX-License-Identifier: Apache-2.0
"""What all tests of the Megatron floor share: one process group, deterministic bits, a clean plugin."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS, read at its start

import pytest
import torch
from leftovers import free_models
from megatron_rig import graph_config
from worlds import World

import megagraph
from megagraph.config import GraphConfig
from megagraph.demo.cpu import megatron_on_cpu
from megagraph.demo.trainer import process_groups


@pytest.fixture(scope="session")
def process_group() -> Iterator[None]:
    """torch.distributed and Megatron's groups of one process, for the whole session."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.distributed's own, of a group on the CPU
        logging.getLogger("megatron").setLevel(logging.ERROR)
        with megatron_on_cpu():
            group = process_groups()
            group.__enter__()
    yield
    with megatron_on_cpu():
        group.__exit__(None, None, None)


@pytest.fixture(scope="module", autouse=True)
def megatron(process_group: None) -> Iterator[None]:
    """Megatron on the CPU where there is no GPU; only for the tests of this folder.

    On one thread: such small models only wait for a second one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with megatron_on_cpu():
        yield
        free_models()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Deterministic algorithms, and fresh memory full of NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    """Whatever a test installed is gone afterwards."""
    yield
    megagraph.uninstall()


@pytest.fixture
def install() -> Callable[..., GraphConfig]:
    """Installs the plugin with the options of `graph_config()`, changed by keyword."""

    def with_options(**changes: object) -> GraphConfig:
        config = graph_config(**changes)
        megagraph.install(config)
        return config

    return with_options


def _ranks(size: int) -> Iterator[World]:
    world = World(size)
    yield world
    was_broken = world.is_broken
    codes = world.close()
    assert was_broken or codes == [0] * size


@pytest.fixture(scope="session")
def world2() -> Iterator[World]:
    """Two ranks, on GPUs or over gloo. They end by themselves, and well, unless a test has said more."""
    yield from _ranks(2)


@pytest.fixture(scope="module")
def world4() -> Iterator[World]:
    """Four ranks, as long as a file of tests: every process takes a gigabyte."""
    yield from _ranks(4)
