# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention: the bits of eager and of an unpatched run, and tables that outlive a cache."""

import dataclasses
import functools
import gc
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import megatron_rig as rig
import parallel_jobs
import pytest
import torch
from host_rig import OwnBlock, OwnModel, host_pair, only
from megatron.core.tensor_parallel import random
from model_specs import asks_for_no_engine, mla_config
from moe_rig import recompute
from rope_rig import Declared, canonical_steps, padded_modes, scatter, three_modes
from torch import Tensor, nn

from megagraph.megatron import seams
from megagraph.megatron.graphs.layer_arguments import MlaTables
from megagraph.megatron.graphs.refusals import refusal_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SCOPES = [(), ("attn",), ("mlp",), ("attn", "mlp")]
FUSED = {"apply_rope_fusion": True}
_QUERY, _KEY = seams.MLA_QUERY_ROPE, seams.MLA_KEY_ROPE


@pytest.mark.parametrize("declared", [40, 39, 64])
def test_rows_are_rotated_as_megatron_rotates_them_whatever_a_pack_declares(declared: int) -> None:
    """Its attention cuts a table to the pack's 40 rows: a longer one goes on from document to document."""
    pack = partial(Declared, max_seqlen=declared)
    steps = [[pack(lengths=(10, 30), seed=it), pack(lengths=(9, 11, 20), seed=50 + it)] for it in range(3)]
    given = {"mla": "plain, RoPE", "prepare": scatter}
    if declared >= 40:
        graphed = three_modes(steps, **given)["graph"]
        assert graphed.report["eager"] == {"SIGNATURE_CHANGED": 3 * 2 * rig.LAYERS}
    else:
        _eager, graphed = padded_modes(steps, **given)
        assert graphed.report["eager"] == {"WARMING_UP": 2 * rig.LAYERS}


def _embeddings(block: Any) -> list[Any]:
    return [layer.self_attention.rotary_pos_emb for layer in block.layers]


def _table(embedding: nn.Module, rows: int) -> Tensor:
    answer = embedding(rows, packed_seq=True)
    return answer[0] if isinstance(answer, tuple) else answer


@pytest.mark.parametrize("kind", ["plain, RoPE", "plain, YaRN"])
def test_layers_that_are_captured_share_tables_that_nobody_else_drops(kind: str) -> None:
    block = rig.ModelTrainer(mla=kind).chunk.decoder
    embeddings, tables = _embeddings(block), MlaTables()
    wanted = _table(embeddings[0], 40).clone()
    with tables.answering(block, "a variant"):
        first = [_table(embedding, 40) for embedding in embeddings]
        assert all(table is first[0] for table in first) and torch.equal(first[0], wanted)
        assert _table(embeddings[0], 41).size(0) == 41
    assert all("forward" not in vars(embedding) for embedding in embeddings)
    type(embeddings[0]).forward.cache_clear()
    with tables.answering(block, "a variant"):
        assert all(_table(embedding, 40) is first[0] for embedding in embeddings)
    embeddings[0].inv_freq = embeddings[0].inv_freq_extra = 2 * embeddings[0].inv_freq
    type(embeddings[0]).forward.cache_clear()
    with tables.answering(block, "a variant of another state"):
        assert _table(embeddings[1], 40) is first[0]
        assert not torch.equal(_table(embeddings[0], 40), wanted)
    tables.keep(["a variant"])
    with tables.answering(block, "a variant of another state"):
        assert _table(embeddings[1], 40) is first[0]  # made anew, and equal
    dying = weakref.ref(first[0])
    tables.keep([])
    type(embeddings[0]).forward.cache_clear()
    del first
    gc.collect()
    assert dying() is None


