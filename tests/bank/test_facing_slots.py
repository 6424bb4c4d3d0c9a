# SPDX-License-Identifier: Apache-2.0
"""Slots that share memory: a forward runs beside the backward of the micro-batch before. On a CPU, where each
has its own, what one would write over is filled with NaN. And sites of parts, with eager ones between."""

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from bank_pair import ROWS, WIDTH, Block, Pair, new_bank, pool_bytes, unowned, variant
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph.bank.sites import EagerPart, SiteSpec
from megagraph.reasons import EagerReason

MANY_ROWS, COPIES = 1 << 14, 4


class Layer(Block):
    """A site hands out hidden states, and copies of them that nobody reads behind what follows it, eager."""

    def front(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        out = super().forward(hidden)
        return out, out.repeat(1, COPIES)

    def behind(self, made: Sequence[Tensor]) -> Tensor:
        out, wide = made
        return out + wide.view(-1, COPIES, out.shape[1]).sum(1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.behind(self.front(hidden))


def with_gaps(layers: Sequence[nn.Module], transient: Sequence[int] = (1,)) -> list[SiteSpec | EagerPart]:
    steps: list[SiteSpec | EagerPart] = []
    for layer in layers:
        steps.append(SiteSpec(name="site", module=layer, forward=Layer.front, transient=transient))
        steps.append(EagerPart(name="gap", module=layer, forward=Layer.behind))
    return steps


class FacingPair(Pair):
    """Layers of which the `graphed` ones have sites; the others run eager."""

    def __init__(self, device: str, num_layers: int, graphed: Sequence[int], **options: Any) -> None:
        self.num_layers, self.graphed = num_layers, list(graphed)
        facing = [self.graphed, [num_layers - index for index in self.graphed]]
        options |= {"num_slots": 2, "facing": facing, "share_given_back": True, "main_grad": True}
        options["steps"] = lambda layers: with_gaps([layers[index] for index in self.graphed])
        super().__init__(device, [Layer() for _ in range(num_layers)], **options)
        self.capture()


class Flight:
    """One micro-batch, whose layers are run one by one, as nodes of a plan are."""

    def __init__(self, pair: FacingPair) -> None:
        self.pair = pair
        self.layers: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # between their passes
        self.replayed: set[int] = set()
        self.keeps: int | None = None  # the layer of which it keeps what the site has handed out
        self.kept: Tensor | None = None
        self.keeps_copies = False  # what is transient
        self.grads: tuple[Tensor, Tensor] | None = None
        self.lease = contextlib.ExitStack()
        self.reason = self.lease.enter_context(pair.bank.micro_batch("train"))
        self.slot = pair.bank.slot_index

    def all_forwards(self) -> None:
        for _layer in range(self.pair.num_layers):
            self.forward()

    def all_backwards(self) -> None:
        while self.layers:
            self.backward()

    def forward(self) -> None:
        pair, index = self.pair, len(self.layers)
        before = self.layers[-1][1::2] if self.layers else [pair.input()] * 2
        x, eager_x = ((it.detach() * 2).requires_grad_() for it in before)
        layer: Any = pair.layers[index]
        made: Any = NotImplemented
        if self.reason is None and index in pair.graphed:
            made = pair.bank.sites[pair.graphed.index(index)](x)
        if made is NotImplemented:
            made = layer.front(x)
        else:
            self.replayed.add(index)
            self.kept = made[self.keeps_copies].detach() if index == self.keeps else self.kept
        self.layers.append((x, layer.behind(made), eager_x, pair.eager_layers[index](eager_x)))
        if len(self.layers) == pair.num_layers:
            self.lease.close()

    def backward(self) -> None:
        x, out, eager_x, eager_out = self.layers.pop()
        assert_same_bits(out, eager_out, "output")
        grad, eager_grad = self.grads or [torch.randn_like(eager_out)] * 2
        torch.autograd.backward(out, grad.clone())
        torch.autograd.backward(eager_out, eager_grad.clone())
        assert x.grad is not None and eager_x.grad is not None
        assert_same_bits(x.grad, eager_x.grad, "gradient of the input")
        self.grads = x.grad * 2, eager_x.grad * 2
        self.replayed.discard(len(self.layers))

    def check(self) -> None:
        for index, (_x, out, _eager_x, eager_out) in enumerate(self.layers):
            assert_same_bits(out, eager_out, f"output of layer {index}")


def overlapped(pair: FacingPair, count: int) -> Iterator[Flight]:
    """Runs micro-batches as Megatron's combined schedule does; yields one after each pass of a layer."""
    former: Flight | None = None
    for _ in range(count):
        flight = Flight(pair)
        for _layer in range(pair.num_layers):
            flight.forward()
            yield flight
            if former is not None:
                former.backward()
                yield flight
        former = flight
    while flight.layers:
        flight.backward()
        yield flight


# Of how many layers which are graphed.
LAYERS = [(1, [0]), (2, [0, 1]), (5, range(5)), (5, [1, 2, 4]), (6, [0, 1, 2, 5]), (4, [3])]


@pytest.mark.parametrize(("num_layers", "graphed"), LAYERS)
def test_the_combined_schedule_replays_all_it_runs(device: str, num_layers: int, graphed: Any) -> None:
    pair = FacingPair(device, num_layers, graphed)
    for count in (3, 1, 4):
        for flight in overlapped(pair, count):
            assert flight.reason is None
            flight.check()
        pair.check_state()
    assert pair.eager_calls() == {}
    assert pair.bank.counters()["replays"] == 8 * len(graphed)


@pytest.mark.parametrize(("num_layers", "graphed"), LAYERS[1:5])
def test_any_other_order_runs_eager_just_where_it_has_to(device: str, num_layers: int, graphed: Any) -> None:
    pair, rng = FacingPair(device, num_layers, graphed), random.Random(0)
    counts = Counter[str]()
    for _ in range(40):
        flying: list[Flight] = []
        for _pass in range(rng.randint(8, 40)):
            newest = flying[-1] if flying else None
            is_between = newest is None or len(newest.layers) == num_layers or newest.grads is not None
            if is_between and len(flying) < 2 and rng.random() < 0.5:
                flying.append(Flight(pair))
            elif newest is not None and not is_between and rng.random() < 0.6:
                others = [it for it in flying[:-1] if it.slot != newest.slot]
                layer = len(newest.layers)
                is_free = not any(num_layers - layer in it.replayed for it in others)
                newest.forward()
                assert (layer in newest.replayed) == (layer in graphed and is_free)
                counts["replayed" if layer in newest.replayed else "eager"] += layer in graphed
            elif done := [it for it in flying if it.layers and (it.grads or len(it.layers) == num_layers)]:
                flight = rng.choice(done)
                flight.backward()
                if not flight.layers:
                    flying.remove(flight)
            for flight in flying:
                flight.check()
        for flight in flying:
            while len(flight.layers) < num_layers and flight.grads is None:
                flight.forward()
            flight.all_backwards()
        del flying, newest
        pair.check_state()
    assert set(pair.eager_calls()) == {"NESTING"} and counts["replayed"] > counts["eager"] > 0


def test_an_output_that_somebody_keeps_holds_the_memory_of_its_layer_alone(device: str) -> None:
    pair = FacingPair(device, 4, range(4))
    passes = overlapped(pair, 2)
    first = next(passes)
    first.keeps = 3
    while first.kept is None:
        next(passes)
    bits = first.kept.clone()
    for _flight in passes:
        pass
    assert pair.eager_calls() == {"NESTING": 1}  # layer 1 of the second, whose slot is the other one
    assert_same_bits(first.kept, bits, "what is kept")


def test_what_passes_hand_over_is_gone_before_one_of_the_other_slot_runs(device: str) -> None:
    pair = FacingPair(device, 4, range(4))
    first = Flight(pair)
    first.keeps, first.keeps_copies = 3, True
    first.all_forwards()
    second = Flight(pair)
    second.forward()
    assert pair.eager_calls() == {"NESTING": 1} and not second.replayed
    first.kept = None
    first.backward()
    second.keeps, second.keeps_copies = 1, True
    second.forward()
    assert second.replayed == {1} and second.kept is not None
    bits = second.kept.clone()
    with pytest.raises(RuntimeError, match="while somebody holds an output that only"):
        first.backward()
    assert_same_bits(second.kept, bits, "what is kept")
    second.kept = None
    second.lease.close()


@pytest.mark.filterwarnings("ignore")
def test_graphs_with_collectives_say_who_is_in_the_way(device: str) -> None:
    asked: list[str] = []
    told = {"run_eager_alike": lambda _number, _variant, _site, why: asked.append(why)}
    pair = FacingPair(device, 2, range(2), **told)
    first = Flight(pair)
    first.all_forwards()
    second = Flight(pair)
    second.forward()
    assert asked == []
    second.forward()
    (why,) = asked
    assert why.startswith("NESTING: slot 0: ") and "1 pending backward of site 1" in why
    second.all_backwards()
    first.all_backwards()
    pair.check_state()


def test_variants_of_both_slots_face_each_other(device: str) -> None:
    """Evaluation in the one, while a micro-batch of the other waits for its backward."""
    pair = FacingPair(device, 3, range(3))
    pair.capture(variant("evaluation", training=False))
    flight = Flight(pair)
    flight.all_forwards()
    hidden = pair.input()
    with torch.no_grad(), pair.bank.micro_batch("evaluation") as reason:
        assert reason is None
        for index, (layer, site) in enumerate(zip(pair.eager_layers, pair.bank.sites, strict=True)):
            assert (site(hidden) is NotImplemented) == (index > 0)
            hidden = layer(hidden)
    flight.check()
    flight.all_backwards()
    pair.check_state()


@pytest.mark.gpu
def test_facing_slots_take_less_memory_than_others() -> None:
    layers = [Layer(256).cuda() for _ in range(4)]

    def held(transient: Sequence[int] = (1,), **options: Any) -> int:
        shape = variant(rows=MANY_ROWS, row_shape=(256,))
        return pool_bytes(with_gaps(layers, transient), shape, num_slots=2, **options)

    facing = [[0, 1, 2, 3], [4, 3, 2, 1]]
    two, less, kept = held(), held(facing=facing), held((), facing=facing)
    copies = MANY_ROWS * 256 * COPIES * 4  # of one of both slots
    assert less - held(facing=facing, share_given_back=True) >= copies
    assert less < 0.8 * two, f"{less} bytes of facing slots, {two} of two"
    assert kept - less >= 2 * copies, f"{kept} bytes if copies are kept, {less} if not"


# -- sites of parts of a module, with what stays eager between them: memory used again -----------------

CHOICES = 3


class Router(nn.Module):
    """A layer in four parts; the second and the fourth may stay eager. Nobody reads `unused`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, CHOICES)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(CHOICES))
        self.after = Block()
        self.register_buffer("calls", torch.zeros(()))
        self.metric = torch.zeros(CHOICES, device=device)
        self.to(device)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scores, which experts are chosen, the normed hidden states, and something else."""
        normed = self.norm(hidden)
        scores = self.gate(normed).softmax(-1)
        self.metric += scores.detach().sum(0)
        return scores, scores > 0.3, normed * 2, self.other(normed)

    def apply_experts(self, routed: Sequence[Tensor]) -> Tensor:
        """Depends on how many rows each expert gets, as no graph can."""
        scores, chosen, normed, *_unused = routed
        out = torch.zeros_like(normed)
        for index, expert in enumerate(self.experts):
            rows = chosen[:, index].nonzero()[:, 0]
            out = out.index_add(0, rows, expert(normed[rows]) * scores[rows, index, None])
        return out

    def finish(self, hidden: Tensor) -> Tensor:
        return self.after(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.finish(self.apply_experts(self.route(hidden)))


ROUTER_PARTS = ("norm", "gate", "other")


def steps_of(layer: Router, transient: Sequence[int] = ()) -> list[Any]:
    further: Any = {"transient": transient, "state": lambda module: [module.metric]}
    route = SiteSpec(name="route", module=layer, forward=Router.route, parts=ROUTER_PARTS, **further)
    experts = EagerPart(name="experts", module=layer, forward=Router.apply_experts)
    return [route, experts, SiteSpec(name="finish", module=layer, forward=Router.finish, parts=("after",))]


class RouterPair(Pair):
    """Two layers of parts under a bank, and copies of them eager."""

    def __init__(self, device: str, *, transient: Sequence[int] = (), **options: Any) -> None:
        options["steps"] = lambda layers: [step for layer in layers for step in steps_of(layer, transient)]
        super().__init__(device, [Router(device), Router(device)], **options)
        self.capture()
        assert not self.bank.failures and not any(layer.metric.any() for layer in self.layers)

    def check_state(self) -> None:
        """Metrics as well. What nobody reads has a gradient of zeros, where eager has none."""
        for layer, eager in zip(self.layers, self.eager_layers, strict=True):
            assert_same_bits(layer.metric, eager.metric, "metric")
            for param, other in zip(layer.other.parameters(), eager.other.parameters(), strict=True):
                if other.grad is None and param.grad is not None:
                    other.grad = torch.zeros_like(other)
        super().check_state()


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("transient", [(), (3,), (0, 1)])
def test_parts_of_modules_have_eagers_bits(device: str, main_grad: bool, transient: Sequence[int]) -> None:
    """And without gradients."""
    pair = RouterPair(device, main_grad=main_grad, transient=transient)
    for _ in range(5):
        assert pair.step() is None
    assert pair.counts() == {"calls": 5 * 4, "replays": 5 * 4}
    assert pair.bank.num_graphs == 2 * 4
    pair.capture(variant("even", training=False))
    assert pair.evaluate() is None
    assert pair.counts() == {"calls": 6 * 4, "replays": 6 * 4}


def test_what_was_transient_is_not_there_any_more(device: str) -> None:
    """Its memory is that of somebody else by then; on the host, and where a bank poisons, it is NaN."""
    seen: list[Tensor] = []

    def looks(_layer: Router, routed: Sequence[Tensor]) -> Tensor:
        seen.append(unowned(routed[3]))
        assert not seen[-1].isnan().any()
        return routed[2] * routed[0].sum(-1, keepdim=True)

    layer = Router(device)
    route, _experts, finish = steps_of(layer, (3,))
    bank = new_bank([route, EagerPart(name="part", module=layer, forward=looks), finish], device)
    bank.capture([variant()])
    assert not bank.failures
    out = bank.run(torch.randn(ROWS, WIDTH, device=device, requires_grad=True))
    if device == "cpu":  # on a GPU other passes have written there since
        assert seen[-1].isnan().all()
    out.sum().backward()
    del out
    assert bank.all_free()


def test_a_site_answers_for_its_own_modules_and_hands_several_outputs_to_who_takes_them(device: str) -> None:
    layer = Router(device)
    route, _experts, finish = steps_of(layer)
    bank = new_bank([route, finish], device)
    bank.capture([variant()])
    assert bank.eager_sites[0] is EagerReason.CAPTURE_FAILED
    assert "expected one output, as nothing takes several, got 4" in str(bank.failures[0])
    names = {name for name, _param in route.named_parameters()}
    assert names == {f"{part}.{of}" for part in ROUTER_PARTS for of in ("weight", "bias")}
    assert {*map(id, finish.parameters())} == {*map(id, layer.after.parameters())}
    has_metric = [any(buffer is layer.metric for buffer in site.state(layer)) for site in (route, finish)]
    assert has_metric == [True, False]
