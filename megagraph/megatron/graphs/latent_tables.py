# SPDX-License-Identifier: Apache-2.0
"""Keeps the rotary tables that multi-latent attention asks for inside of its layers.

Each such attention has an embedding of its own and asks it for a table in every call, by the `max_seqlen` of
its pack. The answer comes from a cache of 32 tables over all layers and models: one that was dropped is made
anew, and the memory of the old one is somebody else's. So no graph may read a table that the cache alone
holds, and none may be made in a capture, whose memory the cache would hand to eager calls. While layers are
warmed up and captured, their embeddings answer with tables that live as long as the graphs.
"""

import contextlib
import weakref
from collections.abc import Callable, Container, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.megatron.seams import MLA_ATTENTION

__all__ = ["LatentTables"]

# The angles; with fused RoPE of YaRN, cosines and sines of them, out of buffers that a longer pack replaces.
_ANGLES, _COSINES = "forward", "get_cached_cos_sin"


def _embeddings(block: nn.Module) -> list[nn.Module]:
    """Those of every multi-latent attention inside; one that several share, once."""
    mla = MLA_ATTENTION.owner()
    found: dict[nn.Module, None] = {}
    for module in block.modules():
        if isinstance(module, mla) and isinstance(module.rotary_pos_emb, nn.Module):
            found[module.rotary_pos_emb] = None
    return [*found]


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two answers are the same: a table, one and YaRN's scale, or two."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return type(one) is type(other) and bool(one == other)


@contextlib.contextmanager
def _put_back(embedding: nn.Module) -> Iterator[None]:
    """Puts an embedding's buffers and attributes back behind a question.

    New ones would be a change in a layer that is being captured. What it caches is no matter of graphs, which
    have tables of their own.
    """
    attributes, buffers = dict(vars(embedding)), dict(embedding._buffers)
    try:
        yield
    finally:
        for now, before in ((vars(embedding), attributes), (embedding._buffers, buffers)):
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)


_Answers = dict[Hashable, Any]


class LatentTables:
    """Tables by variant, by embedding and by what it was asked; equal ones, as all layers have, are one."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, weakref.WeakKeyDictionary[nn.Module, _Answers]] = {}
        self._distinct: list[Any] = []

    def clear(self) -> None:
        """Lets go of all of them. Only where no graph reads them any more."""
        self._answers.clear()
        self._distinct.clear()

    def keep(self, variants: Container[Hashable]) -> None:
        """Lets go of what other variants were answered, whose graphs were dropped."""
        self._answers = {key: answers for key, answers in self._answers.items() if key in variants}
        by_embedding = (answers for of_variant in self._answers.values() for answers in of_variant.values())
        asked = (table for answers in by_embedding for table in answers.values())
        self._distinct = [*{id(table): table for table in asked}.values()]

    @contextlib.contextmanager
    def answering(self, block: nn.Module, variant: Hashable) -> Iterator[None]:
        """Lets the embeddings of a block's attention answer with tables that are kept.

        What has not been asked for a variant is asked of the embedding itself and compared with what is kept,
        which waits for the device: a warm-up has to come before a capture.

        Args:
            block: of the layers.
            variant: its key; another state of the layers may have other tables.
        """
        embeddings = _embeddings(block)
        of_variant = self._answers.setdefault(variant, weakref.WeakKeyDictionary())
        asked = [(one, name) for one in embeddings for name in (_ANGLES, _COSINES) if hasattr(one, name)]
        before = [vars(embedding).get(name) for embedding, name in asked]
        kept = [
            self._kept(of_variant.setdefault(embedding, {}), embedding, name) for embedding, name in asked
        ]
        for (embedding, name), answer in zip(asked, kept, strict=True):
            vars(embedding)[name] = answer
        try:
            yield
        finally:
            for (embedding, name), own in zip(asked, before, strict=True):
                if own is None:
                    del vars(embedding)[name]
                else:
                    vars(embedding)[name] = own

    def _kept(self, answers: _Answers, embedding: nn.Module, name: str) -> Callable[..., Any]:
        ask = getattr(embedding, name)

        def answer(*args: Hashable, **named: Hashable) -> Any:
            question = name, args, tuple(sorted(named.items()))
            if question not in answers:
                with _put_back(embedding):
                    made = ask(*args, **named)
                # Views of buffers are longer, and their memory is their owner's to free.
                made = tuple(table.clone() for table in made) if name == _COSINES else made
                answers[question] = self._shared(made)
            return answers[question]

        return answer

    def _shared(self, made: Any) -> Any:
        for known in self._distinct:
            if _are_equal(known, made):
                return known
        self._distinct.append(made)
        return made
