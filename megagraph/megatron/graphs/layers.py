# SPDX-License-Identifier: Apache-2.0
"""The layers of one model's block: their sites, which of these no graph can replace, and which are joined.

Note [Joining]
With `cuda_graph_granularity="chunk"` neighbouring whole layers are one site, with one graph for each pass.
They are joined before the first capture of a bank, as far as each can be graphed, and up to where a bucket of
gradients ends that is reduced in the backward pass, or gathered in the forward pass.
A site of several layers that cannot be captured, or is wrong, says nothing of the layer at fault. So its
layers are captured again one by one, which names those at fault; these stay eager, and what is left is joined
once more. Where no layer fails by itself they stay apart.
"""

import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from megagraph.bank.sites import SiteSpec, ineligible_sites
from megagraph.config import GraphConfig
from megagraph.decide.reasons import EagerReason, Why
from megagraph.log import log
from megagraph.megatron.graphs.entry import Entries
from megagraph.megatron.graphs.refusals import scopes_of
from megagraph.megatron.parallel.ddp import accumulator_hooks, borders_of, is_ddp_hook
from megagraph.megatron.parallel.groups import refused_for_groups
from megagraph.megatron.parallel.peers import Peers
from megagraph.megatron.scopes.parts import delaying
from megagraph.megatron.scopes.plan import BlockPlan
from megagraph.megatron.seams import called_name
from megagraph.megatron.watch import LayerWatch, keys_of, weakly

__all__ = ["BlockLayers", "found_anywhere"]


def found_anywhere(
    peers: Peers, found: Mapping[int, Why], num_sites: int, elsewhere: str
) -> Mapping[int, Why]:
    """Sites, by index, of which some rank of the group has found something; `elsewhere` if not this one."""
    anywhere = peers.max_over_ranks([int(index in found) for index in range(num_sites)])
    disagreed = EagerReason.GROUP_DISAGREED, elsewhere
    return {index: found.get(index, disagreed) for index, is_found in enumerate(anywhere) if is_found}


