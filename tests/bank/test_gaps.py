# SPDX-License-Identifier: Apache-2.0
"""Sites of parts of a module, with what stays eager between them: eager's bits, and memory used again."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from bank_pair import ROWS, WIDTH, Block, give_main_grads, new_bank, variant
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.bank import Bank
from megagraph.bank.eligibility import ineligible_sites
from megagraph.bank.sites import EagerPart, SiteSpec
from megagraph.bank.verify import Example, verify
from megagraph.decide.reasons import EagerReason

CHOICES = 3


class Router(nn.Module):
    """A layer in four parts, the second and the fourth of which may stay eager.

    Of what the first hands out, `chosen` is boolean and `unused` is read by nobody.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, CHOICES)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(CHOICES))
        self.after = Block()
        self.register_buffer("calls", torch.zeros(()))
        self.metric = torch.zeros(CHOICES)

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
        """One tensor to one tensor."""
        out: Tensor = self.after(hidden)
        return out

    def forward(self, hidden: Tensor) -> Tensor:
        return self.finish(self.apply_experts(self.route(hidden)))


ROUTER_PARTS = ("norm", "gate", "other")


def steps_of(layer: Router, *, transient: Sequence[int] = ()) -> list[SiteSpec | EagerPart]:
    """A site, an eager part, and a site."""
    return [
        SiteSpec(
            name="route",
            module=layer,
            forward=Router.route,
            parts=ROUTER_PARTS,
            transient=transient,
            state=lambda module: [module.metric],
        ),
        EagerPart(name="experts", module=layer, forward=Router.apply_experts),
        SiteSpec(name="finish", module=layer, forward=Router.finish, parts=("after",)),
    ]


