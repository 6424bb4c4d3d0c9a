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
import functools
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import distributed, nn

from megagraph import _C
from megagraph.log import log
from megagraph.megatron.parallel.context import ContextRanks
from megagraph.megatron.parallel.groups import COLLECTIONS
from megagraph.megatron.parallel.sharing import counted_as_shared_by, unsupported_dynamic_sharing
from megagraph.megatron.seams import router_losses_count_ranks

__all__ = ["ContextView"]

# Of a module: its group; a router's, over which it adds up its losses; and beside the group of Transformer
# Engine's attention, its ranks in the job and a stream.
_GROUP, _OF_LOSSES, _RANKS, _STREAM = "cp_group", "tp_cp_group", "cp_global_ranks", "cp_stream"
_OF_MODULES = (_GROUP, _OF_LOSSES, _RANKS, _STREAM)
# Of a config: the number of ranks, and how much routers' losses weigh.
_SIZE, _WEIGHTS = "context_parallel_size", ("moe_aux_loss_coeff", "moe_z_loss_coeff")


class ContextView:
    """Shows a model the ranks that share a micro-batch. Does nothing where all packs are shared alike.

    Args:
        model: a GPTModel or HybridModel; held weakly.
        ranks: its context-parallel ranks.
        left_out: attributes that change without a meaning for it.

    Raises:
        ValueError: for what would not look where this shows them, naming it.
    """

    def __init__(self, model: nn.Module, ranks: ContextRanks, left_out: Collection[str] = ()) -> None:
        self._ranks, self._left_out = ranks, left_out
        self._model = weakref.ref(model)
        self.is_on = ranks.is_dynamic
        self._shows_others = ranks.sizes != (ranks.size,)
        # csrc/watch/state_watch.h, Note [State]: while the model's is as it was, so are the next two.
        self._watch: _C.StateWatch | None = None
        self._state = 0
        self._places: Sequence[tuple[Any, str]] = ()
        self._unsupported: str | None = None
        self._stream: torch.cuda.Stream | None = None
        self.follow()
        config: Any = model.config
        if self._shows_others and not config.calculate_per_token_loss:
            log.warning(
                "cp_sizes: losses are means of micro-batches (calculate_per_token_loss=False): packs weigh "
                "alike however many tokens they hold"
            )

    def follow(self) -> None:
        """Looks for modules, and what they look in, that were replaced since. Before steps.

        Raises:
            ValueError: as the constructor does.
        """
        model = self._model()
        if model is None or not self.is_on:
            return
        if self._watch is None or self._watch.now(True) != self._state:
            self._look(model)
        if self._shows_others:
            self._check()

    def _look(self, model: Any) -> None:
        modules = [weakref.ref(module) for module in model.modules()]
        block = weakref.ref(model.decoder)
        watch = _C.StateWatch(modules, block, self._left_out, lambda _hook: True, [])
        self._places = list(_places_in(model))
        self._unsupported = unsupported_dynamic_sharing(model)
        self._watch, self._state = watch, watch.now(True)

    def _check(self) -> None:
        if self._unsupported is not None:
            raise ValueError(
                "cp_sizes: expected a model that can run packs of several context-parallel sizes, got "
                f"{self._unsupported}"
            )

    def refuse(self, what: str) -> None:
        """Raises `ValueError` for a model that graphs do not take, where eager may not see its ranks.

        Args:
            what: keeps it eager, in words.
        """
        if self.is_on and self._shows_others:
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
        with self._showing(cp_size, self._ranks.of_size(cp_size), leaves_metrics=False):
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
    def _showing(
        self, cp_size: int, group: distributed.ProcessGroup | None, *, leaves_metrics: bool = True
    ) -> Iterator[None]:
        if not self.is_on or self._ranks.are_own(cp_size, group):
            yield
            return
        self._check()
        shown = _alone() if cp_size == 1 else group
        if shown is None or shown.size() != cp_size:
            found = "none" if shown is None else f"one of {shown.size()} ranks"
            raise ValueError(f"expected a cp_group of local_cp_size {cp_size}, got {found}")
        times = cp_size / self._ranks.size
        found_owners = ((_owner(held), name) for held, name in self._places)
        owners = [(vars(owner), name) for owner, name in found_owners if owner is not None]
        before = [values[name] for values, name in owners]
        try:
            for values, name in owners:
                values[name] = self._value(name, values[name], shown, times)
            losses = (value for (_, name), value in zip(owners, before, strict=True) if name == _OF_LOSSES)
            own = next((group for group in losses if group is not None), None)
            counted = counted_as_shared_by(own, shown, times if leaves_metrics else 1)
            with contextlib.nullcontext() if own is None else counted:
                yield
        finally:
            for (values, name), value in zip(owners, before, strict=True):
                values[name] = value

    def _value(self, name: str, value: Any, shown: distributed.ProcessGroup, times: float) -> Any:
        if name == _SIZE:
            return shown.size()
        if name in _WEIGHTS:
            return _scaled(value, times)
        if name == _RANKS:
            return distributed.get_process_group_ranks(shown) if shown.size() > 1 else None
        if name == _STREAM:
            return self._second_stream() if shown.size() > 1 else None
        return shown

    def _second_stream(self) -> torch.cuda.Stream:
        """Beside the one that a module runs on: for attention of other ranks' keys."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream


def _owners_in(module: nn.Module) -> Iterator[tuple[Any, Collection[str]]]:
    """What a module may look for ranks in, and under which names."""
    values = vars(module)
    yield module, _OF_MODULES
    for name in COLLECTIONS:
        yield values.get(name), ("cp",)
    config = values.get("config")
    weighs = getattr(config, "calculate_per_token_loss", False) and not router_losses_count_ranks()
    yield config, (_SIZE, *_WEIGHTS) if weighs else (_SIZE,)


def _places_in(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Where modules look for the ranks, each place once: groups, and their number."""
    met: set[tuple[int, str]] = set()
    for module in model.modules():
        for owner, names in _owners_in(module):
            for name in names:
                if name in getattr(owner, "__dict__", ()) and (id(owner), name) not in met:
                    met.add((id(owner), name))
                    yield _held(owner), name


def _scaled(weight: Any, times: float) -> Any:
    """Of one loss, of several, or of none."""
    if weight is None:
        return None
    return [each * times for each in weight] if isinstance(weight, list) else weight * times


def _held(owner: Any) -> Any:
    """A weak reference, or itself where there can be none, as to a host's own config."""
    try:
        return weakref.ref(owner)
    except TypeError:
        return owner


def _owner(held: Any) -> Any:
    return held() if isinstance(held, weakref.ref) else held


@functools.cache
def _alone() -> distributed.ProcessGroup:
    """A group of this rank, for what asks for its size and its place and no more."""
    return distributed.ProcessGroup(0, 1)  # type: ignore[call-arg]  # torch's own, which stubs do not show
