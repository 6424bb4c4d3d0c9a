# SPDX-License-Identifier: Apache-2.0
"""Random streams: a replay advances them as eager does, a capture and a verification not at all.
Regions that run again in the backward pass have the forward's numbers, or stay eager if they draw."""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from bank_pair import WIDTH, Applies, Block, Pair, blocks, rng_states, run_eager, variant
from same_bits import assert_same_bits
from test_verify import Baked, captured, example
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megagraph.bank.rng import Rewinds, RngSources, rewinds_of
from megagraph.bank.verify import verify
from megagraph.reasons import EagerReason


def with_dropout(count: int = 3) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Dropout(0.2)) for _ in range(count)]


class Tracker:
    """Named streams: generators of their own, or saved states of the default one, as Megatron's."""

    def __init__(self, device: str, *, graph_safe: bool) -> None:
        self.device = device
        self.states: dict[str, Tensor | torch.Generator] = {
            "dropout": torch.Generator(device).manual_seed(7) if graph_safe else rng_states(device)[-1]
        }

    def get_states(self) -> Mapping[str, Tensor | torch.Generator]:
        return dict(self.states)

    def set_states(self, states: Mapping[str, Tensor | torch.Generator]) -> None:
        self.states = dict(states)

    def content(self) -> Tensor:
        state = self.states["dropout"]
        return state.clone() if isinstance(state, Tensor) else state.get_state()

    def set_content(self, content: Tensor) -> None:
        state = self.states["dropout"]
        self.states["dropout"] = content.clone() if isinstance(state, Tensor) else state.set_state(content)

    def __deepcopy__(self, memo: object) -> "Tracker":
        return self  # both sides draw from one stream

    @contextlib.contextmanager
    def fork(self, name: str = "dropout") -> Iterator[torch.Generator]:
        state = self.states[name]
        if isinstance(state, torch.Generator):
            yield state
            return
        default = torch.default_generator if self.device == "cpu" else torch.cuda.default_generators[0]
        outside = default.get_state()
        default.set_state(state)
        try:
            yield default
        finally:
            self.states[name] = default.get_state()
            default.set_state(outside)


class Noisy(nn.Module):
    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.scale, self.tracker = nn.Parameter(torch.ones(WIDTH)), tracker

    def forward(self, hidden: Tensor) -> Tensor:
        with self.tracker.fork() as generator:
            return hidden * self.scale * torch.rand(hidden.shape, device=hidden.device, generator=generator)


