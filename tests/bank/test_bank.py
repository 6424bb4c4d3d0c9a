# SPDX-License-Identifier: Apache-2.0
"""The bank's one promise: the same bits as eager, or eager with a counted reason; and its life."""

import copy
import dataclasses
import gc
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from bank_pair import ROWS, WIDTH, Applies, Block, Pair, blocks, new_bank, pool_bytes, run_eager, variant
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph import _C
from megagraph._C import BankState, OpTrace
from megagraph.bank.bank import Bank
from megagraph.bank.sites import EagerPart
from megagraph.reasons import EagerReason


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
def test_many_steps_with_changing_inputs_and_weights_have_the_same_bits(device: str, main_grad: bool) -> None:
    """Parameters that are frozen or that nobody uses get no gradient, nor do inputs that need none."""
    layers = blocks(4)
    layers[0].get_parameter("up.bias").requires_grad_(False)
    layers[1].requires_grad_(False)
    layers[2].register_parameter("unused", nn.Parameter(torch.ones(3)))
    pair = Pair(device, layers, main_grad=main_grad).capture()
    for step in range(12):
        assert pair.step(requires_grad=step < 9) is None
        if step % 3 == 2:  # otherwise gradients accumulate
            pair.update_weights()
    assert pair.counts() == {"calls": 12 * 4, "replays": 12 * 4}
    for param in pair.layers[3].parameters():
        assert (param.grad is None) == main_grad


@pytest.mark.parametrize("frozen", [1, 2, 3])
@pytest.mark.parametrize("gaps", [False, True], ids=["in one go", "site by site"])
def test_what_trains_nothing_needs_a_gradient_if_its_input_does(device: str, frozen: int, gaps: bool) -> None:
    """Bug: it always did; what stays eager behind it then ran a backward that no other rank ran."""
    layers = [layer.requires_grad_(index >= frozen) for index, layer in enumerate(blocks())]
    pair = Pair(device, layers, main_grad=True).capture()
    needed: list[bool] = []

    def ours(out: Tensor) -> Tensor:
        for site in pair.bank.sites:
            out = site(out)
            needed.append(out.requires_grad)
        return out

    for step in range(8):
        is_given, needed[:] = step % 3 == 0, []
        micro_batch = pair.forward(requires_grad=is_given, ours=ours if gaps else None)
        if gaps:
            assert needed == [is_given or index >= frozen for index in range(3)]
        if micro_batch.output.requires_grad:
            micro_batch.backward()
        pair.check_state()
        pair.update_weights()
        del micro_batch  # and with it an output that holds the slot
    assert pair.eager_calls() == {}


EMPTY = Applies(lambda hidden, none: (hidden + none.sum())[:, :0], has_weight=True)
EMPTY.weight = nn.Parameter(torch.empty(0))


@pytest.mark.parametrize(
    ("layers", "dtype"),
    [
        ([Block(), Block()], torch.bfloat16),
        ([Block(), Block()], torch.float64),
        ([nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 5)], torch.float32),
        ([nn.Identity(), Block(), nn.Identity(), nn.Identity(), Block()], torch.float32),
        ([Block()] * 3, torch.float32),
        ([Block(), EMPTY], torch.float32),
    ],
    ids=["bfloat16", "float64", "other widths", "without work", "one layer several times", "empty"],
)
def test_any_dtype_and_width_has_same_bits(device: str, layers: list[nn.Module], dtype: torch.dtype) -> None:
    copies = copy.deepcopy(nn.ModuleList(layers)).to(dtype)
    pair = Pair(device, list(copies)).capture(variant(dtype=dtype))
    for _ in range(3):
        assert pair.step(pair.input().to(dtype)) is None
    assert pair.counts() == {"calls": 3 * len(layers), "replays": 3 * len(layers)}


def test_several_variants_share_a_slot_and_keep_their_bits(device: str) -> None:
    sizes = {"large": 12, "middle": 7, "small": 1}
    keys = [(name, training) for name in sizes for training in (True, False)]
    pair = Pair(device, blocks(), main_grad=True)
    pair.capture(*(variant(key, training=key[1], rows=sizes[key[0]]) for key in keys))
    for step in range(12):
        name, training = key = keys[step % len(keys)]
        with torch.set_grad_enabled(training):
            micro_batch = pair.forward(pair.input(sizes[name]), key, requires_grad=training)
        assert micro_batch.reason is None
        assert micro_batch.output.requires_grad == training
        if training:
            micro_batch.backward()
        pair.check_state()
        del micro_batch
        if step % 5 == 4:
            pair.update_weights()
    assert pair.eager_calls() == {}


