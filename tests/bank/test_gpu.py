# SPDX-License-Identifier: Apache-2.0
"""What a GPU alone has: memory that slots share or that is lent, streams, and a launch queue.
Slots share what is temporary in each pass: csrc/torch/pass_memory.h, Note [Scratch]."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from bank_pair import ROWS, WIDTH, Applies, Block, Pair, blocks, new_bank, run_eager, unowned, variant
from same_bits import assert_same_bits
from test_verify import Baked, captured, captures, example
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.backends import SCRATCH, CudaBackend, KeptMemoryError
from megagraph.bank.bank import Bank
from megagraph.bank.capture import BankOptions
from megagraph.bank.verify import Example, Verification, verify

pytestmark = pytest.mark.gpu
COPIES, MANY_ROWS = 64, 1 << 15
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
            torch.cuda._sleep(SLEEP)
        return wide.view(-1, COPIES, WIDTH).sum(1)


def pool_bytes(num_slots: int, num_banks: int = 1) -> int:
    """Bytes in the pools of banks of two modules each."""
    modules = [[Wide().cuda(), Wide().cuda()] for _ in range(num_banks)]  # which a bank does not keep alive
    banks = [new_bank(its, "cuda", num_slots=num_slots) for its in modules]
    for bank in banks:
        bank.capture([variant(rows=MANY_ROWS), variant("evaluation", rows=MANY_ROWS, training=False)])
        assert not bank.failures
    found = sum(bank.pool_bytes() for bank in banks)
    for bank in banks:
        bank.release()
    return found


def test_temporary_memory_is_paid_once_for_all_slots_and_banks_of_a_device() -> None:
    one, four, twice_four = pool_bytes(1), pool_bytes(4), pool_bytes(4, num_banks=2)
    temporary = MANY_ROWS * WIDTH * COPIES * 4
    assert one > temporary
    assert four < 2 * one, f"{four} bytes of four slots, {one} of one"
    assert twice_four < four * 2 - temporary, f"{twice_four} bytes of two banks, {four} of one"


@pytest.mark.parametrize(("banks", "order"), [(1, (2, 0, 3, 1)), (2, (1, 0, 2, 3))])
def test_micro_batches_in_flight_have_the_bits_of_eager(banks: int, order: Sequence[int]) -> None:
    """Four in all, of one bank or of several."""
    slots = 4 // banks
    sides = [[Wide(), *blocks(2), Wide()] for _ in range(banks)]
    pairs = [Pair("cuda", layers, num_slots=slots, main_grad=True) for layers in sides]
    for pair in pairs:
        pair.capture(variant(), variant("smaller", rows=4))
    for key, rows in (("train", 6), ("smaller", 4), ("train", 6)):
        flying = [pair.forward(pair.input(rows), key) for pair in pairs * slots]
        for index in order:
            assert flying[index].reason is None
            flying[index].check_outputs()
            flying[index].backward()
        del flying
        for pair in pairs:
            pair.check_state()


def check_on_streams(module: Wide, count: int, take: Callable[[Tensor], Tensor], **options: Any) -> None:
    """Runs in a bank, each on a stream of its own; what is taken of their outputs is what eager makes."""
    bank = new_bank([module.cuda()], "cuda", **options)
    bank.capture([variant(training=False)])
    assert not bank.failures
    inputs = [torch.full((6, WIDTH), float(value), device="cuda") for value in range(1, count + 1)]
    with torch.no_grad():
        expected, found = [module(x) for x in inputs], []
        torch.cuda.synchronize()
        for x in inputs:
            with torch.cuda.stream(torch.cuda.Stream()):
                found.append(take(bank.run(x)))
    torch.cuda.synchronize()
    assert_same_bits(found, expected)


def test_graphs_on_two_streams_take_turns() -> None:
    """Side by side they would write over each other's temporary memory."""
    check_on_streams(Wide(sleeps=True), 2, lambda out: out, num_slots=2)


def test_what_reads_results_on_another_stream_is_waited_for() -> None:
    """The next launch takes the slot that was given back, while its outputs are still to be read."""

    def reads_late(out: Tensor) -> Tensor:
        torch.cuda._sleep(10 * SLEEP)
        return out.clone()

    # Without the poison, which would be a launch behind the reading.
    check_on_streams(Wide(), 3, reads_late, poison=False)


def ones(megabytes: int) -> Tensor:
    return torch.ones(megabytes * 2**18, device="cuda")


def shared_bytes(backend: CudaBackend) -> int:
    assert backend._scratch is not None
    return _C.held_bytes(backend._scratch.pool)


