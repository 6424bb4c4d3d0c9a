# SPDX-License-Identifier: Apache-2.0
"""What of each layer is graphed, and what stays eager: the steps of a block, from the names of scopes.

A router that is told what to choose from the beginning leaves its experts eager behind graphed attention. One
that is told later is another state, whose capture leaves its layer out.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.bank.sites import EagerPart, JoinedSites, Outputs, SiteSpec
from megagraph.megatron import seams
from megagraph.megatron.scopes import moe
from megagraph.megatron.scopes.parts import DENSE, LayerPart, Run, delaying, run_layer, why_not_halved
from megagraph.megatron.watch import weakly
from megagraph.reasons import EagerReason, Why

__all__ = ["BlockPlan", "LayerStep"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerStep:
    """One step of a layer, or of several whole layers."""

    step: SiteSpec | EagerPart
    site: int | None  # its index among the sites, if it is one
    layer: int  # the place of the first one in the block
    run: Run  # eager, inside of the block
    num_layers: int = 1
    parts: Sequence[LayerPart] = ()  # none for all of the layer

    def run_late(self, layer: nn.Module) -> None:
        """Makes what gradients of weights its backward has left, the last part's first."""
        for part in reversed(self.parts):
            part.late(layer)

    def run_own(self, _layer: Any, before: Any, arguments: Mapping[str, Any]) -> Outputs:
        """Runs it in a block, on its own layer."""
        return self.run(self.step.module, before, arguments)

    def run_eager(self, before: Any, arguments: Mapping[str, Any]) -> Any:
        """Runs it on what the step before has handed on for a canonical pack.

        Megatron adds residuals with gradients switched on, also where the caller has them off.
        """
        out = self.run_own(None, before, arguments)
        if torch.is_grad_enabled():
            return out
        return out.detach() if isinstance(out, Tensor) else [each.detach() for each in out]


