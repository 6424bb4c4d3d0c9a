# SPDX-License-Identifier: Apache-2.0
"""What Megatron and Transformer Engine are told of a capture is true while it lasts, and no longer."""

import contextlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random as streams
from megatron_rig import ONE, OPTIONS, is_capturing, step
from same_bits import assert_same_bits
from torch import nn

from megagraph.demo.trainer import Trainer
from megagraph.megatron.graphs.captures import capturing, step_kept


def test_megatron_is_told_of_the_whole_capture_and_of_its_end() -> None:
    assert not is_capturing()
    with pytest.raises(ArithmeticError), capturing(), ThreadPoolExecutor(1) as other:
        with capturing():
            assert is_capturing()
        assert is_capturing(), "the inner one has ended the outer one"
        assert not other.submit(is_capturing).result()
        raise ArithmeticError("an injected failure")
    assert not is_capturing()


def test_what_another_thread_trains_meanwhile_has_its_gradients() -> None:
    """Bug: DDP's hooks, silenced on all threads, added none of them."""
    trainer = Trainer(OPTIONS)
    expected = step(trainer, [ONE], update=False)
    with capturing(), ThreadPoolExecutor(1) as other:
        assert_same_bits(other.submit(step, trainer, [ONE], update=False).result(), expected)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("is_tes_own", [False, True], ids=["other streams", "streams of its own"])
def test_the_engine_is_told_where_streams_are_own(is_tes_own: bool, raises: bool, monkeypatch: Any) -> None:
    """Its attention refuses any other tracker while its flag is set."""
    told: list[str] = []
    graph = {f"set_capture_{what}": partial(told.append, what) for what in ("start", "end")}
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.graph", SimpleNamespace(**graph))
    engine = SimpleNamespace(CudaRNGStatesTracker=type("CudaRNGStatesTracker", (), {}))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.distributed", engine)
    tracker = engine.CudaRNGStatesTracker() if is_tes_own else object()
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(streams, "is_graph_safe_cuda_rng_tracker", lambda tracker: True)
    with contextlib.suppress(ArithmeticError), capturing():
        assert told == (["start"] if is_tes_own else [])
        if raises:
            raise ArithmeticError("an injected failure")
    assert told == (["start", "end"] if is_tes_own else [])


@pytest.mark.parametrize("graph_safe", [False, True])
def test_random_streams_are_swapped_outside_a_stream_capture_only(graph_safe: bool, monkeypatch: Any) -> None:
    """Generators are no saved states: those swap inside a capture too."""
    tracker, calls, is_captured = streams.get_cuda_rng_tracker(), list[str](), False

    @contextlib.contextmanager
    def fork(_tracker: Any, name: str = "stream") -> Iterator[None]:
        calls.append(f"fork {name}")
        yield

    def now() -> list[Any]:
        """Megatron's functions that swap random streams."""
        tracker = streams.CudaRNGStatesTracker
        return [tracker.fork, streams._get_all_rng_states, streams._set_all_rng_states]

    def use() -> tuple[list[str], Any]:
        """Forks, reads and sets once: what was called, and what was read."""
        calls.clear()
        with streams.CudaRNGStatesTracker.fork(tracker, "named"):
            states = streams._get_all_rng_states()
        streams._set_all_rng_states(1, 2, 3)
        return [*calls], states

    monkeypatch.setattr(streams.CudaRNGStatesTracker, "fork", fork)
    monkeypatch.setattr(streams, "_get_all_rng_states", lambda: calls.append("get") or "states")
    monkeypatch.setattr(streams, "_set_all_rng_states", lambda *states: calls.append(f"set {len(states)}"))
    monkeypatch.setattr(streams, "is_graph_safe_cuda_rng_tracker", lambda tracker: graph_safe)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
    before, swapped, fixed = now(), (["fork named", "get", "set 3"], "states"), ([], (None, None, None))
    with pytest.raises(ArithmeticError), capturing():
        assert use() == swapped  # in the warm-up, say
        is_captured = True
        assert use() == (swapped if graph_safe else fixed)
        raise ArithmeticError("an injected failure")
    assert now() == before
    assert use() == swapped


def test_every_module_keeps_its_own_mode_and_gets_its_flag_of_the_first_micro_batch_back() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    module[1].eval()
    module[1][1].train()
    module[0].is_first_microbatch, module[1][1].is_first_microbatch = True, False
    modes = [child.training for child in module.modules()]
    with pytest.raises(ArithmeticError), step_kept(module):
        assert [child.training for child in module.modules()] == modes
        module[0].is_first_microbatch, module[1][1].is_first_microbatch = False, True
        raise ArithmeticError("an injected failure")
    assert [child.training for child in module.modules()] == modes
    assert module[0].is_first_microbatch and not module[1][1].is_first_microbatch
    assert not hasattr(module[1][0], "is_first_microbatch")