def test_the_largest_variant_is_warmed_up_and_captured_first(device: str) -> None:
    """Smaller ones then live in its memory; whatever the order in which they are asked for."""
    rows, sizes, kinds = list[int](), (3, 12, 1, 7), (False, True)
    variants = (variant(f"{size} {kind}", training=kind, rows=size) for size in sizes for kind in kinds)
    Pair(device, [Applies(lambda hidden: rows.append(len(hidden)) or hidden * 2)]).capture(*variants)
    largest_first = [12, 7, 3, 1] * 2  # training variants first
    assert rows == 2 * largest_first  # warmed up, then captured


@pytest.mark.gpu
def test_smaller_variants_take_no_memory_beside_the_largest() -> None:
    """The pool holds what the largest variant needs, also where that one is asked for last."""
    layers = [Block(256).to("cuda") for _ in range(3)]
    small, middle, large = (variant(1 << it, rows=1 << it, row_shape=(256,)) for it in (14, 15, 16))
    alone = pool_bytes(layers, large)
    assert alone > 0
    # Captured the other way round, they take more than a quarter on top (measured on an H200).
    assert pool_bytes(layers, small, middle, large) <= 1.1 * alone


@pytest.mark.parametrize("order", ["F0 F1 B0 B1", "F0 F1 B1 F2 B0 B2"])  # the first as of a pipeline's stage
def test_micro_batches_in_flight_do_not_disturb_each_other(device: str, order: str) -> None:
    pair = Pair(device, blocks(), num_slots=2, main_grad=True).capture()
    for _ in range(3):
        flying: dict[str, Any] = {}
        for what, number in order.split():
            if what == "F":
                flying[number] = pair.forward()
                continue
            for each in flying.values():
                each.check_outputs()
            del each
            flying.pop(number).backward()
        pair.check_state()
    assert pair.eager_calls() == {}


def test_a_captured_site_that_a_micro_batch_leaves_out_changes_no_bit(device: str) -> None:
    pair = Pair(device, blocks(), num_slots=2, main_grad=True).capture()
    for left_out in (0, 1, 2, 1):
        steps = [*pair.bank.sites]
        steps[left_out] = pair.layers[left_out]
        assert pair.step(ours=partial(run_eager, steps)) is None
    assert pair.bank.counters()["replays"] == 4 * 2


