# SPDX-License-Identifier: Apache-2.0
"""Kinds of micro-batches where packs are of several context-parallel sizes: what all ranks capture.

Each rank has met other sizes, and communicators in graphs want all ranks to capture the same. So what one has
met in one size, all capture in every size.
"""

import json
from collections.abc import Iterable
from typing import Any

from megagraph.megatron.graphs.micro_batch import Kind
from megagraph.megatron.parallel.peers import Peers
from megagraph.packs.packing import PackForm

__all__ = ["kinds_of_all"]

_WAITS = "waits"


def kinds_of_all(due: Iterable[Kind], peers: Peers, *, can_capture: bool) -> set[Kind]:
    """What is due on any rank, in every size. Every rank asks equally often.

    Args:
        due: here.
        peers: the ranks.
        can_capture: this rank can; where one cannot, nothing is due.
    """
    said = peers.gather(_said(due) if can_capture else _WAITS)
    if _WAITS in said:
        return set()
    return {
        kind._replace(cp_size=size)
        for kinds in said
        for kind in (_kind_of(values) for values in json.loads(kinds or "[]"))
        for size in peers.context.sizes
        if size == 1 or not kind.rows_are_positions  # which no shared pack is
    }


def _said(kinds: Iterable[Kind]) -> str:
    # What a host says of padding in another way is said on no other rank.
    plain = (kind for kind in kinds if kind.form.pad_between_seqs in (None, True, False))
    ordered = sorted(plain, key=repr)
    return json.dumps([[[*kind.form], *kind[1:]] for kind in ordered]) if ordered else ""


def _kind_of(values: list[Any]) -> Kind:
    form, *further = values
    return Kind(PackForm(*form), *further)