def step_both_under_one_seed(pair: Pair, seed: int) -> None:
    states: list[list[Tensor]] = []

    def seeded(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        torch.manual_seed(seed)
        out = run(x)
        states.append(rng_states(pair.device))
        return out

    pair.step(ours=partial(seeded, pair.bank), eager=partial(seeded, partial(run_eager, pair.eager_layers)))
    assert_same_bits(*states, "the streams were not advanced as eager does")


@pytest.mark.parametrize("graph_safe", [True, False])
def test_capture_leaves_every_stream_where_it_was(device: str, graph_safe: bool) -> None:
    tracker = Tracker(device, graph_safe=graph_safe)
    pair = Pair(device, [*with_dropout(), Noisy(tracker)], num_slots=2, tracker=lambda: tracker)
    before, content = rng_states(device), tracker.content()
    pair.capture(variant(), variant("eval", training=False))
    assert_same_bits([*rng_states(device), tracker.content()], [*before, content])


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_a_verification_leaves_every_stream_where_it_was(device: str, training: bool, raises: bool) -> None:
    """Also where a module raises, and where there is no backward pass before which they are set back."""

    def draws(hidden: Tensor) -> Tensor:
        out = hidden + torch.rand_like(hidden)
        if raises and bank is not None and not Baked.is_captured:
            raise ValueError("of this module")
        return out

    layers, bank = [Applies(draws), Block(), Applies(draws)], None
    bank = captured(layers, device, training=training)
    given, before = example(device), rng_states(device)
    with pytest.raises(ValueError, match="of this module") if raises else contextlib.nullcontext():
        assert verify(bank, "it", given).differences == []
    assert all(map(torch.equal, before, rng_states(device)))


@pytest.mark.parametrize("graph_safe", [True, False])
def test_generators_are_captured_and_saved_states_leave_a_site_eager(device: str, graph_safe: bool) -> None:
    tracker = Tracker(device, graph_safe=graph_safe)
    tracker.states = {"unmoved": rng_states(device)[-1], **tracker.states}  # one that moves is enough
    pair = Pair(device, [nn.Tanh(), Noisy(tracker), *blocks(1)], tracker=lambda: tracker).capture()
    assert pair.bank.eager_sites == ({} if graph_safe else {1: EagerReason.RNG_NOT_GRAPH_SAFE})
    check_draws(pair, tracker)
    assert pair.eager_calls() == ({} if graph_safe else {"RNG_NOT_GRAPH_SAFE": 4})


def check_draws(pair: Pair, tracker: Tracker) -> None:
    """Both sides draw the same numbers from the tracker's stream and leave it at the same place."""

    def eager(x: Tensor) -> Tensor:
        after = tracker.content()
        assert not torch.equal(before, after)
        tracker.set_content(before)
        out = run_eager(pair.eager_layers, x)
        assert torch.equal(tracker.content(), after)
        return out

    for _ in range(4):
        before = tracker.content()
        assert pair.step(eager=eager) is None


@pytest.mark.parametrize(("name", "is_unsafe"), [("cpu", False), ("meta", True)])
def test_a_draw_on_the_host_is_safe_only_where_the_host_runs_the_replays(name: str, is_unsafe: bool) -> None:
    """The meta device stands for one whose replays run no Python."""
    sources = RngSources(torch.device(name))
    before = sources.snapshot()
    assert not sources.drew_unsafely(before)
    torch.rand(3)
    assert sources.drew_unsafely(before) == is_unsafe


def test_generators_that_took_the_place_of_captured_ones_are_noticed(device: str) -> None:
    """Graphs went on drawing from those that a checkpoint had replaced."""
    tracker = Tracker(device, graph_safe=True)
    pair = Pair(device, [Noisy(tracker)], tracker=lambda: tracker)
    rng = pair.bank.rng
    tracker.set_states({"dropout": torch.Generator(device).manual_seed(8)})
    assert not rng.has_other_streams(), "nothing draws yet"
    pair.capture()
    check_draws(pair, tracker)
    tracker.set_states(dict(tracker.get_states()))
    assert not rng.has_other_streams()
    captured, same_content = tracker.get_states(), torch.Generator(device)
    same_content.set_state(tracker.content())
    for others in ({"dropout": same_content}, {}, {**captured, "more": torch.Generator(device)}):
        tracker.set_states(others)
        assert rng.has_other_streams()
    for same in ({**captured, "saved": rng_states(device)[-1]}, captured):  # no graph draws from saved states
        tracker.set_states(same)
        assert not rng.has_other_streams()


@pytest.mark.gpu
def test_generators_of_one_state_are_the_same_stream() -> None:
    """Megatron's tracker makes a new one each time that somebody draws from a stream."""
    tracker = Tracker("cuda", graph_safe=True)
    pair = Pair("cuda", [Noisy(tracker)], tracker=lambda: tracker).capture()
    (stream,) = tracker.get_states().values()
    assert isinstance(stream, torch.Generator)
    for _ in range(2):
        before = tracker.content()
        tracker.set_states({"dropout": stream.graphsafe_get_state()})
        assert not pair.bank.rng.has_other_streams()
        assert torch.equal(tracker.content(), before)
        check_draws(pair, tracker)
    tracker.set_states({"dropout": stream.clone_state()})
    assert pair.bank.rng.has_other_streams()


def test_what_draws_otherwise_in_eager_stays_eager(device: str) -> None:
    def draws_more(hidden: Tensor) -> Tensor:
        hidden = nn.functional.dropout(hidden, 0.3)
        return hidden if Baked.is_captured else nn.functional.dropout(hidden, 0.3)

    layers, state = [Applies(draws_more), Block()], torch.get_rng_state()
    bank = captured(layers, device)
    assert torch.equal(state, torch.get_rng_state())
    assert bank.eager_sites == {0: EagerReason.RNG_NOT_GRAPH_SAFE}
    assert "draws other random numbers in eager than in a capture" in bank.take_failures()[0]


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["Python's", "numpy's"])
@pytest.mark.parametrize("is_always", [True, False])
def test_a_draw_on_the_host_leaves_its_layer_eager_unless_another_thread_may_have_made_it(
    device: str, draw: Callable[[], float], is_always: bool
) -> None:
    """Bug: whether a layer is skipped was decided in its capture, once for the whole training."""
    draws = iter([draw])

    def perhaps(hidden: Tensor) -> Tensor:
        if is_always:
            return hidden * draw()
        for once in draws:  # as a thread beside the first run
            once()
        return hidden * 2

    before = random.getstate(), numpy.random.get_state()[2]
    bank = captured([Applies(perhaps), Block()], device)
    assert (random.getstate(), numpy.random.get_state()[2]) == before
    assert bank.eager_sites == ({0: EagerReason.RNG_NOT_GRAPH_SAFE} if is_always else {})
    assert not is_always or "Python's or numpy's generator" in bank.take_failures()[0]