def test_gradients_that_meet_beside_a_site_have_the_same_bits(device: str) -> None:
    """Two terms; of three, a graph adds its own two first, and eager may not."""
    pair = Pair(device, [nn.Linear(WIDTH, WIDTH) for _ in range(3)]).capture()

    def with_terms(layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
        scaled = x * 1.5
        first = layers[0](scaled)
        out = layers[2](layers[1](first))
        return out * out + first * 3 + scaled

    for _ in range(3):
        pair.step(ours=partial(with_terms, pair.bank.sites), eager=partial(with_terms, pair.eager_layers))
    assert pair.bank.counters()["replays"] == 9


def test_a_strided_or_expanded_gradient_counts_as_its_dense_copy(pair: Pair) -> None:
    """A graph reads its gradients densely; eager kernels may choose by strides and round otherwise."""
    other = torch.randn(WIDTH, ROWS, device=pair.device)
    for grad in (other.t(), other[0, 0].expand(ROWS, WIDTH)):
        micro_batch = pair.forward()
        torch.autograd.backward(micro_batch.output, grad)
        torch.autograd.backward(micro_batch.eager_output, grad.contiguous())
        assert_same_bits(micro_batch.input.grad, micro_batch.eager_input.grad, "gradient of the input")
        pair.check_state()
        del micro_batch


# -- one call and one autograd node, or one of each for every site -----------------------------------

SITES = 4


def nodes_of(out: Tensor) -> int:
    """How many replayed runs lie behind a tensor, in a row."""
    node, count = out.grad_fn, 0
    while node is not None and node.name() == "MegagraphReplay":
        node, count = next((it for it, _ in node.next_functions if it is not None), None), count + 1
    return count


def test_site_by_site_has_the_same_bits(device: str) -> None:
    pair = Pair(device, blocks(SITES), main_grad=True).capture()
    replay_all = pair.bank.replay_all
    assert replay_all(pair.input()) is NotImplemented, "outside of a micro-batch its sites refuse it"
    assert isinstance(Pair(device, blocks(1)).bank.replay_all, _C.Site), "a run of one site is that site"
    for calls_sites in (False, True, False):
        pair.bank.replay_all = (lambda hidden: NotImplemented) if calls_sites else replay_all
        micro_batch = pair.forward()
        assert nodes_of(micro_batch.output) == (SITES if calls_sites else 1)
        micro_batch.backward()
        del micro_batch  # and with it the slot
        pair.check_state()
    assert pair.bank.counters()["replays"] == 3 * SITES


@pytest.mark.parametrize(
    ("noticed", "eager", "told"),
    [
        ([], [], [(0, 3)]),
        ([0], [], [(0, 3)]),
        ([2], [], [(2, 3), (0, 1)]),
        ([2, 3], [], [(3, 3), (2, 2), (0, 1)]),
        (range(SITES), [], [(3, 3), (2, 2), (1, 1), (0, 0)]),
        ([1], [2], [(3, 3), (1, 1), (0, 0)]),  # one by one
    ],
)
def test_finished_backwards_are_told_to_who_wants_to_know_where_asked_for_and_at_the_end(
    device: str, noticed: Sequence[int], eager: list[int], told: list[tuple[int, int]]
) -> None:
    pair = Pair(device, blocks(SITES), main_grad=True)
    for site in eager:
        pair.bank.keep_eager(site, EagerReason.FOREIGN_HOOK)
    pair.capture()
    for wants in (True, False, False):
        is_wanted, listener = mock.Mock(return_value=wants), mock.Mock(return_value=None)
        pair.bank.set_listener(is_wanted, listener, print, noticed)
        pair.step()
        assert [call.args for call in listener.mock_calls] == (told if wants else [])
        is_wanted.assert_called_once_with()  # once for each micro-batch


@pytest.mark.parametrize("raises_in", ["the forward", "the backward", "the listener"])
def test_what_raises_in_the_middle_frees_its_slot(raises_in: str) -> None:
    """On the host, whose replays run the layers again."""
    is_captured = False

    def give_up(place: str) -> None:
        if is_captured and place == raises_in:
            raise ValueError(f"{place} gave up")

    def raises(hidden: Tensor) -> Tensor:
        give_up("the forward")
        out = hidden * 2
        if out.requires_grad:
            out.register_hook(lambda _grad: give_up("the backward"))
        return out

    pair = Pair("cpu", [Block(), Block(), Applies(raises), Block()], main_grad=True).capture()
    pair.bank.set_listener(lambda: True, lambda at, _last: at == 2 and give_up("the listener"), print, [2])
    is_captured = True
    with pytest.raises(ValueError, match=f"{raises_in} gave up"):
        pair.bank.run(pair.input().requires_grad_()).sum().backward()
    is_captured = False
    assert pair.bank.all_free()
    for param in nn.ModuleList([*pair.layers, *pair.eager_layers]).parameters():
        param.main_grad.zero_()
    assert pair.step() is None


# -- the life of a bank and of its variants, and every way in which a call may be refused ---------------


def test_a_bank_needs_a_module_and_a_slot_and_slots_that_face_each_other_are_two(device: str) -> None:
    with pytest.raises(ValueError, match=r"expected at least one module, got none"):
        Bank([], device)
    with pytest.raises(ValueError, match=r"at least one slot, got 0"):
        Bank(blocks(1), device, num_slots=0)
    with pytest.raises(ValueError, match="two slots face each other"):
        new_bank([Block().to(device)], device, num_slots=3, facing=[[0], [1], [1]])
    part = EagerPart(name="part", module=Block(), forward=lambda _module, hidden: hidden)
    with pytest.raises(ValueError, match="expected at least one module, got 1 parts that stay eager"):
        Bank([part], device)


def test_release_runs_everything_eager_also_within_a_micro_batch_and_may_come_twice(pair: Pair) -> None:
    """Bug: the next site raised `vector::_M_range_check`."""
    pair.step()
    with pair.bank.micro_batch("train"):
        first = pair.bank.sites[0](pair.input())
        pair.bank.release()
        assert pair.bank.sites[1](first) is NotImplemented
    assert pair.eager_calls() == {"RELEASED": 1}
    del first
    pair.bank.release()
    assert pair.bank.state == BankState.RELEASED
    assert pair.step() is EagerReason.RELEASED
    with pytest.raises(RuntimeError, match=r"released bank cannot become capturing"):
        pair.capture()


@pytest.mark.parametrize("is_held", [True, False])
def test_a_backward_after_the_end_of_its_bank_raises(pair: Pair, is_held: bool) -> None:
    """Also of one that nobody holds any more, which goes quietly."""
    pending = pair.forward()
    if is_held:
        pair.bank.release()
    else:
        del pair.bank
        gc.collect()
    with pytest.raises(RuntimeError, match=r"released between the forward and the backward of site 2"):
        pending.backward()


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_bank_that_goes_while_a_backward_runs_lets_it_come_to_its_end(pair: Pair, is_dropped: bool) -> None:
    """Bug: the process died. A release is an error then, wherever it comes from."""
    bank, told = [pair.bank], list[int]()

    def done(first: int, _last: int) -> None:
        if is_dropped:
            bank.clear()
            gc.collect()
        else:
            with pytest.raises(RuntimeError, match="a pass of this bank's graphs is running"):
                bank[0].release()
        told.append(first)

    pair.bank.set_listener(lambda: True, done, print, [2, 1, 0])
    pending = pair.forward()
    if is_dropped:
        del pair.bank
    pending.backward()
    assert told == [2, 1, 0]


def test_graphs_with_collectives_wait_a_moment_for_a_tensor_and_name_who_keeps_it(device: str) -> None:
    """Bug: threads of gloo let go of what they have sent a little after everybody has been told."""
    pair = Pair(device, blocks(), run_eager_alike=lambda *_where: None).capture()
    micro_batch = pair.forward()
    micro_batch.backward()
    kept = [micro_batch.output]
    del micro_batch
    told = r"no slot is free.*collectives.*held: slot 0: 1 tensor of site 2$"
    with pytest.raises(RuntimeError, match=told):
        pair.forward()
    assert pair.bank.slot_index == -1
    other = threading.Timer(0.05, kept.clear)
    other.start()
    assert pair.forward().reason is None
    other.join()


def test_who_captures_or_drops_needs_free_slots_and_is_told_who_holds_them(pair: Pair) -> None:
    micro_batch = pair.forward()
    with pytest.raises(RuntimeError, match=r"every slot to be free; still held: slot 0: 1 pending backward"):
        pair.capture(variant("more"))
    with pytest.raises(RuntimeError, match="still held: "):
        pair.bank.drop(["train"])
    assert pair.bank.state == BankState.SEALED
    micro_batch.backward()
    del micro_batch
    pair.capture(variant("more"))
    assert pair.step() is None and pair.step(key="more") is None
    pair.bank.drop(["train", "more"])
    pair.bank.drop(["train", "never captured"])
    assert pair.bank.num_graphs == 0


def test_what_no_caller_may_do_is_an_error(device: str) -> None:
    """A micro-batch cannot begin within another, nor end twice; a site takes tensors by position only."""
    pair = Pair(device, blocks(1), num_slots=2).capture()
    bank, index, (site,) = pair.bank, pair.bank.variants["train"], pair.bank.sites
    assert bank.begin(index, [], True) is None
    assert bank.slot_index == 0
    with pytest.raises(RuntimeError, match=r"previous micro-batch of this bank has not ended"):
        bank.begin(index, [], True)
    bank.end()
    assert bank.slot_index == -1
    with pytest.raises(RuntimeError, match=r"no micro-batch of this bank is running"):
        bank.end()
    with pytest.raises(RuntimeError, match=r"site 0 was called outside a micro-batch"):
        site(pair.input())
    assert bank.all_free() and site.index == 0
    with pair.bank.micro_batch("train"):
        with pytest.raises(TypeError, match=r"argument 0 is a int"):
            site(3)
        with pytest.raises(TypeError, match=r"by position, got keywords"):
            site(hidden=pair.input())
    assert bank.counters()["calls"] == 0


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    # No wider than the buffer: staged in spite of its dtype, it would overrun nothing, and show here.
    "dtype": lambda x: x.half(),
    "dtype of the same size": lambda x: x.to(torch.int32),
    "fewer rows": lambda x: x[:-1],
    "more rows": lambda x: torch.cat([x, x]),
    "width": lambda x: x[:, :-1].contiguous(),
    "dimensions": lambda x: x.unsqueeze(1),
    "strides": lambda x: x.t().contiguous().t(),
    "device": lambda x: torch.empty_like(x, device="meta"),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED.keys())