def test_a_pass_that_allocates_otherwise_than_the_first_one_shares_no_more() -> None:
    backend = CudaBackend(torch.device("cuda", 0))
    holds = backend.add_pools(2)
    memory, kept = _C.PassMemory(), []

    def allocate(*megabytes: int) -> None:
        kept.append(ones(1))
        for number in megabytes:
            ones(number)

    with backend.recording():
        executables = [backend.record((0, 0, 0), lambda: allocate(32, 64), memory, lambda: None)]
        assert shared_bytes(backend) == 0  # it was learned
        executables.append(backend.record((1, 1, 1), lambda: allocate(40, 64), memory, lambda: None))
        assert shared_bytes(backend) < 64 * 2**20  # of the first, whose size shows once it is allocated
        executables.append(backend.record((1, 1, 1), lambda: allocate(32, 64), memory, lambda: None))
        assert shared_bytes(backend) >= 64 * 2**20
    del executables, holds


def test_a_backward_uses_again_what_its_forward_has_kept() -> None:
    """And no more than fits there; what outlives it does so nowhere."""
    backend, slot, of_forward, learned = CudaBackend(torch.device("cuda", 0)), 0, 1, 2
    holds = backend.add_pools(3)
    memory, kept, graphs = _C.SlotMemory(), [], []

    def forward() -> None:
        kept.extend([ones(32), ones(32), ones(1)])

    def backward(*, outlives: bool = False) -> None:
        early = ones(8)  # before anything is free
        del kept[:2]  # two halves beside each other
        late = [ones(48), ones(32)]
        kept.extend([early] if outlives else [])
        kept.extend(late[:1] if outlives else [])

    def record(own: int, lent: int, freed: int, **given: bool) -> None:
        for number, (pool, body) in enumerate([(freed, forward), (own, partial(backward, **given))]):
            graphs.append(backend.record((pool, lent, freed), body, memory.of(0, number), lambda: None))

    with backend.recording():
        record(learned, learned, learned)
        kept.clear()
        needs = memory.needs(slot, slot, [of_forward], SCRATCH)
        assert needs == {slot: 0, of_forward: 64 * 2**20, SCRATCH: 40 * 2**20}
        for pool, num_bytes in needs.items():
            backend.reserve(pool, num_bytes)
        record(slot, slot, of_forward)
        held = shared_bytes(backend)
        assert held == 40 * 2**20  # the first and the last one
        kept.clear()
        with pytest.raises(RuntimeError, match="2 allocations outlive their pass"):
            record(slot, slot, of_forward, outlives=True)
        assert shared_bytes(backend) == held
    graphs.clear()
    del holds


def test_what_outlives_its_pass_in_one_slot_alone_is_an_error() -> None:
    backend = CudaBackend(torch.device("cuda", 0))
    holds = backend.add_pools(2)
    memory, kept = _C.PassMemory(), []
    with backend.recording():
        first = backend.record((0, 0, 0), lambda: ones(4).sum(), memory, lambda: None)
        with pytest.raises(RuntimeError, match="1 allocations outlive their pass"):
            backend.record((1, 1, 1), lambda: kept.append(ones(4)), memory, lambda: None)
        kept.clear()
        again = backend.record((1, 1, 1), lambda: ones(4).sum(), memory, lambda: None)
    del first, again, holds


def test_what_is_given_back_behind_its_pass_in_one_slot_alone_is_an_error() -> None:
    """The other slot would write there."""
    backend = CudaBackend(torch.device("cuda", 0))
    holds = backend.add_pools(3)
    memory, kept = _C.PassMemory(), []

    def hand_over() -> None:
        kept.append(ones(4))

    with backend.recording():
        first = backend.record((0, 2, 0), hand_over, memory, kept.clear)
        with pytest.raises(RuntimeError, match="1 allocations were given back"):
            backend.record((1, 2, 1), hand_over, memory, lambda: None)
        kept.clear()
        again = backend.record((1, 2, 1), hand_over, memory, kept.clear)
    del first, again, holds


# -- memory of graphs and of what is verified --------------------------------------------------------