@pytest.mark.parametrize("fails", ["in its call", "by a counter"])
def test_what_a_layer_drew_on_the_host_before_it_failed_is_put_back(device: str, fails: str) -> None:
    """Bug: the next step's documents, or a skipped layer, were other ones than in eager."""

    def perhaps(hidden: Tensor) -> Tensor:
        own["count"] += fails == "by a counter"
        factor: float = random.random() * numpy.random.rand() / (own["count"] > 0)
        return hidden * factor

    layer, before = Applies(perhaps), (random.getstate(), numpy.random.get_state()[2])
    own = vars(layer)
    own["count"] = 0
    bank = captured([layer, Block()], device)
    assert (random.getstate(), numpy.random.get_state()[2]) == before
    assert bank.eager_sites == {0: EagerReason.CAPTURE_FAILED} and own["count"] == 0


# -- regions that run again in the backward pass ---------------------------------------------------


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
    rewinds = Rewinds()
    rewinds.real = torch.default_generator
    for module in (torch, torch.random):
        monkeypatch.setattr(module, "set_rng_state", rewinds.set_state)
    return rewinds


@REENTRANT
@pytest.mark.parametrize(
    ("inner", "draws"),
    [(drawing, True), (lambda: Recomputed(drawing(), reentrant=False), True), (Block, False)],
)
def test_only_a_repeated_draw_is_noticed(followed: Rewinds, inner: Any, draws: bool, reentrant: bool) -> None:
    layers = nn.Sequential(nn.Dropout(), Recomputed(inner(), reentrant=reentrant), nn.Dropout(0.1))
    for _ in range(2):
        out = layers(torch.randn(6, WIDTH, requires_grad=True))
        torch.rand(3)  # the stream goes on before the backward
        out.sum().backward()
    assert followed.has_drawn() == draws


def test_a_stream_that_is_set_and_left_there_is_noticed_at_its_next_draw(followed: Rewinds) -> None:
    state = torch.get_rng_state()
    torch.rand(3)
    torch.set_rng_state(state)
    assert not followed.has_drawn()
    torch.rand(3)
    assert followed.has_drawn()


@REENTRANT
def test_recompute_around_a_draw_has_eager_bits(device: str, reentrant: bool) -> None:
    """On a GPU its graphs drew another mask in the backward pass; those beside it replay."""
    pair = Pair(device, [*with_dropout(2), Recomputed(drawing(), reentrant=reentrant)]).capture()
    for seed in range(4):
        step_both_under_one_seed(pair, seed)
    if device == "cpu":  # what stands for a graph there runs Python again
        assert pair.bank.counters()["replays"] == 4 * 3
        return
    assert "set back" in pair.failure(2, EagerReason.RNG_NOT_GRAPH_SAFE)
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
        with rewinds_of(device) as rewinds:
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
    with rewinds_of(device) as rewinds:
        default = torch.cuda.default_generators[device.index]
        outside = default.graphsafe_get_state()
        before, named_before = outside.get_state(), named.get_state()
        default.graphsafe_set_state(named)
        torch.rand(3, device=device)
        default.graphsafe_set_state(outside)
        assert not rewinds.has_drawn()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert not torch.equal(named.get_state(), named_before)