class BlockLayers:
    """The layers that a block has, or had when it was last looked at. Keeps no model alive."""

    plan: BlockPlan  # their steps, of which several whole ones may be joined
    num_sites: int  # while none are joined

    def __init__(
        self, model: nn.Module, ddp: nn.Module | None, peers: Peers, config: GraphConfig, entries: Entries
    ) -> None:
        self._model = weakref.ref(model)
        self.ddp = weakly(ddp)  # Megatron's DDP around the model, as far as it is known and alive
        self._peers, self.entries = peers, entries
        # What of each layer is graphed; none for whole layers.
        self.scopes = scopes_of(model, config.cuda_graph_modules)
        self._joins = config.cuda_graph_granularity == "chunk"
        self._apart: set[int] = set()  # layers whose site of several has failed
        # By name those whose graph was wrong, or that were at fault for one of several. No other is made:
        # what is captured after memory has moved may have no micro-batch to be compared on.
        self._wrong: dict[str, Why] = {}
        self._has_said_why = False
        # Of graphs, for what may be another thing at the next capture.
        self._kept_out: Mapping[int, Why] = {}
        self._seen: list[weakref.ref[nn.Module]] = []
        self.follow()

    @property
    def model(self) -> Any:
        """The model, which lives as long as somebody calls it."""
        model = self._model()
        assert model is not None
        return model

    @property
    def specs(self) -> Sequence[SiteSpec]:
        """The sites of the layers."""
        return self.plan.specs

    def follow(self) -> bool:
        """Looks at the block. Returns whether it has other sites than before, or may have graphs of more."""
        model: Any = self._model()
        block = model.decoder
        now = list(map(weakref.ref, block.layers))
        has_others = now != self._seen
        if has_others or self.plan.may_graph_more():
            self._seen = now
            self._each = self.plan = BlockPlan(block, self.scopes)
            self.num_sites = len(self.specs)
            self._apart.clear()
            if has_others:
                self._wrong.clear()
            return True
        if self.plan is not self._each and not self.entries.are_megatrons:
            self.plan = self._each
            return True
        return False

    def new_watch(self, stay_eager: Collection[int] = ()) -> LayerWatch:
        """Watches them from now on, but for the state of those that stay eager, by index."""
        model = self._model
        return LayerWatch(
            self.specs,
            self.model.decoder,
            keys=lambda: [*keys_of(live), *self.plan.keys()] if (live := model()) is not None else [],
            is_expected_hook=is_ddp_hook,
            stay_eager=stay_eager,
        )

    # -- which stay eager ------------------------------------------------------------------------

    def find_ineligible(self) -> Mapping[int, Why]:
        """Those that no graph can replace, by index: the reason, and what was found."""
        outside = [
            param
            for name, module in self.model.named_children()
            if name != "decoder"
            for param in module.parameters()
        ]
        outside += [
            param for module in self.plan.eager_modules() for param in module.parameters(recurse=False)
        ]
        found = ineligible_sites(
            self.specs,
            other_params=outside,
            is_expected_hook=is_ddp_hook,
            accumulator_hooks=accumulator_hooks(self.ddp()),
        )
        return {**found, **self._kept_out_now(), **self.plan.refused}

    def _kept_out_now(self) -> Mapping[int, Why]:
        return {
            **self.plan.no_longer_graphed(),
            **self._with_late_hooks(),
            **refused_for_groups(self.specs, self._peers.same_pack(), self.model),
        }

    def _with_late_hooks(self) -> Mapping[int, Why]:
        """Those whose late gradients somebody but DDP waits for."""
        return {
            index: (EagerReason.FOREIGN_HOOK, f"hook {called_name(hook)} on gradients that come late")
            for index, spec in enumerate(self.specs)
            for module in (delaying(spec.modules()) if spec.finish is not None else ())
            for hook in getattr(module, "wgrad_accumulation_and_reduce_hooks", ())
            if not is_ddp_hook(hook)
        }

    def ineligible_in_group(self) -> Mapping[int, Why]:
        """Those that some rank of the group cannot graph, or that were found to be at fault before."""
        here = self.find_ineligible()
        self._kept_out = self._kept_out_now()
        elsewhere = "another rank of the group cannot graph it"
        ineligible = found_anywhere(self._peers, here, len(self.specs), elsewhere)
        named = enumerate(spec.name for spec in self.specs)
        return {**ineligible, **{index: self._wrong[name] for index, name in named if name in self._wrong}}

    def are_kept_out_otherwise(self) -> bool:
        """Whether other layers than before the first capture must be in no graph, here or on another rank."""
        (somebodys,) = self._peers.max_over_ranks([int(self._kept_out_now() != self._kept_out)])
        return bool(somebodys)

    # -- which are joined ------------------------------------------------------------------------

    @property
    def _places(self) -> list[range]:
        """Of each site those that it is made of, as they count while none are joined."""
        ends = [*itertools.accumulate((spec.calls for spec in self.specs), initial=0)]
        return [range(*pair) for pair in itertools.pairwise(ends)]

    def join(self) -> None:
        """Before the first capture of a bank: joins neighbouring whole layers, if so configured."""
        if not self._joins:
            return
        self.plan = self._each
        left = self.ineligible_in_group()
        if self.entries.are_megatrons:
            borders = borders_of(self.ddp(), self.specs)
            joined = self._each.joined(borders, {*left, *self._apart})
            if len(joined.specs) < self.num_sites:
                self.plan = joined
        if self.plan is self._each and self.num_sites > 1 and not self._has_said_why:
            self._has_said_why = True
            log.warning("cuda_graph_granularity='chunk' joins no layers: %s", self._why_apart())

    def _why_apart(self) -> str:
        if not self.entries.are_megatrons:
            return "a forward that overrides Megatron's calls them one by one"
        if not any(step.is_whole for step in self.plan.steps):
            return "cuda_graph_modules leaves something eager in each of them"
        return "each stands by itself between buckets of gradients, or between layers that stay eager"

    def are_to_join_otherwise(self, failed: Mapping[int, Why]) -> bool:
        """Learns which sites failed, by index, and why. Returns whether others are to be captured."""
        places = self._places
        of_several = {place for index in failed if len(places[index]) > 1 for place in places[index]}
        at_fault = {index: why for index, why in failed.items() if places[index].start in self._apart}
        if at_fault:
            self.keep_out(at_fault)
            self._apart.clear()
        self._apart |= of_several
        return bool(of_several or at_fault)

    def keep_out(self, wrong: Mapping[int, Why]) -> None:
        """Has sites, by index, stay eager in every capture to come, for these reasons."""
        self._wrong |= {self.specs[it].name: why for it, why in wrong.items()}