class RouterPair:
    """Layers under a bank, and copies of them eager."""

    def __init__(
        self,
        device: str,  # of both
        *,
        num_layers: int = 2,  # how many
        num_slots: int = 1,  # of the bank
        main_grad: bool = False,  # as under Megatron's DDP
        training: bool = True,
        **options: Any,  # of `steps_of()`
    ) -> None:
        self.device = device
        self.layers = [Router().to(device) for _ in range(num_layers)]
        for layer in self.layers:
            layer.metric = layer.metric.to(device)
        self.eager = copy.deepcopy(self.layers)
        self.held = [give_main_grads(side) for side in (self.layers, self.eager) if main_grad]
        steps = [step for layer in self.layers for step in steps_of(layer, **options)]
        self.bank = new_bank(steps, device, num_slots=num_slots)
        before = [layer.metric.clone() for layer in self.layers]
        self.bank.capture([variant(training=training)])
        assert not self.bank.failures
        assert all(torch.equal(one, layer.metric) for one, layer in zip(before, self.layers, strict=True))

    def forward(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs and outputs of both, compared."""
        hidden = torch.randn(ROWS, WIDTH, device=self.device)
        x, eager_x = (hidden.clone().requires_grad_(torch.is_grad_enabled()) for _ in range(2))
        with self.bank.micro_batch("train") as reason:
            assert reason is None
            out = self.bank(x)
        eager_out = eager_x
        for layer in self.eager:
            eager_out = layer(eager_out)
        assert_same_bits(out, eager_out, "output")
        return x, eager_x, out, eager_out

    def step(self) -> None:
        """A micro-batch, forward and backward."""
        self.backward(*self.forward())

    def backward(self, x: Tensor, eager_x: Tensor, out: Tensor, eager_out: Tensor) -> None:
        """Of one micro-batch; everything is compared."""
        grad = torch.randn_like(out)
        out.backward(grad.clone())
        eager_out.backward(grad.clone())
        assert_same_bits(x.grad, eager_x.grad, "gradient of the input")
        for layer, eager in zip(self.layers, self.eager, strict=True):
            assert_same_bits(layer.metric, eager.metric, "metric")
            for (name, param), other in zip(layer.named_parameters(), eager.parameters(), strict=True):
                if name.startswith("other.") and other.grad is None and param.grad is not None:
                    assert not param.grad.any()  # of an output that nobody reads: zeros, where eager has none
                    continue
                assert_same_bits(param.grad, other.grad, name)
                assert_same_bits(
                    getattr(param, "main_grad", None), getattr(other, "main_grad", None), f"{name}.main_grad"
                )

    def counts(self) -> dict[str, int]:
        """What has happened."""
        return {name: count for name, count in self.bank.counters().items() if count}


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("transient", [(), (3,), (0, 1)])
def test_bits_of_eager(device: str, main_grad: bool, transient: Sequence[int]) -> None:
    pair = RouterPair(device, main_grad=main_grad, transient=transient)
    for _ in range(5):
        pair.step()
    assert pair.counts() == {"calls": 5 * 4, "replays": 5 * 4}
    assert pair.bank.num_graphs == 2 * 4


def test_bits_of_eager_without_gradients(device: str) -> None:
    pair = RouterPair(device, training=False, transient=(2, 3))
    with torch.no_grad():
        for _ in range(4):
            pair.forward()
    assert pair.counts() == {"calls": 4 * 4, "replays": 4 * 4}


def _captured(device: str, part: Callable[..., Tensor], **options: Any) -> tuple[Router, Bank]:
    """A layer whose part between the sites is another one; a bank does not keep it alive."""
    layer = Router().to(device)
    layer.metric = layer.metric.to(device)
    route, _experts, finish = steps_of(layer, **options)
    bank = new_bank([route, EagerPart(name="part", module=layer, forward=part), finish], device)
    bank.capture([variant()])
    assert not bank.failures
    return layer, bank


def test_who_keeps_a_transient_output_keeps_the_next_site_eager(device: str) -> None:
    """A square saves what it is of, so that no graph may write there before its backward."""
    _layer, bank = _captured(device, lambda _layer, routed: routed[2].square(), transient=(2,))
    for _ in range(3):
        with bank.micro_batch("train"):
            out = bank(torch.randn(ROWS, WIDTH, device=device, requires_grad=True))
        out.sum().backward()
        del out
    counters = bank.counters()
    assert (counters["replays"], counters["NESTING"]) == (3, 3)


def test_a_backward_does_not_write_what_somebody_reads(device: str) -> None:
    kept: list[Tensor] = []

    def keeps(_layer: Router, routed: Sequence[Tensor]) -> Tensor:
        kept.append(routed[3].detach())
        return routed[2] * routed[0].sum(-1, keepdim=True)

    _layer, bank = _captured(device, keeps, transient=(3,))
    with bank.micro_batch("train"):
        out = bank(torch.randn(ROWS, WIDTH, device=device, requires_grad=True))
    with pytest.raises(RuntimeError, match="while somebody holds an output that only what lies between"):
        out.sum().backward()
    assert not kept[0].isnan().any()


def test_what_was_transient_is_not_there_any_more(device: str) -> None:
    """Its memory is that of somebody else by then; on the host, and where a bank poisons, it is NaN."""
    seen: list[Tensor] = []

    def looks(_layer: Router, routed: Sequence[Tensor]) -> Tensor:
        # An alias that holds nothing, as a kernel that reads freed memory.
        seen.append(_C.unowned_alias(routed[3].detach()))
        assert not seen[-1].isnan().any()
        return routed[2] * routed[0].sum(-1, keepdim=True)

    _layer, bank = _captured(device, looks, transient=(3,))
    with bank.micro_batch("train"):
        out = bank(torch.randn(ROWS, WIDTH, device=device, requires_grad=True))
    if device == "cpu":  # on a GPU other passes have written there since
        assert seen[-1].isnan().all()
    out.sum().backward()
    del out
    assert bank.core.all_free()


def test_an_eager_part_may_come_first_and_last(device: str) -> None:
    layer, eager = (Block().to(device) for _ in range(2))
    eager.load_state_dict(layer.state_dict())
    scale = EagerPart(name="scale", module=layer, forward=lambda _module, hidden: hidden * 1.5)
    bank = new_bank([scale, layer, scale], device)
    bank.capture([variant(fewer_rows=True)])
    for rows in (ROWS, ROWS - 2):
        hidden = torch.randn(rows, WIDTH, device=device)
        x, eager_x = (hidden.clone().requires_grad_() for _ in range(2))
        with bank.micro_batch("train") as reason:
            assert reason is None
            out = bank(x)[:rows]
        eager_out = eager(eager_x * 1.5) * 1.5
        assert_same_bits(out, eager_out, "output")
        grad = torch.randn_like(out)
        out.backward(grad)
        eager_out.backward(grad)
        assert_same_bits(x.grad, eager_x.grad, "gradient of the input")
    assert bank.counters()["replays"] == 2


def test_micro_batches_in_flight_in_the_order_of_a_pipeline(device: str) -> None:
    pair = RouterPair(device, num_slots=2, transient=(3,))
    flying = [pair.forward()]
    for _ in range(4):  # 1F1B
        flying.append(pair.forward())
        pair.backward(*flying.pop(0))
    flying.append(pair.forward())
    assert pair.bank.begin("train") is EagerReason.NO_FREE_SLOT
    while flying:
        pair.backward(*flying.pop(0))
    assert pair.bank.core.all_free() and set(pair.counts()) == {"calls", "replays"}


@pytest.mark.parametrize("place", ["route", "apply_experts", "finish"])
def test_after_an_error_anywhere_the_next_step_is_right(
    device: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what stays eager, and in sites while they are captured."""
    raises = {"now": False}
    original = getattr(Router, place)

    def fails(layer: Router, *args: Any) -> Any:
        if raises["now"]:
            raise RuntimeError("of this part")
        return original(layer, *args)

    monkeypatch.setattr(Router, place, fails)
    pair = RouterPair(device, transient=(3,))
    pair.step()
    raises["now"] = True
    with pair.bank.micro_batch("train"):
        hidden = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
        if place == "apply_experts" or device == "cpu":  # on a GPU a graph runs no Python
            with pytest.raises(RuntimeError, match="of this part"):
                pair.bank(hidden)
    raises["now"] = False
    for layer, eager in zip(pair.layers, pair.eager, strict=True):
        eager.load_state_dict(layer.state_dict())
        eager.metric.copy_(layer.metric)
        for param, other in zip(layer.parameters(), eager.parameters(), strict=True):
            param.grad = other.grad = None
    pair.step()


def test_several_outputs_need_somebody_who_takes_them(device: str) -> None:
    layer = Router().to(device)
    layer.metric = layer.metric.to(device)
    route, _experts, finish = steps_of(layer)
    bank = new_bank([route, finish], device)
    bank.capture([variant()])
    assert bank.eager_sites[0] is EagerReason.CAPTURE_FAILED
    assert "expected one output, as nothing takes several, got 4" in str(bank.failures[0])


@pytest.mark.parametrize("transient", [(), (3,), (0, 1, 2, 3)])
def test_sites_are_verified_with_all_their_outputs(device: str, transient: Sequence[int]) -> None:
    pair = RouterPair(device, main_grad=True, transient=transient)
    hidden = torch.randn(ROWS, WIDTH, device=device)
    before = [layer.metric.clone() for layer in pair.layers]
    verified = verify(pair.bank, "train", Example(hidden=hidden))
    assert verified.differences == [] and verified.num_replays == 4
    assert all(map(torch.equal, before, [layer.metric for layer in pair.layers]))


def test_a_site_answers_for_its_own_modules_alone() -> None:
    layer = Router()
    route, _experts, finish = steps_of(layer)
    assert isinstance(route, SiteSpec) and isinstance(finish, SiteSpec)
    names = {name for name, _param in route.named_parameters()}
    assert names == {f"{part}.{of}" for part in ROUTER_PARTS for of in ("weight", "bias")}
    assert {id(param) for param in finish.parameters()} == {id(param) for param in layer.after.parameters()}
    assert any(buffer is layer.metric for buffer in route.buffers())
    assert not any(buffer is layer.metric for buffer in finish.buffers())
    layer.experts[0].register_forward_hook(lambda *args: None)  # runs: experts stay eager
    assert ineligible_sites([route, finish]) == {}
    layer.gate.register_forward_hook(lambda *args: None)
    assert {index: reason for index, (reason, _what) in ineligible_sites([route, finish]).items()} == {
        0: EagerReason.FOREIGN_HOOK
    }


def test_a_hook_on_a_module_whose_call_is_bypassed_keeps_its_sites_eager() -> None:
    layer = Router()
    route, _experts, finish = steps_of(layer)
    layer.register_forward_hook(lambda *args: None)
    found = ineligible_sites([step for step in (route, finish) if isinstance(step, SiteSpec)])
    assert {reason for reason, _what in found.values()} == {EagerReason.FOREIGN_HOOK} and len(found) == 2


def test_a_bank_of_eager_parts_alone_is_refused(device: str) -> None:
    part: Callable[..., Tensor] = lambda _module, hidden: hidden  # noqa: E731
    with pytest.raises(ValueError, match="expected at least one module, got 1 parts that stay eager"):
        new_bank([EagerPart(name="part", module=Block(), forward=part)], device)
