# SPDX-License-Identifier: Apache-2.0
"""Sites of parts of a module, with what stays eager between them: eager's bits, and memory used again."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from bank_pair import ROWS, WIDTH, Block, Pair, new_bank, unowned, variant
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph.bank.sites import EagerPart, SiteSpec
from megagraph.reasons import EagerReason

CHOICES = 3


class Router(nn.Module):
    """A layer in four parts, the second and the fourth of which may stay eager. Of what the first hands out,
    `chosen` is boolean and `unused` is read by nobody."""

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
def test_bits_of_eager(device: str, main_grad: bool, transient: Sequence[int]) -> None:
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
