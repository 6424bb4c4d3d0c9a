# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention: the bits of eager and of an unpatched run, and tables that outlive a cache."""

import gc
import shutil
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import parallel_jobs
import pytest
import torch
from latent_rig import LatentHybridTrainer, LatentTrainer, ScatteredLatent
from megatron_rig import (
    CAPACITY,
    HYBRID_PATTERN,
    LAYERS,
    ON_GPU,
    ONE,
    TWO,
    Install,
    Micro,
    Pair,
    needs_engine,
    report_of,
    step,
)
from rope_rig import MODES, Declared, assert_close_losses, canonical, run, three_modes
from same_bits import assert_same_bits
from torch import Tensor, nn
from worlds import World

from megagraph.megatron import seams
from megagraph.megatron.graphs.latent_tables import LatentTables
from megagraph.megatron.graphs.refusals import refusal_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SCOPES = [(), ("attn",), ("mlp",), ("attn", "mlp")]

# -- bits ----------------------------------------------------------------------------------------


def test_padding_between_documents_and_several_slots(install: Install) -> None:
    install(cuda_graph_slots=2)
    pair = Pair(LatentTrainer, kind="low rank, YaRN")
    for index in range(6):
        pair.step(
            Micro(lengths=(7 + index, 20), padded=(16, 32), seed=index),
            Micro(lengths=(3, 9, 30), padded=(8, 16, 40), seed=50 + index),
        )
    report = pair.report()
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 2 * LAYERS}


@pytest.mark.parametrize("kind", ["low rank, YaRN", "plain, RoPE"])
@pytest.mark.parametrize("max_seqlen", [64, 32], ids=["all the tokens", "half of them"])
def test_canonical_packs_have_the_bits_of_an_unpatched_run(max_seqlen: int, kind: str) -> None:
    """With a table as long as the pack, Megatron's unfused RoPE goes on from document to document."""
    capacity = CAPACITY.replace(max_seqlen=max_seqlen)
    lengths = [(10, 30, 24), (32, 32), (2, 2, 28, 32), (16, 16, 16, 16), (31, 1, 32)]
    steps: list[list[Micro]] = [
        [canonical(lengths[(index + m) % 5], capacity=capacity, seed=7 * index + m) for m in range(2)]
        for index in range(4)
    ]
    trainer = ScatteredLatent if kind == "plain, RoPE" else LatentTrainer
    runs = three_modes(steps, lambda: trainer(kind=kind), capacities=(capacity,))
    goes_on = {"SIGNATURE_CHANGED": 4 * 2 * LAYERS}
    assert runs["graph"].report["eager"] == (goes_on if max_seqlen == 64 else {"WARMING_UP": 2 * LAYERS})


@pytest.mark.parametrize("declared", [40, 39, 30, 64], ids=["just the rows", "one less", "less", "more"])
@pytest.mark.parametrize("is_left_eager", [False, True], ids=["graphed", "left eager"])
def test_rows_are_rotated_as_megatron_rotates_them_whatever_a_pack_declares(
    is_left_eager: bool, declared: int
) -> None:
    """Its attention cuts a table to the pack's rows: a longer one goes on from document to document."""
    steps: list[list[Micro]] = [
        [
            Declared(lengths=(10, 30), max_seqlen=declared, seed=index),
            Declared(lengths=(9, 11, 20), max_seqlen=declared, seed=50 + index),
        ]
        for index in range(3)
    ]

    def make() -> ScatteredLatent:
        trainer = ScatteredLatent(kind="plain, RoPE")
        if is_left_eager:
            for layer in trainer.chunk.decoder.layers:
                layer.mlp.register_forward_hook(lambda *_: None)
        return trainer

    off, eager, graphed = (run(mode, steps, make) for mode in MODES)
    if declared >= 40:
        assert_same_bits(off, eager)
        assert_same_bits(off, graphed)
        assert graphed.report["eager"] == {"SIGNATURE_CHANGED": 3 * 2 * LAYERS}
        return
    assert_close_losses(off, eager)
    assert_close_losses(off, graphed)
    if is_left_eager:
        assert set(graphed.report["eager"]) == {"WARMING_UP", "FOREIGN_HOOK"}
    else:
        assert_same_bits(eager, graphed)
        assert graphed.report["eager"] == {"WARMING_UP": 2 * LAYERS}


# -- tables --------------------------------------------------------------------------------------


def _embeddings(block: Any) -> list[nn.Module]:
    return [layer.self_attention.rotary_pos_emb for layer in block.layers]


def _table(embedding: nn.Module, rows: int) -> Tensor:
    answer = embedding(rows, packed_seq=True)
    return answer[0] if isinstance(answer, tuple) else answer


@pytest.mark.parametrize("kind", ["plain, RoPE", "plain, YaRN"])
def test_layers_that_are_captured_share_tables_that_nobody_else_drops(kind: str) -> None:
    block = LatentTrainer(kind=kind).chunk.decoder
    embeddings, tables = _embeddings(block), LatentTables()
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
    """Bug: it was put back once for each of them, which failed, and left the whole model without graphs."""
    block = LatentTrainer(kind="plain, RoPE").chunk.decoder
    shared = block.layers[0].self_attention.rotary_pos_emb
    for layer in block.layers:
        layer.self_attention.rotary_pos_emb = shared
    with LatentTables().answering(block, "a variant"):
        assert "forward" in vars(shared)
    assert "forward" not in vars(shared)


