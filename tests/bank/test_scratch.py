# SPDX-License-Identifier: Apache-2.0
"""Slots share the memory that is temporary in each pass (csrc/torch/pass_memory.h, Note [Scratch])."""

from collections.abc import Sequence

import pytest
import torch
from bank_pair import WIDTH, Applies, MicroBatch, Pair, blocks, new_bank, variant
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.backends import CudaBackend

pytestmark = pytest.mark.gpu
COPIES, ROWS = 64, 32768
SLEEP = 20_000_000  # cycles: longer than the host takes for a launch


class Wide(nn.Module):
    """Most of the memory that its forward and its backward take is gone when they end."""

    def __init__(self, *, sleeps: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self._sleeps = sleeps

    def forward(self, hidden: Tensor) -> Tensor:
        scaled = hidden * self.scale
        wide = scaled.repeat(1, COPIES)
        if self._sleeps:
            torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
        return wide.view(-1, COPIES, WIDTH).sum(1)


def pool_bytes(num_slots: int, num_banks: int = 1) -> int:
    """Bytes in the pools of banks of two modules each."""
    modules = [[Wide().cuda(), Wide().cuda()] for _ in range(num_banks)]  # which a bank does not keep alive
    banks = [new_bank(its, "cuda", num_slots=num_slots) for its in modules]
    for bank in banks:
        bank.capture([variant(rows=ROWS), variant("evaluation", rows=ROWS, training=False)])
        assert not bank.failures
    found = sum(bank.pool_bytes() for bank in banks)
    for bank in banks:
        bank.release()
    return found


def test_temporary_memory_is_paid_once_for_all_slots_and_banks_of_a_device() -> None:
    one, four, twice_four = pool_bytes(1), pool_bytes(4), pool_bytes(4, num_banks=2)
    temporary = ROWS * WIDTH * COPIES * 4
    assert one > temporary
    assert four < 2 * one, f"{four} bytes of four slots, {one} of one"
    assert twice_four < four * 2 - temporary, f"{twice_four} bytes of two banks, {four} of one"


def finish(flying: list[MicroBatch], order: Sequence[int]) -> None:
    for index in order:
        assert flying[index].reason is None
        flying[index].check_outputs()
        flying[index].backward()


def test_micro_batches_of_several_banks_in_flight_have_the_bits_of_eager() -> None:
    pairs = [Pair("cuda", [Wide(), *blocks(2), Wide()], num_slots=2, main_grad=True) for _ in range(2)]
    for pair in pairs:
        pair.capture()
    finish([pair.forward() for pair in pairs * 2], (1, 0, 2, 3))
    for pair in pairs:
        pair.check_state()


def test_micro_batches_in_flight_have_the_bits_of_eager() -> None:
    pair = Pair("cuda", [Wide(), *blocks(2), Wide()], num_slots=4, main_grad=True)
    pair.capture(variant(), variant("smaller", rows=4))
    for key, rows in (("train", 6), ("smaller", 4), ("train", 6)):
        finish([pair.forward(pair.input(rows), key) for _ in range(4)], (2, 0, 3, 1))
        pair.check_state()


def cannot_be_captured(hidden: Tensor) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("cannot be captured")
    return hidden.tanh()


def test_a_site_that_cannot_be_captured_is_left_out_by_all_slots() -> None:
    pair = Pair("cuda", [Wide(), Applies(cannot_be_captured), Wide()], num_slots=3)
    pair.capture(variant(), variant("evaluation", training=False))
    assert [failure.index for failure in pair.bank.failures] == [1]
    flying = [pair.forward() for _ in range(3)]
    for micro_batch in reversed(flying):
        micro_batch.backward()
    pair.check_state()


def test_graphs_on_two_streams_take_turns() -> None:
    """Side by side they would write over each other's temporary memory."""
    module = Wide(sleeps=True).cuda()
    bank = new_bank([module], "cuda", num_slots=2)
    bank.capture([variant(training=False)])
    assert not bank.failures
    inputs = [torch.full((6, WIDTH), float(value), device="cuda") for value in (1, 2)]
    with torch.no_grad():
        expected = [module(x) for x in inputs]
        streams = [torch.cuda.Stream() for _ in inputs]
        torch.cuda.synchronize()
        found = []
        for x, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream), bank.micro_batch("train") as reason:
                assert reason is None
                found.append(bank(x))
    torch.cuda.synchronize()
    assert_same_bits(found, expected)


def test_a_pass_that_allocates_otherwise_than_the_first_one_shares_no_more() -> None:
    backend = CudaBackend(torch.device("cuda"))
    holds = backend.add_pools(2)
    memory, kept = _C.PassMemory(), []

    def allocate(*megabytes: int) -> None:
        kept.append(torch.ones(2**18, device="cuda"))
        for number in megabytes:
            torch.ones(number * 2**18, device="cuda")

    def shared_bytes() -> int:
        scratch = backend._scratch
        assert scratch is not None
        segments = torch.cuda.memory_snapshot()
        return sum(it["total_size"] for it in segments if tuple(it["segment_pool_id"]) == scratch.hold.pool)

    with backend.recording():
        executables = [backend.record(0, lambda: allocate(32, 64), memory)]
        assert shared_bytes() == 0  # it was learned
        executables.append(backend.record(1, lambda: allocate(40, 64), memory))
        assert shared_bytes() < 64 * 2**20  # of the first, whose size shows once it is allocated
        executables.append(backend.record(1, lambda: allocate(32, 64), memory))
        assert shared_bytes() >= 64 * 2**20
    del executables, holds


def test_what_outlives_its_pass_in_one_slot_alone_is_an_error() -> None:
    backend = CudaBackend(torch.device("cuda"))
    holds = backend.add_pools(2)
    memory, kept = _C.PassMemory(), []
    with backend.recording():
        first = backend.record(0, lambda: torch.ones(2**20, device="cuda").sum(), memory)
        with pytest.raises(RuntimeError, match="1 allocations outlive their pass"):
            backend.record(1, lambda: kept.append(torch.ones(2**20, device="cuda")), memory)
        kept.clear()
        again = backend.record(1, lambda: torch.ones(2**20, device="cuda").sum(), memory)
    del first, again, holds
