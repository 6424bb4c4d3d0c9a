# SPDX-License-Identifier: Apache-2.0
"""A bank that replays is one call and one autograd node; else it is one of each for every site."""

from collections.abc import Sequence

import pytest
from bank_pair import Applies, Block, Pair, blocks
from torch import Tensor

from megagraph import _C
from megagraph.decide.reasons import EagerReason

SITES = 4


def nodes_of(out: Tensor) -> int:
    """How many replayed runs lie behind a tensor, in a row."""
    node, count = out.grad_fn, 0
    while node is not None and node.name() == "MegagraphReplay":
        count += 1
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return count


def test_site_by_site_has_the_same_bits(device: str) -> None:
    pair = Pair(device, blocks(SITES), main_grad=True).capture()
    replay_all = pair.bank.replay_all
    assert replay_all(pair.input()) is NotImplemented, "outside of a micro-batch its sites refuse it"
    assert isinstance(Pair(device, blocks(1)).bank.replay_all, _C.Site), "a run of one site is that site"
    for calls_sites in (False, True, False):
        pair.bank.replay_all = (lambda hidden: NotImplemented) if calls_sites else replay_all  # type: ignore[assignment]
        micro_batch = pair.forward()
        assert nodes_of(micro_batch.output) == (SITES if calls_sites else 1)
        micro_batch.backward()
        del micro_batch  # and with it the slot
        pair.check_state()
    assert pair.bank.counters()["replays"] == 3 * SITES


@pytest.mark.parametrize("eager", [0, 1, SITES - 1])
def test_a_bank_with_an_eager_site_is_no_run(device: str, eager: int) -> None:
    pair = Pair(device, blocks(SITES), main_grad=True)
    pair.bank.keep_eager(eager, EagerReason.SCOPE_UNSUPPORTED)
    pair.capture()
    with pair.bank.micro_batch("train") as reason:
        assert reason is None
        assert pair.bank.replay_all(pair.input()) is NotImplemented
    assert pair.eager_calls() == {}  # a run that cannot be is not counted, its sites are
    pair.step()
    assert pair.eager_calls() == {"SCOPE_UNSUPPORTED": 1}


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
def test_finished_backwards_are_told_where_asked_for_and_at_the_end(
    device: str, noticed: Sequence[int], eager: list[int], told: list[tuple[int, int]]
) -> None:
    pair = Pair(device, blocks(SITES), main_grad=True)
    for site in eager:
        pair.bank.keep_eager(site, EagerReason.FOREIGN_HOOK)
    pair.capture()
    heard: list[tuple[int, int]] = []
    pair.bank.set_listener(lambda: True, lambda *sites: heard.append(sites), noticed)
    pair.step()
    assert heard == told


def test_nobody_is_told_who_does_not_want_to_know(device: str) -> None:
    pair = Pair(device, blocks(SITES), main_grad=True).capture()
    asked: list[str] = []

    def wants() -> bool:
        asked.append("")
        return False

    def done(first: int, last: int) -> None:
        raise AssertionError("nobody asked for it")

    pair.bank.set_listener(wants, done, range(SITES))
    for count in (1, 2):
        pair.step()
        assert len(asked) == count, "once for each micro-batch"


@pytest.mark.parametrize("times", [2, 3, 5])
def test_gradients_of_a_layer_that_occurs_several_times_add_up_as_in_eager(device: str, times: int) -> None:
    pair = Pair(device, [Block()] * times).capture()
    pair.replay_steps(5)


def raising_pair(raises_in: str) -> Pair:
    """On the host, whose replays run the layers again: one in the middle raises there from now on."""
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
    pair.bank.set_listener(lambda: True, lambda first, _last: first == 2 and give_up("the listener"), [2])
    is_captured = True
    return pair


@pytest.mark.parametrize("raises_in", ["the forward", "the backward", "the listener"])
def test_what_raises_in_the_middle_frees_its_slot(raises_in: str) -> None:
    pair = raising_pair(raises_in)
    with pytest.raises(ValueError, match=f"{raises_in} gave up"):
        with pair.bank.micro_batch("train"):
            out = pair.bank(pair.input().requires_grad_())
        out.sum().backward()
    out = None
    assert pair.bank.all_free()
    with pair.bank.micro_batch("train") as reason:
        assert reason is None