class _ReadsFreed(torch.autograd.Function):
    """Doubles. The backward of a capture reads memory that was given back when the forward ended."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, alias: Callable[[Tensor], Tensor]) -> Tensor:
        factor = torch.full_like(hidden, 2.0)
        ctx.factor = alias(factor) if torch.cuda.is_current_stream_capturing() else factor
        return hidden * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def test_a_kernel_that_reads_freed_memory_is_found() -> None:
    doubles = Applies(lambda hidden: _ReadsFreed.apply(hidden, unowned))
    layers = [layer.to("cuda") for layer in (Block(), doubles, *blocks(6))]
    bank = Bank(layers, "cuda")
    bank.capture([variant("it")])
    assert not bank.failures
    verified = verify(bank, "it", example("cuda"))
    # Whoever comes before it gets a gradient of its own.
    assert {(found.index, found.tensor) for found in verified.differences} == {(1, "gradient of the input")}


def test_a_write_into_the_pool_between_forward_and_backward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = blocks()
    bank = captured(layers, "cuda")
    assert verify(bank, "it", example("cuda")).differences == []
    original = Verification._run_backwards

    def spoil(verification: Verification) -> None:
        pools = [it for it in torch.cuda.memory_snapshot() if tuple(it["segment_pool_id"]) != (0, 0)]
        assert pools
        for segment in pools:
            device, size = torch.device("cuda", segment["device"]), segment["total_size"]
            storage = torch._C._construct_storage_from_data_pointer(segment["address"], device, size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,)).fill_(0x3F)
        original(verification)

    monkeypatch.setattr(Verification, "_run_backwards", spoil)
    found = verify(bank, "it", example("cuda")).differences
    assert {difference.index for difference in found} == {*range(len(bank.sites))}


class Saves(nn.Module):
    """A layer that saves three activations, each of 64 MiB, and may keep one for somebody."""

    kept: ClassVar[list[Tensor]] = []

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)
        self.keeps = keeps

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.tanh(self.into(hidden)).exp()
        if self.keeps and not Baked.is_captured:
            Saves.kept.append(inner.detach())
        return hidden + torch.tanh(self.out(inner))


def _wide_example() -> Example:
    return Example(hidden=torch.randn(MANY_ROWS, WIDTH, device="cuda"))


def _captured_wide(layers: Sequence[nn.Module], **given: Any) -> Bank:
    bank = Bank([layer.to("cuda") for layer in layers], "cuda", options=BankOptions(guard=captures), **given)
    bank.capture([variant("it", rows=MANY_ROWS)])
    assert not bank.failures
    return bank


def test_modules_run_in_memory_that_the_graphs_have() -> None:
    layers = [Saves() for _ in range(4)]
    bank = _captured_wide(layers)
    given, pool = _wide_example(), bank.pool_bytes()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        verified = verify(bank, "it", given)
        assert verified.differences == [] and verified.not_run == {}
    # Copies of what one site makes: of 2 MiB each, where a module alone needs three times 64 MiB.
    assert torch.cuda.max_memory_reserved() - before <= 48 << 20
    assert bank.pool_bytes() - pool <= 4 << 20 and verified.most_bytes <= 48 << 20


def test_graphs_of_several_slots_keep_no_memory_for_what_modules_need_while_they_are_verified() -> None:
    """Bug: what slots share grew by all that a module keeps for its backward."""
    layers = [Saves() for _ in range(4)]
    bank = _captured_wide(layers, num_slots=2)
    pool = bank.pool_bytes()
    assert verify(bank, "it", _wide_example()).differences == []
    assert bank.pool_bytes() == pool


def test_a_module_that_keeps_what_was_lent_is_an_error() -> None:
    layers = [Saves(), Saves(keeps=True), Saves()]
    bank = _captured_wide(layers)
    Saves.kept.clear()
    with pytest.raises(KeptMemoryError, match=f"{64 << 20} bytes that were lent are still in use"):
        verify(bank, "it", _wide_example())
    Saves.kept.clear()


def test_where_a_pool_cannot_be_lent_modules_run_in_memory_of_their_own() -> None:
    layers = [Saves() for _ in range(3)]
    bank = _captured_wide(layers)
    note = bank.captured[0].notes[0][2]
    with bank.backend.recording(), bank.backend.lend(0, note) as lent:
        with lent():
            held = torch.empty(1 << 20, device="cuda")
        with bank.backend.lend(0, note) as again, again():
            elsewhere = torch.empty(1 << 20, device="cuda")
        assert verify(bank, "it", _wide_example()).differences == []
        assert held.data_ptr() != elsewhere.data_ptr()
        del held, elsewhere


# -- launches ----------------------------------------------------------------------------------------

SITES = 32
SLEEP_CYCLES = 4_000_000_000  # some two seconds: the queue fills meanwhile
WAITED_SECONDS = 0.2


@pytest.fixture
def loader() -> Iterator[SimpleNamespace]:
    """Counts, as a thread that loads data would work."""
    work, before = SimpleNamespace(count=0, is_over=False), sys.getswitchinterval()

    def count() -> None:
        while not work.is_over:
            work.count += 1

    sys.setswitchinterval(1e-4)  # or each of the calls that fill the queue would wait 5 ms for the GIL
    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    yield work
    work.is_over = True
    thread.join()
    sys.setswitchinterval(before)


@pytest.mark.parametrize("training", [False, True], ids=["without gradients", "with gradients"])
def test_a_thread_goes_on_while_a_forward_waits_for_the_launch_queue(loader: Any, training: bool) -> None:
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
    nn.ModuleList(layers).cuda().requires_grad_(False)  # gradients of parameters are for the caller to order
    rows, banks = 256, [new_bank(layers, "cuda") for _ in range(2)]
    for bank in banks:
        bank.capture([variant(rows=rows, row_shape=(1024,))])
    streams = [torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    leaves = [torch.randn(rows, 1024, device="cuda", requires_grad=True) for _ in range(12)]
    want = [torch.autograd.grad(run_eager(layers, leaf).square().sum(), leaf)[0] for leaf in leaves]
    torch.cuda.synchronize()
    for turn, leaf in enumerate(leaves):
        bank = banks[turn // 2 % 2]
        with torch.cuda.stream(streams[turn % 3]):
            torch.cuda._sleep(3_000_000)  # what was launched before is still running then
            out = bank.run(leaf)
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


# -- bugs of graphs and their workspaces -------------------------------------------------------------

COLUMNS, MANY = 640, 8192  # of matrix products that need a workspace


def products() -> list[nn.Module]:
    linear = partial(nn.Linear, COLUMNS, COLUMNS)
    return [nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(3)]


def wide_input() -> Tensor:
    return torch.randn(MANY, COLUMNS, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def captured_wide(layers: Sequence[nn.Module]) -> Any:
    bank = new_bank([layer.to("cuda", torch.bfloat16) for layer in layers], "cuda")
    bank.capture([variant(rows=MANY, row_shape=(COLUMNS,), dtype=torch.bfloat16)])
    return bank


def strangers(*sizes: int) -> list[Tensor]:
    """Take whatever memory has become free; who writes there shows."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return [torch.full((size,), torch.nan, device="cuda") for size in sizes]


