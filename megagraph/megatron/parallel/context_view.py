# SPDX-License-Identifier: Apache-2.0
"""What the modules of a model take for the ranks that share a pack, while a micro-batch runs.

Note [View of a micro-batch]
Released layers know one context-parallel group, the model's own. Attention rotates by it whoever shares the
pack, multi-latent attention cuts its rotary tables by the config's number of ranks and refuses packs that
name their own. So while a micro-batch of some ranks runs, eager or in a capture, these stand wherever a
module looks for the model's group, and the pack names none. Afterwards everything is as before, after an
error, too.
What runs in the backward does not look there: ops keep the group they ran with, and recomputing is refused.
"""

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any

from torch import distributed, nn

from megagraph.megatron.parallel.context import ContextRanks
from megagraph.modules import VarlenAttention

__all__ = ["ContextView"]

_COLLECTIONS = ("pg_collection", "_pg_collection")
_SIZE = "context_parallel_size"


class ContextView:
    """Shows a model the ranks that share a micro-batch. Does nothing where all packs are shared alike.

    Args:
        model: a GPTModel or HybridModel; held weakly.
        ranks: its context-parallel ranks.

    Raises:
        ValueError: for what would not look where this shows them, naming it.
    """

    def __init__(self, model: nn.Module, ranks: ContextRanks) -> None:
        self._ranks = ranks
        self._model = weakref.ref(model)
        self.is_on = ranks.is_dynamic
        self._places: list[tuple[weakref.ref[Any], str]] = []
        self.follow()

    def follow(self) -> None:
        """Looks for modules that were replaced since. Before steps.

        Raises:
            ValueError: as the constructor does.
        """
        model = self._model()
        if model is not None and any(size != self._ranks.size for size in self._ranks.sizes):
            _check(model)
            self._places = [(weakref.ref(owner), name) for owner, name in _places_in(model)]

    def refuse(self, what: str) -> None:
        """Raises `ValueError` for a model that graphs do not take, where eager may not see its ranks.

        Args:
            what: keeps it eager, in words.
        """
        if self._places:
            raise ValueError(f"cp_sizes: expected a model that graphs take, got: {what}")

    def of_layers(self, params: Any) -> Any:
        """A pack as layers get it: without ranks of its own, which they see all around.

        Args:
            params: `PackedSeqParams`, or None.
        """
        if not self.is_on or params is None:
            return params
        plain = copy.copy(params)
        plain.local_cp_size = plain.cp_group = None
        return plain

    @contextlib.contextmanager
    def of_size(self, cp_size: int) -> Iterator[None]:
        """Around what runs for ranks of the model's group of a size."""
        with self._showing(cp_size, self._ranks.of_size(cp_size)):
            yield

    @contextlib.contextmanager
    def of_pack(self, params: Any) -> Iterator[None]:
        """Around a model that runs a pack, by the ranks that it names.

        Args:
            params: `PackedSeqParams` as given, or None.
        """
        size = getattr(params, "local_cp_size", None)
        with self._showing(self._ranks.size if size is None else size, getattr(params, "cp_group", None)):
            yield

    @contextlib.contextmanager
    def _showing(self, cp_size: int, group: distributed.ProcessGroup | None) -> Iterator[None]:
        is_own = cp_size == 1 or group is None or group is self._ranks.own_group()
        if not self.is_on or (cp_size == self._ranks.size and is_own):
            yield
            return
        if not self._places:
            raise ValueError(f"expected packs of cp_sizes {self._ranks.sizes}, got one of {cp_size} ranks")
        shown = _alone() if cp_size == 1 else group
        if shown is None or shown.size() != cp_size:
            found = "none" if shown is None else f"one of {shown.size()} ranks"
            raise ValueError(f"expected a cp_group of local_cp_size {cp_size}, got {found}")
        owners = [(vars(owner), name) for place, name in self._places if (owner := place()) is not None]
        before = [values[name] for values, name in owners]
        try:
            for values, name in owners:
                values[name] = cp_size if name == _SIZE else shown
            yield
        finally:
            for (values, name), value in zip(owners, before, strict=True):
                values[name] = value


def _alone() -> distributed.ProcessGroup:
    """A group of this rank, for what asks for its size and its place and no more."""
    return distributed.ProcessGroup(0, 1)  # type: ignore[call-arg]  # torch's own, which stubs do not show


def _places_in(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Where modules look for the ranks, each place once: groups, and their number."""
    met: set[int] = set()
    for module in model.modules():
        collections = [vars(module).get(name) for name in _COLLECTIONS]
        for owner, name in (
            *((collection, "cp") for collection in collections),
            (module, "cp_group"),
            (getattr(module, "config", None), _SIZE),
        ):
            if owner is not None and id(owner) not in met and name in vars(owner):
                met.add(id(owner))
                yield owner, name


def _check(model: nn.Module) -> None:
    """Names the first thing that does not look for its ranks where others do."""
    config: Any = model.config
    cores = (getattr(module, "core_attention", None) for module in model.modules())
    others = sorted({type(core).__name__ for core in cores if not isinstance(core, VarlenAttention | None)})
    found = {
        **{f"attention of class {name}": True for name in others},
        "Mamba layers": any(hasattr(module, "mixer") for module in model.modules()),
        "experts": getattr(config, "num_moe_experts", None) is not None,
        "multi-token prediction": getattr(model, "mtp", None) is not None,
        f"recompute_granularity={config.recompute_granularity!r}": config.recompute_granularity is not None,
    }
    for name, is_there in found.items():
        if is_there:
            raise ValueError(
                "cp_sizes: expected a model that can run packs of several context-parallel sizes (dense "
                f"layers with megagraph's VarlenAttention, nothing recomputed), got {name}"
            )
