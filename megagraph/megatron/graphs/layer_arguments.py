# SPDX-License-Identifier: Apache-2.0
"""What layers are handed beside hidden states and pack: by variant, and which rotary tables graphs may read.

It is the model's own answer, and not made here, since Megatron's options change from release to release: its
forward runs as far as the decoder, once for each variant and without tokens or positions. What one that is
not Megatron's hands over must then be the same in each micro-batch.

Note [Where positions begin]
Megatron makes a table of `max_seqlen` rows. Its unfused RoPE begins anew in each document, unless the table
is as long as the pack: then positions go on from document to document. Such packs run as they were given, by
Megatron's rule. A canonical pack has another length and another `max_seqlen`, and may have a table as long as
itself, so its offsets are marked, by which RoPE inside a layer knows it. Whoever runs the layer (a capture,
an eager micro-batch, a recompute in the backward), the offsets are these.

Frequencies with a row for each token say so themselves: as many rows as the pack has tokens, and not as its
longest document. They are padded and staged like hidden states, and the mark says so, too.
"""

import contextlib
import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megagraph._C import Constants, KeptState, ReadTrace, VariantKey, are_equal, plain_tensors
from megagraph.bank.rng import kept_streams
from megagraph.megatron.graphs.entry import Entries
from megagraph.megatron.seams import GPT_FORWARD, MLA_ATTENTION, as_before, has_mla, hybrid_seams, stand_in

__all__ = ["LayerArguments", "MlaTables", "layer_constants"]


class LayerArguments(dict[VariantKey, Constants]):
    """What the layers of each variant are called with, and which rotary tables are the model's own."""

    def __init__(self, model: Any, entries: Entries) -> None:
        super().__init__()
        self._model, self.entries = weakref.ref(model), entries
        # Multi-latent attention makes the tables, and cuts them to the rows of the pack.
        self.are_cut = has_mla(model)
        has_tables = self.are_cut or getattr(model, "rotary_pos_emb", None) is not None
        # They say where positions begin; with fused RoPE these begin anew in documents.
        self.depend_on_max_seqlen = has_tables and not model.config.apply_rope_fusion
        # Multimodal RoPE's frequencies have a row for each token.
        self.is_by_token = getattr(model, "position_embedding_type", None) == "mrope"
        # Whether the layers were handed the model's own table when that was last asked; None before.
        self.are_own: bool | None = None
        self._own_table: dict[int, Constants] = {}  # the last one, by its rows
        self.staged = Constants({})  # of variants with frequencies of each token: those of the micro-batch
        self.captured: Container[VariantKey] = ()  # the variants with graphs

    def of(self, key: VariantKey, params: Any, hidden_states: Tensor) -> Constants:
        """Those of a variant; found with a canonical pack of it, and hidden states on the meta device."""
        # The first ones stay: graphs of former numeric settings read them. Of other states only graphs do.
        if key not in self:
            for other in [it for it in self if it.state != key.state and it not in self.captured]:
                del self[other]
            self[key] = self.staged if key.by_token else Constants(self._make(params, hidden_states))
        return self[key]

    def _make(self, params: Any, hidden_states: Tensor) -> Mapping[str, Any]:
        model, doors = self._model(), self.entries.model
        assert model is not None
        if doors.is_own is not False:
            return layer_constants(model, params, hidden_states)
        short = copy.copy(params)
        short.max_seqlen_q = short.max_seqlen_kv = min(2, params.max_seqlen_q)
        # A host may keep how long a document was, and its frequencies: questions leave no trace.
        rotary: Any = getattr(model, "rotary_pos_emb", None) or nn.Module()
        kept = KeptState([{**plain_tensors([("", rotary)]), **dict(rotary.named_buffers())}])
        with as_before(vars(model), model._buffers, vars(rotary), rotary._buffers):
            try:
                made, of_short = (
                    layer_constants(model, it, hidden_states, is_overridden=True) for it in (params, short)
                )
            finally:
                kept.put_all_back()
        if made.get("extract_layer_indices"):
            raise ValueError("it looks at rows between the layers: extract_layer_indices")
        if of_rows := [name for name, it in made.items() if isinstance(it, Tensor) and it.is_meta]:
            raise ValueError(f"{of_rows[0]} is made of hidden states")
        table: Any = made.get("rotary_pos_emb")
        rows: Any = of_short.get("rotary_pos_emb")
        if isinstance(table, Tensor) and not torch.equal(table[: len(rows)], rows):
            raise ValueError("its rotary frequencies go by the longest document, as those of dynamic NTK")
        return made

    def include(self, table: Any, params: Any, hidden_states: Tensor) -> bool:
        """Whether a table that layers are handed is the one that the model makes for a pack.

        Waits for the device if the table was not known and has the shape of the model's own.
        """
        rows: int = params.max_seqlen_q
        known = self._own_table.get(rows)
        self.are_own = table is None or (known is not None and known.is_equal("rotary_pos_emb", table))
        if not self.are_own:
            # A host's model may make its tables of more than a pack's length.
            with contextlib.suppress(Exception):
                self._own_table = {rows: (own := Constants(self._make(params, hidden_states)))}
                self.are_own = own.is_equal("rotary_pos_emb", table)
        return self.are_own


