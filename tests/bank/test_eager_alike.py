# SPDX-License-Identifier: Apache-2.0
"""Where graphs hold collectives no rank runs eager alone inside of a step: it finds why with others.

Bug: it ran eager, and the others waited in their graphs for ever.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bank_pair import CountsOps, Pair, blocks, variant
from test_surroundings import Named

from megagraph.decide.reasons import EagerReason


class Alone(RuntimeError):
    """Nobody else has come to run eager."""


class Ranks:
    """Others, which find what this rank finds, or not."""

    def __init__(self, *, are_alike: bool) -> None:
        self.are_alike = are_alike
        self.asked: list[tuple[int, int, str]] = []

    def run_eager_alike(self, variant: int, site: int, why: str) -> None:
        """What a bank calls."""
        self.asked.append((variant, site, why))
        if not self.are_alike:
            raise Alone(why)


def pair_of(ranks: Ranks, **options: Any) -> Pair:
    told = {"holds_collectives": True, "run_eager_alike": ranks.run_eager_alike, **options}
    return Pair("cpu", blocks(), main_grad=True, **told).capture()


def hooks() -> contextlib.AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(lambda it: it, lambda it: it)


@contextlib.contextmanager
def precise() -> Any:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def stray_gradient(param: Any) -> Any:
    param.grad = torch.zeros_like(param)
    yield
    param.grad = None


@pytest.mark.parametrize("are_alike", [False, True])
@pytest.mark.parametrize(
    ("around", "why"),
    [
        (lambda _param: CountsOps(), "SIGNATURE_CHANGED: a dispatch mode"),
        (lambda _param: hooks(), "RECOMPUTING: saved-tensor hooks"),
        (lambda _param: precise(), "NUMERICS_CHANGED: float32 matmul precision"),
        (stray_gradient, "PARAMETERS_CHANGED"),
    ],
)
def test_what_is_around_a_micro_batch(
    around: Callable[[Any], contextlib.AbstractContextManager[Any]], why: str, are_alike: bool
) -> None:
    ranks = Ranks(are_alike=are_alike)
    pair = pair_of(ranks)
    reason = EagerReason[why.partition(":")[0]]
    with around(pair.params()[0]), contextlib.nullcontext() if are_alike else pytest.raises(Alone, match=why):
        assert pair.forward().reason is reason
    assert ranks.asked == [(0, -1, why)] and pair.bank.slot_index == -1
    assert pair.eager_calls() == ({reason.name: 3} if are_alike else {})
    assert pair.forward().reason is None


@pytest.mark.parametrize("are_alike", [False, True])
def test_a_tensor_of_another_form_that_a_site_is_given(are_alike: bool) -> None:
    """And hands on likewise."""
    ranks = Ranks(are_alike=are_alike)
    pair = pair_of(ranks)
    transposed = pair.input().t().contiguous().t()
    with contextlib.nullcontext() if are_alike else pytest.raises(Alone), pair.bank.micro_batch("train"):
        pair.bank(transposed)
    assert ranks.asked == [(0, site, "SIGNATURE_CHANGED") for site in range(3 if are_alike else 1)]
    assert pair.eager_calls() == ({"SIGNATURE_CHANGED": 3} if are_alike else {})
    assert pair.step() is None


def test_what_all_ranks_know_is_asked_of_nobody() -> None:
    """A second micro-batch in flight, and a site without graphs, whatever that is given."""
    ranks = Ranks(are_alike=False)
    pair = pair_of(ranks)
    first = pair.forward()
    assert pair.forward().reason is EagerReason.NO_FREE_SLOT
    first.backward()
    del first
    pair = pair_of(ranks, steps=lambda layers: layers[1:])
    pair.bank.keep_eager(0, EagerReason.FOREIGN_HOOK)
    pair.capture(variant("again"))
    with pair.bank.micro_batch("again"):
        assert pair.bank.sites[0](pair.input().as_subclass(Named)) is NotImplemented
    assert ranks.asked == []


def test_before_a_step_a_rank_says_what_would_keep_it_eager() -> None:
    """All of them run that step eager then, and nobody asks inside of it."""
    pair = pair_of(Ranks(are_alike=False))

    def reasons(look_at_grads: bool = False) -> list[EagerReason | None]:
        return [
            pair.bank.reason_before_step(training=training, look_at_grads=look_at_grads)
            for training in (False, True)
        ]

    assert reasons() == [None, None]
    with CountsOps():
        assert reasons() == [EagerReason.SIGNATURE_CHANGED] * 2
    with hooks():
        assert reasons() == [None, EagerReason.RECOMPUTING]
    with stray_gradient(pair.params()[0]):
        assert reasons() == [None, None]
        assert reasons(look_at_grads=True) == [None, EagerReason.PARAMETERS_CHANGED]
