# SPDX-License-Identifier: Apache-2.0
"""What of each layer is graphed, and what stays eager: the steps of a block, from the names of scopes.

A router that is told what to choose from the beginning leaves its experts eager behind graphed attention, and
a sentence says so. One that is told later is another state, whose capture leaves its layer out.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.bank.sites import EagerPart, JoinedSites, Outputs, SiteSpec
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.scopes.moe import (
    EXPERTS,
    GROUPED,
    MOE,
    ROUTED,
    ROUTER,
    read_by_routers,
    unsupported_routing,
)
from megagraph.megatron.scopes.moe_preprocess import PERMUTED, PREPROCESS
from megagraph.megatron.scopes.parts import ATTENTION, MAMBA, MLP, LayerPart, is_mamba, run_layer
from megagraph.megatron.seams import ROUTING

__all__ = ["HALVES", "BlockPlan", "LayerStep"]

HALVES: Sequence[LayerPart] = (ATTENTION, MLP, MAMBA, EXPERTS)

# From what the step before has handed on to what this one does.
Run = Callable[[Any, Any, Mapping[str, Any]], Outputs]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class LayerStep:
    """One step of a layer, or of several whole layers.

    Args:
        step: as a bank takes it.
        layer: the place in the block of its layer, or the first one of them.
        run: runs it eager, inside of the block.
        is_whole: it is all of the layer.
        num_layers: how many it is of.
    """

    step: SiteSpec | EagerPart
    layer: int
    run: Run
    is_whole: bool
    num_layers: int = 1

    @property
    def is_site(self) -> bool:
        """Whether it may have graphs."""
        return isinstance(self.step, SiteSpec)

    def run_eager(self, before: Any, arguments: Mapping[str, Any]) -> Any:
        """Runs it in a block, on what the step before has handed on for a canonical pack."""
        out = self.run(self.step.module, before, arguments)
        # Megatron adds residuals with gradients switched on, also where the caller has them off.
        if torch.is_grad_enabled():
            return out
        return out.detach() if isinstance(out, Tensor) else [each.detach() for each in out]


class BlockPlan:
    """The steps of a block.

    Args:
        layers: in execution order. Held weakly.
        scopes: names of halves; none, and all that a layer has, is whole layers.
        context: entered around each step; a capture runs layers without their block.

    Attributes:
        steps: of all layers.
        specs: the sites among them.
        mamba_layers: which layers, by their place, take and return what Mamba's do.
        notes: what stays eager of layers that are graphed for the rest, in words.
    """

    def __init__(self, layers: Sequence[nn.Module], scopes: Collection[str], context: Context) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]
        self._context = context
        self.mamba_layers = frozenset(index for index, layer in enumerate(layers) if is_mamba(layer))
        self.notes: list[str] = []
        self.steps: list[LayerStep] = []
        self._refused: dict[int, str] = {}  # why, by the index of a layer's site
        # What is graphed of layers that run in parts, and of others as far as it may be another day's not.
        self._split: dict[int, Sequence[LayerPart]] = {}
        self._whole: dict[int, Sequence[LayerPart]] = {}
        for index, layer in enumerate(layers):
            self._add(index, layer, scopes)
        if scopes and not any(step.is_site for step in self.steps):
            self.steps.clear()
            for index, layer in enumerate(layers):
                self._keep_whole(index, layer, f"it has nothing that {', '.join(scopes)} would graph")
        self.specs = [step.step for step in self.steps if isinstance(step.step, SiteSpec)]

    def layers(self) -> list[nn.Module]:
        """The layers that still exist."""
        return [layer for ref in self._layers if (layer := ref()) is not None]

    def bank_steps(self) -> list[SiteSpec | EagerPart]:
        """All steps, as a bank takes them."""
        return [step.step for step in self.steps]

    def walk(self, eager_sites: Collection[int]) -> list[LayerStep]:
        """The steps of all layers, where a layer of which no site has a graph is one step: its own call.

        Args:
            eager_sites: those without graphs, by index. A hook of their layer may be the reason.
        """
        found = []
        for layer in dict.fromkeys(step.layer for step in self.steps):
            steps = self.steps_of(layer)
            sites = [step for index, step in steps if index >= 0]
            if sites and all(index in eager_sites for index, _step in steps if index >= 0):
                run = sites[0].run if sites[0].num_layers > 1 else run_layer
                found += [dataclasses.replace(step, run=run, is_whole=True) for step in sites[:1]]
            else:
                found += [step for _index, step in steps]
        return found

    def whole_layers(self) -> list[LayerStep]:
        """Every layer as one step, which has no graph."""
        return [
            LayerStep(
                step=EagerPart(name=f"layer {index}", module=layer, forward=run_layer),
                layer=index,
                run=run_layer,
                is_whole=True,
            )
            for index, layer in enumerate(self.layers())
        ]

    def refused(self) -> Mapping[int, tuple[EagerReason, str]]:
        """Sites that stay eager for what their layer is, or is not to be split into, by index: why."""
        return {index: (EagerReason.SCOPE_UNSUPPORTED, why) for index, why in self._refused.items()}

    def no_longer_graphed(self) -> Mapping[int, tuple[EagerReason, str]]:
        """Sites of layers that must not be split or graphed any more, by index: why.

        Hosts set forwards at any time, and tell routers what to choose.
        """
        found = {}
        checks = [(index, halves, _unsupported_whole) for index, halves in self._split.items()]
        checks += [(index, halves, _unsupported) for index, halves in self._whole.items()]
        for index, halves, check in checks:
            layer = self._layers[index]()
            if layer is not None and (why := check(layer, halves)) is not None:
                sites = (site for site, _step in self.steps_of(index) if site >= 0)
                found.update(dict.fromkeys(sites, (EagerReason.SCOPE_UNSUPPORTED, why)))
        return found

    def keys(self) -> list[Callable[[], Any]]:
        """Functions whose results are part of the state that graphs are captured in.

        Of methods that hosts set on a class of Megatron's to tell routers what to choose.
        """
        graphed = itertools.chain.from_iterable((*self._split.values(), *self._whole.values()))
        routes = any(half in (ROUTER, MOE, GROUPED) for half in graphed)
        return [ROUTING.function] if routes else []

    def eager_modules(self) -> list[nn.Module]:
        """What of the layers no site answers for."""
        in_sites = {id(module) for spec in self.specs for module in spec.modules()}
        return [module for layer in self.layers() for module in layer.modules() if id(module) not in in_sites]

    def steps_of(self, layer: int) -> list[tuple[int, LayerStep]]:
        """Of one layer, with the index of the site, or -1."""
        found, site = [], -1
        for step in self.steps:
            site += step.is_site
            if step.layer <= layer < step.layer + step.num_layers:
                found.append((site if step.is_site else -1, step))
        return found

    def joined(self, borders: Collection[int], alone: Collection[int]) -> "BlockPlan":
        """The plan in which neighbouring whole layers are one site.

        Args:
            borders: sites, by index, with which another one begins.
            alone: sites, by index, that stay as they are.
        """
        plan = copy.copy(self)
        plan.steps, plan._refused = [], {}
        site = -1
        groups: list[tuple[bool, list[LayerStep]]] = []  # whether others may follow in the same site
        for step in self.steps:
            site += step.is_site
            may_join = step.is_site and step.is_whole and site not in alone
            if may_join and groups and groups[-1][0] and site not in borders:
                groups[-1][1].append(step)
            else:
                groups.append((may_join, [step]))
            if step.is_site and site in self._refused:
                refused = sum(steps[0].is_site for _may_join, steps in groups) - 1
                plan._refused[refused] = self._refused[site]
        plan.steps = [_joined(steps) for _may_join, steps in groups]
        plan.specs = [step.step for step in plan.steps if isinstance(step.step, SiteSpec)]
        return plan

    def _add(self, index: int, layer: nn.Module, scopes: Collection[str]) -> None:
        halves = [half for half in HALVES if half.is_in(layer)]
        if EXPERTS in halves:
            before = halves[: halves.index(EXPERTS)]
            halves = [*before, *self._parts_of_experts(index, layer, scopes, before)]
        graphed = [half for half in halves if not scopes or half.name in scopes]
        stays_eager = next((half.always_eager for half in graphed if half.always_eager is not None), None)
        if stays_eager is not None:
            self._keep_whole(index, layer, stays_eager)
        elif not scopes or (graphed and len(graphed) == len(halves) and MOE not in halves):
            if (why := _unsupported(layer, graphed)) is not None:
                self._keep_whole(index, layer, why)
            else:
                self._whole[index] = graphed
                self._add_whole(index, layer, is_site=True)
        elif not graphed:
            self._add_whole(index, layer, is_site=False)
        elif (why := _unsupported_whole(layer, graphed)) is not None:
            self._keep_whole(index, layer, why)
        else:
            self._split[index] = graphed
            for is_site, neighbours in itertools.groupby(halves, key=lambda half: half in graphed):
                self._add_halves(index, layer, [*neighbours], is_site=is_site)

    def _parts_of_experts(
        self, index: int, layer: nn.Module, scopes: Collection[str], before: Sequence[LayerPart]
    ) -> Sequence[LayerPart]:
        """What the experts of a layer are; one eager part where a router cannot be graphed as named.

        Attention before it is graphed all the same; where there is none, the whole layer has to stay eager.
        """
        parts = _parts_of_experts(layer, scopes)
        named = [half.name for half in parts if half.name in scopes]
        why = unsupported_routing(layer) if named and any(half.name in scopes for half in before) else None
        if why is None:
            return parts
        reason = EagerReason.SCOPE_UNSUPPORTED.name
        self.notes.append(f"layer {index} ({type(layer).__name__}): {named[0]} stays eager ({reason}): {why}")
        return (EXPERTS,)

    def _keep_whole(self, index: int, layer: nn.Module, why: str) -> None:
        """Adds a layer as a site that never has graphs."""
        self._refused[sum(step.is_site for step in self.steps)] = why
        self._add_whole(index, layer, is_site=True)

    def _add_whole(self, index: int, layer: nn.Module, *, is_site: bool) -> None:
        name = f"layer {index} ({type(layer).__name__})"
        forward = self._alone(run_layer)
        step: SiteSpec | EagerPart = EagerPart(name=name, module=layer, forward=forward)
        if is_site:
            state = read_by_routers if GROUPED.is_in(layer) else _no_state
            step = SiteSpec(name=name, module=layer, forward=forward, state=state)
        self.steps.append(LayerStep(step=step, layer=index, run=run_layer, is_whole=True))

    def _add_halves(
        self, index: int, layer: nn.Module, halves: Sequence[LayerPart], *, is_site: bool
    ) -> None:
        """Adds neighbours as one step. Only the last of them may hand out several tensors."""
        names = " and ".join(half.name for half in halves)
        name, run, last = f"{names} of layer {index} ({type(layer).__name__})", _in_turn(halves), halves[-1]
        states = (half.state for half in halves if half.state is not None)
        step = (
            SiteSpec(
                name=name,
                module=layer,
                forward=self._alone(run),
                parts=[child for half in halves for child in half.children_of(layer)],
                bypassed=[child for half in halves for child in half.bypassed],
                transient=last.transient(layer),
                state=next(states, _no_state),
            )
            if is_site
            else EagerPart(name=name, module=layer, forward=self._alone(run))
        )
        self.steps.append(LayerStep(step=step, layer=index, run=run, is_whole=False))

    def _alone(self, run: Run) -> Callable[..., Any]:
        """Runs a step as in its block."""
        context = self._context

        @functools.wraps(run)
        def forward(layer: nn.Module, before: Any, **arguments: Any) -> Any:
            with context():
                return run(layer, before, arguments)

        return forward


def _joined(steps: Sequence[LayerStep]) -> LayerStep:
    """Some whole layers as one step."""
    if len(steps) == 1:
        return steps[0]

    def run(_layer: Any, before: Any, arguments: Mapping[str, Any]) -> Outputs:
        for step in steps:
            before = step.run(step.step.module, before, arguments)
        out: Outputs = before
        return out

    sites = [step.step for step in steps if isinstance(step.step, SiteSpec)]
    first, last = steps[0].layer, steps[-1].layer
    site = JoinedSites(name=f"layers {first} to {last}", sites=sites)
    return LayerStep(step=site, layer=first, run=run, is_whole=True, num_layers=last - first + 1)


def _no_state(layer: Any) -> Sequence[Tensor]:
    return ()


def _parts_of_experts(layer: nn.Module, scopes: Collection[str]) -> Sequence[LayerPart]:
    """What the experts of a layer are, by what of them is graphed."""
    if GROUPED.is_in(layer) and ROUTER.name not in scopes:
        return (GROUPED,)
    if MOE.name in scopes:
        return (MOE,)
    if ROUTER.name not in scopes:
        return (EXPERTS,)
    # Other dispatchers have nothing to do before they dispatch.
    if PREPROCESS.name in scopes and PREPROCESS.is_in(layer):
        return ROUTER, PREPROCESS, PERMUTED
    return ROUTER, ROUTED


def _in_turn(halves: Sequence[LayerPart]) -> Run:
    """Runs some halves, each on what the one before hands on."""
    if len(halves) == 1:
        return halves[0].run

    def run(layer: Any, before: Any, arguments: Mapping[str, Any]) -> Outputs:
        for half in halves:
            before = half.run(layer, before, arguments)
        out: Outputs = before
        return out

    return run


def _unsupported(layer: nn.Module, halves: Sequence[LayerPart]) -> str | None:
    """Why a layer cannot run some halves in graphs, or None."""
    return next((why for half in halves if (why := half.unsupported(layer)) is not None), None)


def _unsupported_whole(layer: nn.Module, halves: Sequence[LayerPart]) -> str | None:
    """Why a layer cannot be run in halves, some of them graphed, or None."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    forward = getattr(layer.forward, "__func__", layer.forward)
    if isinstance(layer, TransformerLayer) and forward is TransformerLayer.forward:
        return _unsupported(layer, halves)
    name = getattr(forward, "__qualname__", repr(forward))
    return f"its forward is {name} and not TransformerLayer.forward, so that its halves cannot be told apart"
