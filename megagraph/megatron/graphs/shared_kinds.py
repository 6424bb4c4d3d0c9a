# SPDX-License-Identifier: Apache-2.0
"""Kinds of micro-batches where packs are of several context-parallel sizes: what all ranks capture.

Each rank has met other sizes, and communicators in graphs want all ranks to capture the same. So what one has
met in one size, all capture in every size.

Inside of a step nobody votes: ranks that share a pack read the same one and decide alike, and others have
other packs, be it more or fewer of them.
"""

import json
from collections.abc import Iterable
from typing import Any

from megagraph.decide.dispatch import PackForm, VariantKey
from megagraph.log import log
from megagraph.megatron.parallel.peers import Peers

__all__ = ["SharedKinds"]

_WAITS, _WITHOUT = "waits", "-"  # cannot capture; cannot where gradients are recorded
_PATIENCE = 20  # steps in which another rank cannot capture until this one says so


class SharedKinds:
    """What is due on any rank, in every size.

    Args:
        peers: the ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers, self._context = peers, peers.context
        self._waited = 0  # steps in a row

    def of_all(self, due: Iterable[VariantKey], *, can_capture: bool, has_gradients: bool) -> set[VariantKey]:
        """Kinds that all capture now. Every rank asks equally often.

        Args:
            due: here.
            can_capture: this rank can; where one cannot, nothing is due.
            has_gradients: main gradients have memory; where those of one rank have none, none of the kinds
                is due that record gradients.
        """
        can_capture = can_capture and self._context.is_whole
        here = (_said(due) if has_gradients else _WITHOUT + _said(due)) if can_capture else _WAITS
        said = self._peers.gather(here)
        waiting = [rank for rank, kinds in enumerate(said) if kinds == _WAITS]
        wanted = [kinds.removeprefix(_WITHOUT) for kinds in said if kinds != _WAITS]
        self._waited = self._waited + 1 if waiting and any(wanted) and can_capture else 0
        if self._waited == _PATIENCE:
            log.warning(
                "a capture has waited for %d steps: rank %s of those that may share packs cannot capture. "
                "It has run no pack yet, or something holds its graphs, or its memory or a group is away",
                _PATIENCE,
                ", ".join(map(str, waiting)),
            )
        if waiting:
            return set()
        return {
            kind.replace(cp_size=size)
            for kinds in wanted
            for kind in (_kind_of(values) for values in json.loads(kinds or "[]"))
            for size in self._context.sizes
            if not kind.grad or not any(each.startswith(_WITHOUT) for each in said)
        }


def _said(kinds: Iterable[VariantKey]) -> str:
    ordered = sorted(kinds)
    return (
        json.dumps([{**kind.as_dict(), "form": kind.form.as_dict()} for kind in ordered]) if ordered else ""
    )


def _kind_of(values: dict[str, Any]) -> VariantKey:
    return VariantKey(**{**values, "form": PackForm(**values["form"])})