def test_a_forward_that_a_host_has_set_answers_and_stays() -> None:
    block = ScatteredLatent(kind="plain, RoPE").chunk.decoder
    (embedding, *_others) = _embeddings(block)
    before = vars(embedding)["forward"]
    with LatentTables().answering(block, "a variant"):
        assert _table(embedding, 9) is before(9, packed_seq=True)
        assert vars(embedding)["forward"] is not before
    assert vars(embedding)["forward"] is before


@pytest.mark.parametrize("kind", ["low rank, YaRN", "plain, RoPE"])
def test_tables_that_megatron_drops_are_still_there_for_graphs(kind: str) -> None:
    """It keeps 32 of them over all layers and models, and what comes next gets their memory."""
    pair = Pair(LatentTrainer, kind=kind)
    rubbish: list[Tensor] = []
    *steps, last, one_more = parallel_jobs.steps_of(8 if ON_GPU else 5)
    for index, micros in enumerate(steps):
        pair.step(*micros)
        for embedding in _embeddings(pair.graphed.chunk.decoder):
            for rows in range(100, 140):
                _table(embedding, rows + 50 * index)
        gc.collect()
        rows, dim = CAPACITY.max_seqlen, pair.graphed.chunk.config.qk_pos_emb_head_dim
        rubbish += [torch.full((rows, dim), float("nan"), device=pair.graphed.device) for _ in range(64)]
    pair.evaluate(ONE, TWO)
    report = pair.train([last, one_more])
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": (3 + 2) * LAYERS}


# -- recompute -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("recompute_on_cpu")
@pytest.mark.parametrize(
    ("kind", "fused"), [("low rank, YaRN", False), ("low rank, YaRN", True), ("plain, RoPE", False)]
)
@pytest.mark.parametrize("module", ["mla_up_proj", "core_attn"])
def test_selective_recompute_has_the_bits_of_none(
    install: Install, module: str, kind: str, fused: bool
) -> None:
    """Of the projections and the rotation, whose outputs Megatron drops and makes anew in the backward."""
    from megatron.core.tensor_parallel import random

    # Later releases compile a few lines of C++ for it.
    if hasattr(random, "_get_share_storage") and None in (shutil.which("ninja"), shutil.which("c++")):
        pytest.skip("this release compiles C++ to recompute: no ninja or no compiler")
    install()
    recomputed = {"recompute_granularity": "selective", "recompute_modules": [module]}
    rope = {"apply_rope_fusion": fused}
    pair = Pair(LatentTrainer, kind=kind, config={**recomputed, **rope})
    pair.eager = LatentTrainer(kind=kind, config=rope)
    *steps, last = parallel_jobs.steps_of(7 if ON_GPU else 4)
    pair.train(steps)
    pair.evaluate(ONE, TWO)
    report = pair.train([last])
    if not ON_GPU:  # there, only where the random tracker is safe for graphs
        assert report["failures"] == [] and report["eager"] == {"WARMING_UP": (3 + 2) * LAYERS}


# -- other models --------------------------------------------------------------------------------


@pytest.mark.parametrize(("seam", "is_refused"), [(seams.LATENT_ROPE, True), (seams.ATTENTION_ROPE, False)])
def test_a_hosts_rope_in_place_of_megatrons_is_refused_where_the_model_calls_it(
    seam: seams.Seam, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rope_of_a_host(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError

    trainer = LatentTrainer(kind="plain, RoPE")
    monkeypatch.setattr(seam.owner(), seam.name, rope_of_a_host)
    refusal = refusal_of(trainer.chunk, trainer.model)
    assert (refusal is not None) == is_refused
    assert refusal is None or "rope_of_a_host in place of Megatron's RoPE" in refusal.sentence


# -- Transformer Engine --------------------------------------------------------------------------


def of_engine(test: Callable[..., None]) -> Callable[..., None]:
    marked: Callable[..., None] = pytest.mark.gpu(needs_engine(test))
    return pytest.mark.usefixtures("deterministic_engine")(marked)


@of_engine
@pytest.mark.parametrize("scopes", SCOPES, ids=lambda scopes: "+".join(scopes) or "layer")
@pytest.mark.parametrize("kind", ["low rank, YaRN", "plain, RoPE"])
def test_layers_of_transformer_engine(install: Install, kind: str, scopes: Sequence[str]) -> None:
    install(cuda_graph_modules=scopes)
    pair = Pair(LatentTrainer, kind=kind, transformer_engine=True)
    pair.train(parallel_jobs.steps_of(20))
    pair.evaluate(ONE, TWO)
    pair.evaluate(TWO, ONE)
    report = pair.report()
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": (3 + 2) * LAYERS}


@of_engine
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_that_share_layers_of_transformer_engine(world2: World, sequence_parallel: bool) -> None:
    reports = world2.run(
        parallel_jobs.train_pair,
        tensor_parallel=2,
        make=partial(LatentTrainer, kind="low rank, YaRN", transformer_engine=True),
        config={"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel},
    )
    for report in reports:
        # Its first call leaves a module in another state, which ranks tell each other of between steps.
        assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 2 * 3 * LAYERS}


@of_engine
def test_a_hybrid_model_of_layers_of_transformer_engine(install: Install) -> None:
    pytest.importorskip("megatron.core.models.hybrid.hybrid_model")
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    install()
    trainer = LatentHybridTrainer(kind="plain, RoPE", spec=hybrid_stack_spec)
    step(trainer, [ONE, TWO], times=4)
    report = report_of(trainer)
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": 2 * len(HYBRID_PATTERN)}