def test_an_input_of_another_signature_changes_no_state(pair: Pair, change: Any) -> None:
    with pair.bank.micro_batch("train") as reason:
        assert reason is None
        held = pair.bank.holders()
        assert pair.bank.sites[0](change(pair.input())) is NotImplemented
        assert pair.bank.sites[0](pair.input(), pair.input()) is NotImplemented
        assert pair.bank.holders() == held
        pair.check_counters()
        assert pair.eager_calls() == {"SIGNATURE_CHANGED": 2}
        assert pair.bank.sites[0](pair.input()) is not NotImplemented
    assert pair.step() is None


def test_the_grad_mode_belongs_to_the_signature(device: str) -> None:
    pair = Pair(device, blocks()).capture(variant(), variant("even", training=False))
    with torch.no_grad():
        assert pair.forward(key="train").reason is None
    assert pair.eager_calls() == {"SIGNATURE_CHANGED": 3}
    micro_batch = pair.forward(key="even")
    micro_batch.backward()
    pair.check_state()
    del micro_batch
    assert pair.eager_calls() == {"SIGNATURE_CHANGED": 6}
    assert pair.evaluate() is None
    assert pair.eager_calls() == {"SIGNATURE_CHANGED": 6}
    assert pair.step() is None


@pytest.mark.parametrize("main_grad", [False, True])
def test_the_others_replay_and_the_dropped_one_is_captured_again(device: str, main_grad: bool) -> None:
    pair = Pair(device, blocks(), main_grad=main_grad)
    both = variant(), variant("even", training=False)
    pair.capture(*both)
    for _ in range(3):
        assert pair.step() is None and pair.evaluate() is None
        pair.bank.drop(["train"])
        assert pair.bank.num_graphs == 3
        assert pair.forward().reason is EagerReason.WARMING_UP and pair.evaluate() is None
        pair.update_weights()
        pair.capture(both[0])
        assert pair.bank.num_graphs == 9
    assert pair.step() is None and pair.evaluate() is None
    assert pair.eager_calls() == {"WARMING_UP": 9}
    torch.use_deterministic_algorithms(False)
    assert pair.forward().reason is EagerReason.NUMERICS_CHANGED
    pair.capture(both[0])
    assert pair.bank.num_graphs == 9
    assert pair.forward().reason is None, "it has the later graphs"