def layer_constants(
    model: Any, params: Any, hidden_states: Tensor, *, is_overridden: bool = False
) -> Mapping[str, Any]:
    """What a model calls its layers with for a pack, less the pack, its mask and the hidden states [T, 1, H].

    Runs a forward, overridden or Megatron's own, up to the decoder, for which something else stands: no layer
    runs, and no values of the hidden states are read. Raises `ValueError` if unfused RoPE has a table of
    another length than the pack declares, so that where positions begin cannot be told.
    """
    forward = model.forward
    if not is_overridden:
        seams = (GPT_FORWARD, *(hybrid_seams() or ()))
        seam = next(seam for seam in seams if isinstance(model, seam.owner()))
        forward = types.MethodType(inspect.unwrap(seam.function()), model)
    parameters = inspect.signature(forward).parameters.values()
    named = (each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD))
    given = {each.name: None for each in named if each.default is each.empty}
    if any(each.kind is each.VAR_KEYWORD for each in parameters):  # which may hand them on
        given |= dict.fromkeys(GPT_FORWARD.takes.split())
    with kept_streams(model), stand_in(model, decoder=_HandsBack(model.get_submodule("decoder"))):
        try:
            forward(**{**given, "decoder_input": hidden_states, "packed_seq_params": params})
            raise AssertionError("the model's forward did not call its decoder")
        except _Handed as raised:
            (handed,) = raised.args
    handed.pop("packed_seq_params", None)
    constants = {name: value for name, value in handed.items() if value is not None}
    table = constants.get("rotary_pos_emb")
    rows = table.size(0) if isinstance(table, Tensor) else params.max_seqlen_q
    if rows != params.max_seqlen_q and not model.config.apply_rope_fusion:
        raise ValueError(f"expected a rotary table of max_seqlen, {params.max_seqlen_q} rows, got {rows}")
    return constants


class _Handed(Exception):
    """Carries what a model hands to its decoder out of the model's forward."""


class _HandsBack:
    """Stands for a decoder, and raises what it is called with."""

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def __call__(self, hidden_states: Any = None, attention_mask: Any = None, **arguments: Any) -> None:
        raise _Handed(arguments)


# The angles; with fused RoPE of YaRN, cosines and sines of them, out of buffers that a longer pack replaces.
_ANGLES, _COSINES = "forward", "get_cached_cos_sin"


class MlaTables:
    """Rotary tables that multi-latent attention asks for inside of its layers, which live as graphs do.

    Each such attention has an embedding of its own and asks it for a table in every call, by the
    `max_seqlen` of its pack. The answer comes from a cache of 32 tables over all layers and models. So no
    graph may read a table that the cache alone holds, and none may be made in a capture, whose memory the
    cache would hand to eager calls. While layers are warmed up and captured, their embeddings answer with
    tables that are kept here: by variant, by embedding and by what it was asked; equal ones are one.
    """

    def __init__(self) -> None:
        self._answers: dict[Hashable, dict[Hashable, Any]] = {}

    def keep(self, variants: Container[Hashable]) -> None:
        """Lets go of what other variants were answered, whose graphs were dropped."""
        self._answers = {key: answers for key, answers in self._answers.items() if key in variants}

    @contextlib.contextmanager
    def answering(self, block: nn.Module, variant: Hashable) -> Iterator[None]:
        """Lets the embeddings of a block's attention answer with tables that are kept for a variant.

        What has not been asked for it (another state of the layers may have other tables) is asked of the
        embedding itself and compared with what is kept, which waits for the device: a warm-up has to come
        before a capture.
        """
        answers = self._answers.setdefault(variant, {})  # with other embeddings no variant stays
        with contextlib.ExitStack() as afterwards:
            for number, embedding in enumerate(_embeddings(block)):
                names = filter(functools.partial(hasattr, embedding), (_ANGLES, _COSINES))
                kept = {name: self._kept(answers, number, embedding, name) for name in names}
                afterwards.enter_context(stand_in(embedding, **kept))
            yield

    def _kept(
        self, answers: dict[Hashable, Any], number: int, embedding: nn.Module, name: str
    ) -> Callable[..., Any]:
        ask = getattr(embedding, name)

        def answer(*args: Hashable, **named: Hashable) -> Any:
            question = number, name, args, tuple(sorted(named.items()))
            if question not in answers:
                # New buffers or attributes would be a change in a layer that is being captured. What it
                # caches is no matter of graphs, which have tables of their own.
                with as_before(vars(embedding), embedding._buffers):
                    made = ask(*args, **named)
                # Views of buffers are longer, and their memory is their owner's to free.
                made = tuple(table.clone() for table in made) if name == _COSINES else made
                answers[question] = self._shared(made)
            return answers[question]

        return answer

    def _shared(self, made: Any) -> Any:
        distinct = {id(table): table for answers in self._answers.values() for table in answers.values()}
        # The cache alone has what equals another one, and no graph reads that.
        unseen = ReadTrace.unseen
        return next((known for known in distinct.values() if unseen(are_equal, known, made)), made)


def _embeddings(block: nn.Module) -> list[nn.Module]:
    """Those of every multi-latent attention inside that has one; one that several share, once."""
    mla = MLA_ATTENTION.owner()
    found = {getattr(it, "rotary_pos_emb", None): None for it in block.modules() if isinstance(it, mla)}
    return [embedding for embedding in found if isinstance(embedding, nn.Module)]
