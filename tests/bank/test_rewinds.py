# SPDX-License-Identifier: Apache-2.0
"""Regions that run again in the backward pass: those that draw have the forward's numbers, or stay eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bank_pair import WIDTH, Block, Pair
from test_bank_rng import step_both_under_one_seed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megagraph.bank.rng import Rewinds, rewinds_of_default_generator
from megagraph.decide.reasons import EagerReason


class Recomputed(nn.Module):
    """Runs a part of itself again in the backward pass, as torch's checkpoint does."""

    def __init__(self, inner: nn.Module, *, reentrant: bool, preserve: bool = True) -> None:
        super().__init__()
        self.inner, self.options = inner, {"use_reentrant": reentrant, "preserve_rng_state": preserve}

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, hidden, **self.options)
        return out + hidden


def drawing() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))


REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["re-entrant", "by hooks"])


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Rewinds:
    """Follows the CPU's generator, which checkpoints set as they set a GPU's."""
    rewinds = Rewinds(torch.default_generator)
    original = torch.set_rng_state

    def set_rng_state(state: Tensor) -> None:
        with rewinds.setting():
            original(state)

    for module in (torch, torch.random):
        monkeypatch.setattr(module, "set_rng_state", set_rng_state)
    return rewinds


@REENTRANT
@pytest.mark.parametrize(
    ("inner", "before", "draws"),
    [
        pytest.param(drawing, nn.Identity, True, id="a dropout inside"),
        pytest.param(Block, nn.Identity, False, id="no draw"),
        pytest.param(Block, nn.Dropout, False, id="a dropout outside"),
    ],
)
def test_only_a_draw_in_what_runs_again_is_noticed(
    followed: Rewinds,
    inner: Callable[[], nn.Module],
    before: Callable[[], nn.Module],
    draws: bool,
    reentrant: bool,
) -> None:
    layers = nn.Sequential(before(), Recomputed(inner(), reentrant=reentrant), nn.Dropout(0.1))
    for _ in range(2):
        out = layers(torch.randn(6, WIDTH, requires_grad=True))
        torch.rand(3)  # the stream goes on before the backward
        out.sum().backward()
    assert followed.has_drawn() == draws


def test_a_region_that_is_set_back_twice_is_noticed_where_the_inner_one_draws(followed: Rewinds) -> None:
    outer = Recomputed(nn.Sequential(Block(), Recomputed(drawing(), reentrant=False)), reentrant=False)
    outer(torch.randn(6, WIDTH, requires_grad=True)).sum().backward()
    assert followed.has_drawn()


def test_a_stream_that_is_set_and_left_there_is_noticed_at_its_next_draw(followed: Rewinds) -> None:
    state = torch.get_rng_state()
    torch.rand(3)
    torch.set_rng_state(state)
    assert not followed.has_drawn()
    torch.rand(3)
    assert followed.has_drawn()


@REENTRANT
def test_recompute_around_a_draw_has_eager_bits(device: str, reentrant: bool) -> None:
    """On a GPU its graphs drew another mask in the backward pass than in the forward."""
    layers = [Block(), Recomputed(drawing(), reentrant=reentrant), nn.Sequential(Block(), nn.Dropout(0.3))]
    pair = Pair(device, layers).capture()
    for seed in range(4):
        step_both_under_one_seed(pair, seed)
    if device == "cpu":  # what stands for a graph there runs Python again
        assert pair.bank.counters()["replays"] == 4 * 3
        return
    (failure,) = pair.bank.failures
    assert (failure.index, failure.reason) == (1, EagerReason.RNG_NOT_GRAPH_SAFE)
    assert "set back" in failure.detail
    assert pair.eager_calls() == {"RNG_NOT_GRAPH_SAFE": 4}
    assert pair.bank.counters()["replays"] == 4 * 2


@pytest.mark.parametrize("preserve", [True, False], ids=["swaps states", "swaps nothing"])
def test_recompute_without_a_draw_has_eager_bits(device: str, preserve: bool) -> None:
    plain = Recomputed(Block(), reentrant=True, preserve=preserve)
    pair = Pair(device, [nn.Sequential(Block(), nn.Dropout(0.3)), plain]).capture()
    for seed in range(4):
        step_both_under_one_seed(pair, seed)
    # torch's checkpoint reads the state of the stream, which not every release allows in a capture.
    reasons = {failure.reason for failure in pair.bank.failures}
    assert not reasons or (device == "cuda" and preserve and reasons == {EagerReason.CAPTURE_FAILED})
    assert pair.bank.counters()["replays"] == 4 * (2 - len(reasons))


@pytest.mark.gpu
def test_the_default_generator_is_followed_however_it_is_set() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    real: Any = torch.cuda.default_generators[device.index]
    state = torch.cuda.get_rng_state()

    def offset() -> None:
        torch.cuda.default_generators[device.index].set_offset(1 << 20)

    for set_elsewhere in (lambda: torch.cuda.set_rng_state(state), lambda: torch.cuda.manual_seed(5), offset):
        torch.rand(3, device=device)
        with rewinds_of_default_generator(device) as rewinds:
            reached = torch.cuda.get_rng_state()
            assert torch.equal(reached, real.get_state())
            torch.rand(3, device=device, generator=torch.cuda.default_generators[device.index])
            reached = torch.cuda.get_rng_state()
            assert torch.equal(reached, real.get_state()), "a draw went past the real generator"
            set_elsewhere()
            torch.cuda.set_rng_state(reached)
            assert not rewinds.has_drawn()
            set_elsewhere()
            torch.rand(3, device=device)
            torch.cuda.set_rng_state(reached)
            assert rewinds.has_drawn()
        assert torch.cuda.default_generators[device.index] is real
        assert torch.equal(real.get_state(), reached)


@pytest.mark.gpu
def test_generators_that_are_swapped_are_no_states_that_are_set() -> None:
    """As trackers do that are safe for graphs: a graph knows which generator it draws from."""
    device = torch.device("cuda", torch.cuda.current_device())
    named = torch.Generator(device).manual_seed(7)
    with rewinds_of_default_generator(device) as rewinds:
        default = torch.cuda.default_generators[device.index]
        outside = default.graphsafe_get_state()
        before, named_before = outside.get_state(), named.get_state()
        default.graphsafe_set_state(named)
        torch.rand(3, device=device)
        default.graphsafe_set_state(outside)
        assert not rewinds.has_drawn()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert not torch.equal(named.get_state(), named_before)