def replayed(bank: Any, layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    leaves = [x, *nn.ModuleList(layers).parameters()]
    for leaf in leaves:
        leaf.grad = None
    out = bank.run(x)
    got = out.detach().clone()
    out.square().sum().backward()
    return [got, *(leaf.grad for leaf in leaves)]


def run_wide(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    out, leaves = run_eager(layers, x), [x, *nn.ModuleList(layers).parameters()]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def test_the_end_of_one_bank_leaves_the_workspaces_of_another() -> None:
    """torch frees a cuBLAS workspace with any graph of its stream: other graphs went on using it."""
    layers, others = [nn.Linear(COLUMNS, COLUMNS)], [nn.Linear(COLUMNS, COLUMNS)]
    bank, other = captured_wide(layers), captured_wide(others)
    other.release()
    held, x = strangers(*[2 << 20] * 64), wide_input()
    for _ in range(3):
        assert_same_bits(replayed(bank, layers, x), run_wide(layers, x))
    assert all(bool(stranger.isnan().all()) for stranger in held)


def test_replays_outlive_the_workspaces_that_torch_clears() -> None:
    """No bug so far: `torch.compile` frees every cuBLAS workspace where it asks for graphs of its own. Graphs
    hold the addresses of theirs; a replay must neither read what is there now nor write to it."""
    layers = products()
    bank, held, x = captured_wide(layers), [], wide_input()
    want = run_wide(layers, x)
    for _ in range(4):
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        held += strangers(*[1 << 21, 1 << 18, 1 << 10] * 8)  # pieces of any size that a workspace has
        assert_same_bits(replayed(bank, layers, x), want)
    assert all(bool(stranger.isnan().all()) for stranger in held)
    assert bank.counters()["replays"] == 4 * len(layers)


def test_a_verification_in_a_thread_of_its_own_leaves_no_workspace_in_what_is_lent() -> None:
    """Its cuBLAS workspace lay where graphs keep what a backward reads, and the next product wrote there."""
    torch._C._cuda_clearCublasWorkspaces()
    layers, x = products(), wide_input()
    with torch.autograd.set_multithreading_enabled(False):  # the thread of backward passes gets none either
        bank = captured_wide(layers)
    given = Example(hidden=x.detach(), grad=torch.ones_like(x))

    def work() -> list[Any]:
        return [verify(bank, "train", given).differences, replayed(bank, layers, x), run_wide(layers, x)]

    with ThreadPoolExecutor(1) as threads:
        differences, got, want = threads.submit(work).result()
    assert differences == []
    assert_same_bits(got, want)
