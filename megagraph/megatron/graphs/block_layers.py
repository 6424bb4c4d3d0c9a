# SPDX-License-Identifier: Apache-2.0
"""The layers of one model's block: their steps, what is watched of them, and which no graph can replace."""

import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from megagraph.bank.capture import MaxOverRanks
from megagraph.bank.eligibility import ineligible_sites
from megagraph.bank.sites import JoinedSites, SiteSpec
from megagraph.decide.reasons import EagerReason
from megagraph.megatron.graphs.while_capturing import block_context
from megagraph.megatron.parallel.ddp import accumulator_hooks, is_ddp_hook
from megagraph.megatron.parallel.groups import ModelGroups
from megagraph.megatron.scopes.moe import forget_calls
from megagraph.megatron.scopes.plan import BlockPlan
from megagraph.megatron.watch import LayerWatch, keys_of

__all__ = ["BlockLayers"]


class BlockLayers:
    """The layers that a block has, or had when it was last looked at.

    Args:
        model: the GPTModel or HybridModel, which must not be kept alive.
        scopes: which halves of each layer are graphed; none for whole layers.
        groups: the model's process groups.

    Attributes:
        plan: the steps of the layers, of which several whole ones may be joined.
        num_sites: how many sites there are while none are joined.
    """

    plan: BlockPlan
    num_sites: int

    def __init__(self, model: weakref.ref[nn.Module], scopes: Collection[str], groups: ModelGroups) -> None:
        self._model = model
        self._scopes = scopes
        self._groups = groups
        # Of graphs, for what may be another thing at the next capture.
        self._kept_out: Mapping[int, tuple[EagerReason, str]] = {}
        self._seen: list[weakref.ref[nn.Module]] = []
        self.follow()

    def _live(self) -> Any:
        model = self._model()
        assert model is not None
        return model

    def forget_calls(self) -> None:
        """Drops what layers keep of calls whose backward will not come."""
        forget_calls(self._live().decoder.layers)

    def follow(self) -> bool:
        """Looks at the block. Returns whether it has other layers than before."""
        model: Any = self._model()
        block = model.decoder
        now = list(map(weakref.ref, block.layers))
        if now == self._seen:
            return False
        self._seen = now
        self._each = self.plan = BlockPlan(list(block.layers), self._scopes, block_context(block))
        self.num_sites = len(self.plan.specs)
        return True

    def part(self) -> None:
        """Makes each layer a step of its own again."""
        self.plan = self._each

    def join(self, borders: Collection[int], alone: Collection[int]) -> None:
        """Makes one site of neighbouring whole layers, as `BlockPlan.joined()` does."""
        self.plan = self._each.joined(borders, alone)

    @property
    def are_joined(self) -> bool:
        """Whether some site is of several layers."""
        return len(self.specs) < self.num_sites

    @property
    def places(self) -> list[range]:
        """Of each site those that it is made of, as they count while none are joined."""
        sizes = (len(spec.sites) if isinstance(spec, JoinedSites) else 1 for spec in self.specs)
        ends = [*itertools.accumulate(sizes, initial=0)]
        return [range(*pair) for pair in itertools.pairwise(ends)]

    @property
    def specs(self) -> Sequence[SiteSpec]:
        """The sites of the layers."""
        return self.plan.specs

    @property
    def notes(self) -> Sequence[str]:
        """What stays eager of layers that are graphed for the rest, in words."""
        return self.plan.notes

    def new_watch(self, stay_eager: Collection[int] = ()) -> LayerWatch:
        """Watches them from now on.

        Args:
            stay_eager: those, by index, whose state does not matter.
        """
        model = self._model
        return LayerWatch(
            self.specs,
            self._live().decoder,
            keys=lambda: [*keys_of(live), *self.plan.keys()] if (live := model()) is not None else [],
            is_expected_hook=is_ddp_hook,
            stay_eager=stay_eager,
        )

    def find_ineligible(self, ddp: nn.Module | None) -> Mapping[int, tuple[EagerReason, str]]:
        """Those that no graph can replace, by index: the reason, and what was found.

        Args:
            ddp: Megatron's DDP around the model, or None.
        """
        outside = [
            param
            for name, module in self._live().named_children()
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
            accumulator_hooks=accumulator_hooks(ddp),
        )
        return {**found, **self._kept_out_now(), **self.plan.refused}

    def _kept_out_now(self) -> Mapping[int, tuple[EagerReason, str]]:
        return {**self.plan.no_longer_graphed(), **self._groups.refused(self.specs)}

    def ineligible_in_group(
        self, ddp: nn.Module | None, max_over_ranks: MaxOverRanks
    ) -> Mapping[int, tuple[EagerReason, str]]:
        """Those that some rank of the group cannot graph.

        Args:
            ddp: Megatron's DDP around the model, or None.
            max_over_ranks: asks the ranks.
        """
        here = self.find_ineligible(ddp)
        self._kept_out = self._kept_out_now()
        anywhere = max_over_ranks([int(index in here) for index in range(len(self.specs))])
        disagreed = EagerReason.GROUP_DISAGREED, "another rank of the group cannot graph it"
        return {index: here.get(index, disagreed) for index, found in enumerate(anywhere) if found}

    def are_kept_out_otherwise(self, max_over_ranks: MaxOverRanks) -> bool:
        """Whether other layers than before the first capture must not be in a graph, or not be split.

        For groups that they hold, or forwards that a host has set.

        Args:
            max_over_ranks: asks the ranks.
        """
        (somebodys,) = max_over_ranks([int(self._kept_out_now() != self._kept_out)])
        return bool(somebodys)