def test_an_embedding_that_layers_share_is_itself_again_afterwards() -> None:
    """Bugs: it was put back once for each, which failed; buffers that came up while it was asked stayed."""
    block = rig.ModelTrainer(mla="plain, YaRN", config=FUSED).chunk.decoder
    shared, *_ = _embeddings(block)
    for layer in block.layers:
        layer.self_attention.rotary_pos_emb = shared
    for name in list(shared._buffers):
        delattr(shared, name)
    before = {**vars(shared)}, {**shared._buffers}
    with MlaTables().answering(block, "a variant"):
        assert "forward" in vars(shared)
        tables = shared.get_cached_cos_sin(40, dtype=torch.bfloat16, packed_seq=True)
    assert all(table.size(0) == 40 for table in tables)
    assert ({**vars(shared)}, {**shared._buffers}) == before


def _drop_tables(embedding: Any, index: int) -> None:
    """Megatron keeps 32 of them over all layers and models."""
    for rows in range(100, 140):
        _table(embedding, rows + 50 * index)


def _replace_buffers(embedding: Any, index: int) -> None:
    """It makes longer tables for a longer pack, here of another dtype, too, and frees those of before."""
    before = embedding.cos_cached
    embedding.get_cached_cos_sin(200 + 50 * index, dtype=torch.float16, packed_seq=True)
    assert embedding.cos_cached is not before


@pytest.mark.parametrize(
    ("kind", "config", "drop"),
    [
        ("low rank, YaRN", {}, _drop_tables),
        ("plain, RoPE", {}, _drop_tables),
        ("low rank, YaRN", FUSED, _replace_buffers),
    ],
)
def test_tables_that_megatron_drops_are_still_there_for_graphs(kind: str, config: Any, drop: Any) -> None:
    """And what comes next gets their memory."""
    pair = rig.Pair(mla=kind, config=config)
    rubbish: list[Tensor] = []
    *steps, last, one_more = parallel_jobs.steps_of(8 if rig.ON_GPU else 4)
    rows, dim = rig.CAPACITY.max_seqlen, pair.graphed.chunk.config.qk_pos_emb_head_dim
    for index, micros in enumerate(steps):
        pair.step(*micros)
        for trainer in pair.both:
            for embedding in _embeddings(trainer.chunk.decoder):
                drop(embedding, index)
        gc.collect()
        rubbish += [torch.full((rows, dim), float("nan"), device=pair.graphed.device) for _ in range(64)]
    pair.evaluate(rig.ONE, rig.TWO)
    rig.ran(pair.train([last, one_more]), WARMING_UP=(3 + 2) * rig.LAYERS)


@pytest.mark.usefixtures("recompute_on_cpu")
@pytest.mark.parametrize(
    ("module", "kind", "rope"),
    [
        ("mla_up_proj", "low rank, YaRN", {}),
        ("mla_up_proj", "low rank, YaRN", FUSED),
        ("mla_up_proj", "plain, RoPE", {}),
        ("core_attn", "low rank, YaRN", {}),
    ],
)
def test_selective_recompute_has_bits_of_none(module: str, kind: str, rope: Any, monkeypatch: Any) -> None:
    """Of the projections and the rotation, whose outputs Megatron drops and makes anew in the backward."""

    def copy_storage(to: Tensor, made: Tensor) -> None:
        """As 0.16 gives what was made anew to the tensor that was emptied."""
        to.untyped_storage().resize_(made.untyped_storage().size())
        to.untyped_storage().copy_(made.untyped_storage())

    if not rig.ON_GPU:  # later releases compile C++, for as long as all other tests of this file take
        monkeypatch.setattr(random, "_get_share_storage", lambda: copy_storage, raising=False)
    pair = rig.Pair(mla=kind, config=recompute(module, **rope))
    pair.eager = rig.ModelTrainer(mla=kind, config=rope)
    *steps, last = parallel_jobs.steps_of(7 if rig.ON_GPU else 4)
    pair.train(steps)
    pair.evaluate(rig.ONE, rig.TWO)
    report = pair.train([last])
    if not rig.ON_GPU:  # there, only where the random tracker is safe for graphs
        rig.ran(report, WARMING_UP=(3 + 2) * rig.LAYERS)


