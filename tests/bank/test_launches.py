# SPDX-License-Identifier: Apache-2.0
"""Launches from several streams, on another device, and while the launch queue is full."""

import dataclasses
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from bank_pair import ROWS, WIDTH, Block, Pair, blocks, new_bank, run_eager, variant
from same_bits import assert_same_bits

from megagraph.bank.bank import Bank

pytestmark = pytest.mark.gpu

SITES = 32
SLEEP_CYCLES = 4_000_000_000  # some two seconds: the queue fills meanwhile
WAITED_SECONDS = 0.2


class Loader(threading.Thread):
    """Counts, as a thread that loads data would work."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            self.count += 1


@pytest.fixture
def loader() -> Iterator[Loader]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # or each of the calls that fill the queue would wait 5 ms for the GIL
    thread = Loader()
    thread.start()
    yield thread
    thread.is_over = True
    thread.join()
    sys.setswitchinterval(before)


@pytest.mark.parametrize("training", [False, True], ids=["without gradients", "with gradients"])
def test_a_thread_goes_on_while_a_forward_waits_for_the_launch_queue(loader: Loader, training: bool) -> None:
    """Bug: the GIL was held, and data loaders stood still as long as the GPU was behind."""
    layers = [layer.cuda() for layer in blocks(SITES)]
    bank = Bank(layers, "cuda")  # one that poisons freed slots would wait there
    bank.capture([variant(training=training)])
    hidden = torch.randn(ROWS, WIDTH, device="cuda").requires_grad_(training)

    def timed_forward() -> tuple[float, int]:
        with torch.set_grad_enabled(training), bank.micro_batch("train") as reason:
            assert reason is None
            start, counted = time.perf_counter(), loader.count
            out = bank.replay_all(hidden)
            waited = time.perf_counter() - start, loader.count - counted
        assert out is not NotImplemented
        return waited  # the output is dropped, and its slot free

    timed_forward()
    torch.cuda.synchronize()
    start, counted = time.perf_counter(), loader.count
    time.sleep(0.1)
    pace = (loader.count - counted) / (time.perf_counter() - start)
    torch.cuda._sleep(SLEEP_CYCLES)
    calls = [timed_forward() for _ in range(2000 // SITES + 200)]
    torch.cuda.synchronize()
    waited, counted = max(calls)
    assert waited > WAITED_SECONDS, "the launch queue was never full"
    assert counted > 0.2 * pace * waited
    bank.release()


def test_micro_batches_on_two_streams_do_not_meet() -> None:
    layers = [Block(1024) for _ in range(4)]
    for param in (param for layer in layers for param in layer.parameters()):
        param.requires_grad_(False)  # gradients of parameters are for the caller to order
    rows = 256
    banks = []
    for _ in range(2):
        bank = new_bank([layer.cuda() for layer in layers], "cuda")
        shape = variant(rows=rows)
        bank.capture([dataclasses.replace(shape, row_shape=(1024,))])
        banks.append(bank)
    streams = [torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    inputs = [torch.randn(rows, 1024, device="cuda") for _ in range(12)]
    want = []
    for given in inputs:
        leaf = given.clone().requires_grad_()
        run_eager(layers, leaf).square().sum().backward()
        want.append(leaf.grad)
    leaves = [given.clone().requires_grad_() for given in inputs]
    torch.cuda.synchronize()
    for turn, leaf in enumerate(leaves):
        bank = banks[turn // 2 % 2]
        with torch.cuda.stream(streams[turn % 3]):
            torch.cuda._sleep(3_000_000)  # what was launched before is still running then
            with bank.micro_batch("train") as reason:
                assert reason is None
                out = bank(leaf)
            out.square().sum().backward()
            del out
    torch.cuda.synchronize()
    for turn, (leaf, grad) in enumerate(zip(leaves, want, strict=True)):
        assert_same_bits(leaf.grad, grad, f"gradient of input {turn}")


@pytest.mark.multi_gpu
def test_a_bank_replays_on_its_own_device_whichever_is_current() -> None:
    pair = Pair("cuda:1", blocks()).capture()
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            assert pair.step() is None
            assert torch.cuda.current_device() == current
