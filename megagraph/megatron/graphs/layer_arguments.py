# SPDX-License-Identifier: Apache-2.0
"""What layers are handed beside hidden states and pack: by variant, and which rotary tables graphs may read.

It is the model's own answer, and not made here, since Megatron's options change from release to release. A
model whose forward is not Megatron's runs as far as its decoder, once for each variant and without tokens or
positions; what it hands over must then be the same in each micro-batch.

Note [Where positions begin]
Megatron makes a table of `max_seqlen` rows. Its unfused RoPE begins anew in each document, unless the table
is as long as the pack: then positions go on from document to document. Such packs run as they were given, by
Megatron's rule. A canonical pack has another length and another `max_seqlen`, and may have a table as long as
itself, so its offsets are marked, by which RoPE inside a layer knows it. Whoever runs the layer (a capture,
an eager micro-batch, a recompute in the backward), the offsets are these.
"""

import contextlib
import weakref
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megagraph.megatron.graphs.entry import Entries
from megagraph.megatron.preprocess import Constants, layer_constants, writes_of
from megagraph.megatron.seams import MLA_ATTENTION, has_mla

__all__ = ["LayerArguments", "MlaTables"]


class LayerArguments(dict[Hashable, Constants]):
    """What the layers of each variant are called with, and which rotary tables are the model's own.

    What a host hands to layers in place of a table, frequencies of each token for one, has rows for the pack
    as it was given.

    Attributes:
        depend_on_max_seqlen: tables say where positions begin; with fused RoPE these begin anew in documents.
        are_cut: multi-latent attention makes the tables, and cuts them to the rows of the pack.
        are_own: the layers were handed the model's own table when that was last asked; None before.
    """

    def __init__(self, model: nn.Module, entries: Entries) -> None:
        super().__init__()
        self._model, self._entries = weakref.ref(model), entries
        config: Any = model.config
        self.are_cut = has_mla(model)
        has_tables = self.are_cut or getattr(model, "rotary_pos_emb", None) is not None
        self.depend_on_max_seqlen = has_tables and not config.apply_rope_fusion
        self.are_own: bool | None = None
        self._own_tables: dict[int, tuple[Tensor, int]] = {}  # by rows, and how often they were written

    def of(self, key: Hashable, params: Any, hidden_states: Tensor) -> Constants:
        """Those of a variant; found with a canonical pack of it, and hidden states on the meta device."""
        # The first ones stay: graphs of former numeric settings read them.
        if key not in self:
            self[key] = Constants(self._make(params, hidden_states))
        return self[key]

    def _make(self, params: Any, hidden_states: Tensor) -> Mapping[str, Any]:
        model, doors = self._model(), self._entries.model
        assert model is not None
        return layer_constants(model, params, hidden_states, is_overridden=doors.is_own is False)

    def include(self, table: Any, params: Any, hidden_states: Tensor) -> bool:
        """Whether a table that layers are handed is the one that the model makes for a pack.

        Waits for the device if the table was not known and has the shape of the model's own.
        """
        rows: int = params.max_seqlen_q
        self.are_own = table is None
        if rows in self._own_tables:
            known, writes = self._own_tables[rows]
            self.are_own = self.are_own or (table is known and writes_of(known) == writes)
        if not self.are_own:
            try:
                own = self._make(params, hidden_states).get("rotary_pos_emb")
            except Exception:  # a host's model that makes its tables of more than a pack's length
                own = None
            self.are_own = isinstance(own, Tensor) and _are_equal(own, table)
            if self.are_own:
                self._own_tables[rows] = table, writes_of(table)
        return self.are_own


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two answers are the same: a table, one and YaRN's scale, or two."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return type(one) is type(other) and bool(one == other)


# The angles; with fused RoPE of YaRN, cosines and sines of them, out of buffers that a longer pack replaces.
_ANGLES, _COSINES = "forward", "get_cached_cos_sin"
_Answers = dict[Hashable, Any]


class MlaTables:
    """Rotary tables that multi-latent attention asks for inside of its layers, which live as graphs do.

    Each such attention has an embedding of its own and asks it for a table in every call, by the
    `max_seqlen` of its pack. The answer comes from a cache of 32 tables over all layers and models: one that
    was dropped is made anew, and the memory of the old one is somebody else's. So no graph may read a table
    that the cache alone holds, and none may be made in a capture, whose memory the cache would hand to eager
    calls. While layers are warmed up and captured, their embeddings answer with the tables that are kept
    here: by variant, by embedding and by what it was asked; equal ones, as all layers have, are one.
    """

    def __init__(self) -> None:
        self._answers: dict[Hashable, weakref.WeakKeyDictionary[nn.Module, _Answers]] = {}
        self._distinct: list[Any] = []

    def keep(self, variants: Container[Hashable]) -> None:
        """Lets go of what other variants were answered, whose graphs were dropped."""
        self._answers = {key: answers for key, answers in self._answers.items() if key in variants}
        by_embedding = (answers for of_variant in self._answers.values() for answers in of_variant.values())
        asked = (table for answers in by_embedding for table in answers.values())
        self._distinct = [*{id(table): table for table in asked}.values()]

    @contextlib.contextmanager
    def answering(self, block: nn.Module, variant: Hashable) -> Iterator[None]:
        """Lets the embeddings of a block's attention answer with tables that are kept for a variant.

        What has not been asked for it (another state of the layers may have other tables) is asked of the
        embedding itself and compared with what is kept, which waits for the device: a warm-up has to come
        before a capture.
        """
        of_variant = self._answers.setdefault(variant, weakref.WeakKeyDictionary())
        asked = [
            (embedding, name)
            for embedding in _embeddings(block)
            for name in (_ANGLES, _COSINES)
            if hasattr(embedding, name)
        ]
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


def _embeddings(block: nn.Module) -> list[nn.Module]:
    """Those of every multi-latent attention inside; one that several share, once."""
    mla = MLA_ATTENTION.owner()
    found: dict[nn.Module, None] = {}
    for module in block.modules():
        if isinstance(module, mla) and isinstance(module.rotary_pos_emb, nn.Module):
            found[module.rotary_pos_emb] = None
    return [*found]


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