@pytest.mark.parametrize(
    ("seam", "is_fused", "is_refused"),
    [
        (seams.MLA_ROPE, False, True),
        (seams.ATTENTION_ROPE, False, False),
        *((seam, is_fused, is_fused) for seam in (_QUERY, _KEY) for is_fused in (False, True)),
    ],
)
def test_a_hosts_rope_in_place_of_megatrons_is_refused_where_the_model_calls_it(
    seam: seams.Seam, is_fused: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rope_of_a_host(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError

    chunk = rig.ModelTrainer(mla="plain, YaRN", config={"apply_rope_fusion": is_fused}).chunk
    assert refusal_of(chunk, None) is None
    monkeypatch.setattr(seam.owner(), seam.name, rope_of_a_host)
    assert (refusal_of(chunk, None) is not None) == is_refused
    assert not is_refused or "rope_of_a_host in place of Megatron's RoPE" in rig.refused(chunk)


class HandingModel(OwnModel):
    def tables(self, *given: Any) -> Any:
        hidden, tables = super().tables(*given)
        table = self.rotary_pos_emb(given[-1].max_seqlen_q, packed_seq=True)
        return hidden, {**tables, "rotary_pos_emb": table}


def _hand_tables(model: Any) -> None:
    """To attention that has no embedding, as mcore-bridge does."""
    megatrons: Any = type(model.decoder.layers[0].self_attention)

    class Handed(megatrons):
        def forward(self, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
            """Megatron's asks an embedding."""
            vars(self)["rotary_pos_emb"] = asked = functools.partial(lambda *_, **__: rotary_pos_emb)
            vars(asked)["get_rotary_seq_len"] = lambda *_: 0
            try:
                return super().forward(*args, **kwargs)
            finally:
                del vars(self)["rotary_pos_emb"]

    for layer in model.decoder.layers:
        model.rotary_pos_emb = layer.self_attention.rotary_pos_emb
        layer.self_attention.__class__ = Handed
        del layer.self_attention.rotary_pos_emb


@pytest.mark.parametrize("scopes", SCOPES[:2], ids=str)
def test_a_hosts_model_hands_tables_to_attention_that_has_no_embedding(scopes: Sequence[str]) -> None:
    """Bug: each capture failed, because the attention was asked for its embedding."""
    given: dict[str, Any] = {"prepare": _hand_tables, "config": mla_config("plain, RoPE")}
    given |= {"options": dataclasses.replace(rig.OPTIONS, heads=4), "plugin": {"cuda_graph_modules": scopes}}
    with asks_for_no_engine():
        pair = host_pair(HandingModel, OwnBlock, 3, **given)
    assert pair.report()["failures"] == [] and only(pair.report(), "WARMING_UP")


@pytest.mark.gpu
@rig.needs_engine
@pytest.mark.usefixtures("deterministic_engine")
@pytest.mark.parametrize("scopes", SCOPES, ids=lambda scopes: "+".join(scopes) or "layer")
@pytest.mark.parametrize("kind", ["low rank, YaRN", "plain, RoPE"])
def test_layers_of_transformer_engine(kind: str, scopes: Sequence[str]) -> None:
    pair = rig.Pair(mla=kind, engine=True, plugin={"cuda_graph_modules": scopes})
    pair.train(parallel_jobs.steps_of(20))
    pair.evaluate(rig.ONE, rig.TWO)
    pair.evaluate(rig.TWO, rig.ONE)
    pair.ran(WARMING_UP=(3 + 2) * rig.LAYERS)


@pytest.mark.gpu
@pytest.mark.usefixtures("fused_kernels")
@pytest.mark.parametrize("kind", ["low rank, YaRN", "plain, YaRN"])
def test_fused_packs_that_are_canonical_have_the_bits_of_an_unpatched_run(kind: str) -> None:
    """Which runs Megatron's kernels."""
    runs = three_modes(canonical_steps(rig.CAPACITY, 8), mla=kind, config=FUSED)
    assert runs["graph"].report["eager"] == {"WARMING_UP": 2 * rig.LAYERS}