class BlockPlan:
    """The steps of a block, of which each layer has at most one site. Holds the layers weakly.

    `scopes` are names of parts; none, and all that a layer has, is whole layers.
    """

    def __init__(self, block: Any, scopes: Collection[str]) -> None:
        layers: Sequence[nn.Module] = [*block.layers]
        self._layers = [weakref.ref(layer) for layer in layers]
        self._context = _context_in(block)
        self.notes: list[str] = []  # what stays eager of layers that are graphed for the rest
        self.steps: list[LayerStep] = []
        # Sites that stay eager for what their layer is, or is not to be split into, by index.
        self.refused: dict[int, Why] = {}
        # By layer: what of it is graphed, or would be but for what is the matter, and whether the rest is run
        # apart.
        self._graphed: dict[int, tuple[Sequence[LayerPart], bool]] = {}
        self._kept_whole: dict[int, tuple[Sequence[LayerPart], bool]] = {}
        # Of some of these what stood in place of the layer's forward when it was last asked.
        self._asked: dict[int, list[Callable[[], Any]]] = {}
        for index, layer in enumerate(layers):
            self._add(index, layer, scopes)
        if scopes and not self.specs:
            self.steps.clear()
            for index, layer in enumerate(layers):
                self._keep_whole(index, layer, f"it has nothing that {', '.join(scopes)} would graph")

    @property
    def specs(self) -> list[SiteSpec]:
        """The sites among the steps."""
        return [step.step for step in self.steps if isinstance(step.step, SiteSpec)]

    def facing(self) -> tuple[Sequence[Sequence[int]], bool]:
        """Which memory two slots share where a schedule runs through the block both ways at once.

        By slot and site, and whether they share what is given back, as a bank takes it.
        """
        layers = [step.layer for step in self.steps if step.site is not None]
        # No pass waits for what a dense layer's neighbour dispatches, if attention's backward comes sooner.
        return [layers, [len(self._layers) - it for it in layers]], all(map(moe.EXPERTS.is_in, self.layers()))

    @property
    def why_eager(self) -> Why | None:
        """Why no layer can have a graph, of the first one; None if some may."""
        if {*self.refused} != {*range(len(self.specs))}:
            return None
        (reason, why), name = self.refused[0], self.specs[0].name
        return reason, f"no layer of it can be graphed; {name}: {why}"

    def layers(self) -> list[nn.Module]:
        """The layers that still exist."""
        return [layer for ref in self._layers if (layer := ref()) is not None]

    def walk(self, graphed: Collection[int]) -> dict[int, list[LayerStep]]:
        """The steps of each layer if these sites have graphs. A layer whose site has none is called whole."""
        found = {}
        for layer, neighbours in itertools.groupby(self.steps, key=lambda step: step.layer):
            found[layer] = steps = [*neighbours]
            eager = next((step for step in steps if step.site is not None and step.site not in graphed), None)
            if eager is not None:
                run = eager.run if eager.num_layers > 1 else run_layer
                found[layer] = [dataclasses.replace(eager, run=run, parts=())]
        return found

    def no_longer_graphed(self) -> Mapping[int, Why]:
        """Sites of layers that must not be split or graphed for what a host has set since, by index: why."""
        found: dict[int, Why] = {}
        for index, (parts, is_split) in self._graphed.items():
            layer = self._layers[index]()
            if layer is not None and (why := _unsupported(layer, parts, is_split)) is not None:
                steps = (it for it in self.steps if it.layer <= index < it.layer + it.num_layers)
                sites = (step.site for step in steps if step.site is not None)
                found.update(dict.fromkeys(sites, (EagerReason.SCOPE_UNSUPPORTED, why)))
        return found

    def may_graph_more(self) -> bool:
        """Whether nothing is the matter any more with a layer that was refused: a host has put it back.

        A forward that its halves cannot be told apart in is asked once, which costs some 100 us.
        """
        for index, (parts, is_split) in self._kept_whole.items():
            layer = self._layers[index]()
            if layer is None:
                continue
            own = vars(layer)
            forward = own.get("forward", type(layer).forward)
            now = [forward, own.get("_call_impl", 0), own.get("_compiled_call_impl", 0)]  # None is gone
            if [held() for held in self._asked.get(index, ())] == now:
                continue
            if _unsupported(layer, parts, is_split) is None:
                return True
            if is_split and why_not_halved(layer) is not None:
                self._asked[index] = [*map(weakly, now)]
        return False

    def keys(self) -> list[Callable[[], Any]]:
        """What is part of the state that graphs are captured in: how hosts tell routers what to choose."""
        graphed = itertools.chain(*(parts for parts, _is_split in self._graphed.values()))
        told = [seams.ROUTING.function, seams.EXPERT_CHOICE.function]
        return told if any(part.routes for part in graphed) else []

    def joined(self, borders: Collection[int], alone: Collection[int]) -> "BlockPlan":
        """The plan with neighbouring whole layers as one site from border to border, but those `alone`."""
        groups: list[list[LayerStep]] = []
        may_follow = False
        for step in self.steps:
            may_join = step.site is not None and not step.parts and step.site not in alone
            if may_join and may_follow and step.site not in borders:
                groups[-1].append(step)
            else:
                groups.append([step])
            may_follow = may_join
        plan = copy.copy(self)
        plan.steps, plan.refused = [], {}
        for steps in groups:
            sites = [step.site for step in steps if step.site is not None]
            site = len(plan.specs) if sites else None
            plan.steps.append(dataclasses.replace(_joined(steps), site=site))
            plan.refused.update({len(plan.specs) - 1: self.refused[it] for it in sites if it in self.refused})
        return plan

    def _add(self, index: int, layer: nn.Module, scopes: Collection[str]) -> None:
        parts = [part for part in (*DENSE, moe.EXPERTS) if part.is_in(layer)]
        if moe.EXPERTS in parts:  # as the last one
            parts[-1:] = self._parts_of_experts(index, layer, scopes, parts[:-1])
        graphed = [part for part in parts if not scopes or part.name in scopes]
        is_padded = moe.MOE in parts and not moe.has_grouped(layer)  # whose call keeps tensors
        is_split = bool(scopes) and (len(graphed) < len(parts) or is_padded)
        if scopes and not graphed:
            self._append(index, layer, is_site=False)
        elif (why := _unsupported(layer, graphed, is_split)) is not None:
            self._kept_whole[index] = graphed, is_split
            self._keep_whole(index, layer, why)
        else:
            self._graphed[index] = graphed, is_split
            if not is_split:
                self._append(index, layer, is_site=True)
                return
            for is_site, neighbours in itertools.groupby(parts, key=lambda part: part in graphed):
                self._append(index, layer, [*neighbours], is_site=is_site)

    def _parts_of_experts(
        self, index: int, layer: nn.Module, scopes: Collection[str], before: Sequence[LayerPart]
    ) -> Sequence[LayerPart]:
        """What the experts of a layer are; one eager part where a router cannot be graphed as named.

        Attention before it is graphed all the same; where there is none, the whole layer has to stay eager.
        """
        parts: Sequence[LayerPart] = moe.ROUTER, moe.ROUTED
        if moe.MOE.name in scopes or (moe.has_grouped(layer) and moe.ROUTER.name not in scopes):
            parts = (moe.MOE,)
        elif moe.ROUTER.name not in scopes:
            return (moe.EXPERTS,)
        elif moe.PREPROCESS.name in scopes and moe.PREPROCESS.is_in(layer):
            # Other dispatchers have nothing to do before they dispatch.
            parts = moe.ROUTER, moe.PREPROCESS, moe.PERMUTED
        named = [part.name for part in parts if part.name in scopes]
        is_split = named and any(part.name in scopes for part in before)
        why = moe.unsupported_routing(layer) if is_split else None
        if why is None:
            return parts
        reason = EagerReason.SCOPE_UNSUPPORTED.name
        self.notes.append(f"layer {index} ({type(layer).__name__}): {named[0]} stays eager ({reason}): {why}")
        return (moe.EXPERTS,)

    def _keep_whole(self, index: int, layer: nn.Module, why: str) -> None:
        """Adds a layer as a site that never has graphs."""
        self.refused[len(self.specs)] = EagerReason.SCOPE_UNSUPPORTED, why
        self._append(index, layer, is_site=True)

    def _append(
        self, index: int, layer: nn.Module, parts: Sequence[LayerPart] = (), *, is_site: bool
    ) -> None:
        """Adds a layer, or neighbouring parts, of which the last may hand out several tensors, as a step."""
        names = " and ".join(part.name for part in parts)
        name = f"{names and f'{names} of '}layer {index} ({type(layer).__name__})"
        run = _in_turn([part.run for part in parts]) if parts else run_layer
        step: SiteSpec | EagerPart
        if is_site:
            modules = dict(layer.named_modules(remove_duplicate=False))
            children = [child for part in parts for child in part.children(layer) if child in modules]
            routes = any(part.routes for part in parts) if parts else moe.has_grouped(layer)
            step = SiteSpec(
                name=name,
                module=layer,
                forward=self._alone(run),
                parts=children,
                transient=_transient(layer, parts[-1]) if parts else (),
                **({"state": moe.read_by_routers} if routes else {}),
            )
        else:
            step = EagerPart(name=name, module=layer, forward=self._alone(run))
        site = len(self.specs) if is_site else None
        self.steps.append(LayerStep(step=step, site=site, layer=index, run=run, parts=parts))
        if isinstance(step, SiteSpec) and delaying(step.modules()):
            step.finish, step.forget = self.steps[-1].run_late, _forget_delayed

    def _alone(self, run: Run) -> Callable[..., Any]:
        """Runs a step as in its block."""
        context = self._context

        @functools.wraps(run)
        def forward(layer: nn.Module, before: Any, **arguments: Any) -> Any:
            with context():
                return run(layer, before, arguments)

        return forward