@pytest.mark.gpu
def test_the_next_capture_takes_the_memory_of_what_was_dropped() -> None:
    layers = [Block(256).to("cuda") for _ in range(3)]
    bank = new_bank(layers, "cuda")
    train = variant(rows=1 << 14, row_shape=(256,))
    bank.capture([train, dataclasses.replace(train, key="eval", training=False)])
    held = bank.pool_bytes()
    assert held > ROWS
    for _ in range(5):
        bank.drop(["train"])
        bank.capture([train])
    assert bank.pool_bytes() <= 1.1 * held


# -- bugs that were found once -----------------------------------------------------------------------


def test_an_eager_op_between_two_sites_changes_no_bit(device: str) -> None:
    """Its result was staged into the next site's input, which is the buffer that it was computed from."""
    pair = Pair(device, blocks(2)).capture()

    def squares_between(steps: Sequence[Any], x: Tensor) -> Tensor:
        first = steps[0](x)
        between = first * first  # saves what it was given
        out = steps[1](between)
        return pair.layers[1](between) if out is NotImplemented else out

    ours, eager = (partial(squares_between, steps) for steps in (pair.bank.sites, pair.eager_layers))
    for _ in range(3):
        pair.step(ours=ours, eager=eager)


def test_a_bank_does_not_go_on_watching_every_op(device: str) -> None:
    """Each host-backend capture left its op trace on; a second one doubled the names it recorded."""
    pairs = [Pair(device, blocks(1)).capture() for _ in range(3)]
    trace = OpTrace()
    torch.zeros(2).neg()
    assert trace.last_op == "aten::neg"
    del pairs
