# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks `bits`, `replay` and `soak` count and time, on models that need no GPU."""

import ctypes
import dataclasses
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import megagraph
from benchmarks import bench_bits as bits
from benchmarks import bench_soak as soak
from benchmarks.subjects import inside, layers
from benchmarks.subjects.hosts import seed_streams
from megagraph.demo.cpu import megatron_on_cpu
from megagraph.demo.trainer import ModelOptions, Trainer, process_groups

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark itself runs on a GPU"),
]
OPTIONS = ModelOptions(layers=2, hidden=32, heads=2, max_tokens=64)
STEPS = 5  # of which three warm up


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with megatron_on_cpu(), process_groups():
        seed_streams()
        yield


@pytest.fixture(autouse=True)
def ends_uninstalled() -> Iterator[None]:
    """Each of these is the last thing that a process of a benchmark does."""
    yield
    megagraph.uninstall()


def test_a_training_is_compared_with_one_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    packs, seeds = bits.canonical_packs, iter([3, 3, 4])  # other packs in mode `graph`, so that all differs
    monkeypatch.setattr(bits, "canonical_packs", lambda *args: packs(*args, seed=next(seeds)))
    answer = bits.measure_bits(bits.BitsCase(transformer_engine=False, steps=STEPS), OPTIONS)
    assert answer["losses"] == STEPS * 4 and answer["gradients"] > STEPS * 12
    assert answer["eager"]["losses"] == answer["eager"]["gradients"] == 0
    assert answer["graph"]["losses"] == answer["losses"]
    assert answer["graph"]["gradients"] >= answer["gradients"] / 2
    assert all(answer[mode]["report"]["calls"] == STEPS * 4 * OPTIONS.layers for mode in bits.MODES)
    assert answer["eager"]["report"]["replays"] == 0 < answer["graph"]["report"]["replays"]


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_canonical_packs_have_the_rows_and_documents_of_their_capacity(share: float) -> None:
    tokens = OPTIONS.max_tokens
    for pack in bits.canonical_packs(tokens, int(share * tokens), 20):
        assert (pack.num_tokens, pack.num_seqs, pack.max_seqlen) == (tokens, bits.DOCUMENTS, share * tokens)
        lengths = pack.cu_seqlens.diff()
        assert int(lengths.min()) > 0 and int(lengths.max()) <= share * tokens


def test_a_soak_finds_a_step_that_differs_and_memory_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    used = itertools.count(0, 5)
    monkeypatch.setattr(soak, "used_bytes", lambda: {"process": 7, "device": next(used)})
    monkeypatch.setattr(soak, "SAMPLES", 4)
    original, calls = Trainer.forward_backward, itertools.count()

    def forward_backward(trainer: Trainer, packs: Any) -> list[torch.Tensor]:
        losses = original(trainer, packs)
        if next(calls) == soak.STEPS + 5:
            trainer.model.buffers[0].grad_data[3] += 1
        return losses

    monkeypatch.setattr(Trainer, "forward_backward", forward_backward)
    answer = soak.measure_soak(OPTIONS, 24 * OPTIONS.layers)
    assert (answer["differing"], answer["steps"], answer["grown"]) == (1, 6, {"process": 0, "device": 15})
    assert answer["replays"] == 24 * OPTIONS.layers


class _Malloc(ctypes.Structure):
    """What glibc's mallinfo2() says."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or newer")
def test_replays_leave_neither_memory_nor_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not 128 bytes in a micro-batch, nor an object in ten steps: what a few hundred steps fill is less."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Malloc

    def used() -> dict[str, int]:
        malloc = mallinfo()
        return {"malloc": malloc.uordblks + malloc.hblkhd, "objects": len(gc.get_objects())}

    monkeypatch.setattr(soak, "used_bytes", used)
    monkeypatch.setattr(soak, "SAMPLES", 2)
    grown = soak.measure_soak(dataclasses.replace(OPTIONS, layers=1), 160 * 4)["grown"]
    assert grown["malloc"] < 80 * 4 * 128 and grown["objects"] < 8


def test_layers_replay_without_the_model_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(OPTIONS.max_tokens, 1, OPTIONS.hidden, requires_grad=True)
    monkeypatch.setattr(inside, "hidden_states", lambda *shape: rows)
    trainer = layers.captured(OPTIONS)
    replays = inside.Replays(trainer)
    report = inside.graphs_of(trainer).report
    before = report()["replays"]
    replays.hidden.retain_grad()
    replays.replayed().backward(replays.grad)
    grad = replays.hidden.grad
    assert report()["replays"] == before + OPTIONS.layers and grad is not None and bool(grad.any())