def _context_in(block: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """What a capture, which runs layers without their block, enters around each for it.

    In a TransformerBlock under sequence parallelism that is a random stream of each rank. If streams are
    generators, the block puts that one in the default generator's place, and a graph keeps the one it was
    captured with. Saved states are written into the default one, from which graphs draw in any case.
    """
    from megatron.core.tensor_parallel.random import is_graph_safe_cuda_rng_tracker as is_safe

    if not block.config.sequence_parallel or not isinstance(block, seams.BLOCK_FORWARD.owner()):
        return contextlib.nullcontext

    def own_stream() -> Any:
        tracker = seams.RNG_TRACKER.function()()
        return tracker.fork() if is_safe(tracker) else contextlib.nullcontext()

    return own_stream


def _joined(steps: Sequence[LayerStep]) -> LayerStep:
    """Some whole layers as one step."""
    if len(steps) == 1:
        return steps[0]
    sites = [step.step for step in steps if isinstance(step.step, SiteSpec)]
    first, last = steps[0].layer, steps[-1].layer
    site = JoinedSites(name=f"layers {first} to {last}", sites=sites)
    run = _in_turn([step.run_own for step in steps])
    return dataclasses.replace(steps[0], step=site, run=run, num_layers=last - first + 1)


def _in_turn(runs: Sequence[Run]) -> Run:
    """Runs some parts or layers, each on what the one before hands on."""

    def run(layer: Any, before: Outputs, arguments: Mapping[str, Any]) -> Outputs:
        for each in runs:
            before = each(layer, before, arguments)
        return before

    return run if len(runs) > 1 else runs[0]  # no call more in each micro-batch


def _transient(layer: nn.Module, last: LayerPart) -> Sequence[int]:
    """Which outputs of a site nobody reads any more once what is behind it has run."""
    if not _is_planned(layer):
        return last.transient(layer)
    # Nodes of a plan keep what they were given until their backward, but for what is dispatched.
    return [at for at in last.transient(layer) if at in moe.DISPATCHED] if moe.is_freed(layer) else ()


def _forget_delayed(layer: nn.Module) -> None:
    """Drops what modules of a layer have queued for late gradients. Call it where nobody will ask for it."""
    for module in delaying(layer.modules()):
        module.wgrad_store.context.queue.clear()


def _is_planned(layer: nn.Module) -> bool:
    """Whether nodes of a plan run it; a layer that is not Megatron's may have no config."""
    return bool(getattr(getattr(layer, "config", None), "overlap_moe_expert_parallel_comm", False))


def _unsupported(layer: nn.Module, parts: Sequence[LayerPart], is_split: bool) -> str | None:
    """Why a layer cannot run some parts in graphs, apart from the rest if it is split; or None."""
    if _is_planned(layer) and seams.is_replaced(layer, seams.LAYER_FORWARD):
        return f"expert-parallel overlap does not run its forward, {seams.called_name(layer.forward)}"
    if not _is_planned(layer) and delaying(layer.modules()):
        return "it leaves gradients of weights to be made later, without expert-parallel overlap"
    why = why_not_halved(layer) if is_split else None
    return why or next(filter(None, (part.check(layer) for part in parts)), None)
