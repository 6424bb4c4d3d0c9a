# SPDX-License-Identifier: Apache-2.0
"""Fused RoPE of multi-latent attention: the bits of eager and of Megatron's kernels, tables of its own."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import parallel_jobs
import pytest
import torch
from latent_rig import LatentTrainer
from megatron_rig import CAPACITY, LAYERS, ONE, TWO, Micro, Pair, refused
from rope_rig import canonical, three_modes
from torch import Tensor

from megagraph.megatron import seams
from megagraph.megatron.graphs.latent_tables import LatentTables
from megagraph.megatron.graphs.positions import with_canonical_mark
from megagraph.megatron.graphs.refusals import refusal_of
from megagraph.megatron.patch.inside_layers import wrap_key_rope, wrap_query_rope
from megagraph.packs.latent_rope import Rotation, rope_mla

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

KINDS = ["low rank, YaRN", "plain, YaRN"]
FUSED = {"apply_rope_fusion": True}

each_kind = pytest.mark.parametrize("kind", KINDS)


def _embeddings(trainer: LatentTrainer) -> list[Any]:
    block: Any = trainer.chunk.decoder
    return [layer.self_attention.rotary_pos_emb for layer in block.layers]


# -- bits ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.usefixtures("fused_kernels")
@each_kind
def test_canonical_packs_have_the_bits_of_an_unpatched_run(kind: str) -> None:
    """Which runs Megatron's kernels."""
    lengths = [(10, 30, 24), (32, 32), (2, 2, 28, 32), (16, 16, 16, 16), (31, 1, 32)]
    steps: list[list[Micro]] = [
        [canonical(lengths[(index + m) % 5], seed=7 * index + m) for m in range(2)] for index in range(8)
    ]
    runs = three_modes(steps, lambda: LatentTrainer(kind=kind, config=FUSED), capacities=(CAPACITY,))
    assert runs["graph"].report["eager"] == {"WARMING_UP": 2 * LAYERS}


# -- tables --------------------------------------------------------------------------------------


def test_a_longer_pack_replaces_buffers_that_no_graph_reads() -> None:
    """Megatron makes longer tables then, here of another dtype, too, and frees those of before."""
    pair = Pair(LatentTrainer, kind="low rank, YaRN", config=FUSED)
    rubbish: list[Tensor] = []
    *steps, last, one_more = parallel_jobs.steps_of(5)
    for index, micros in enumerate(steps):
        pair.step(*micros)
        for trainer in pair.both:
            for embedding in _embeddings(trainer):
                before = embedding.cos_cached
                embedding.get_cached_cos_sin(200 + 50 * index, dtype=torch.float16, packed_seq=True)
                assert embedding.cos_cached is not before
        rubbish += [torch.full_like(embedding.cos_cached[:64], float("nan")) for _ in range(64)]
    pair.evaluate(ONE, TWO)
    report = pair.train([last, one_more])
    assert report["failures"] == [] and report["eager"] == {"WARMING_UP": (3 + 2) * LAYERS}


def test_tables_that_an_embedding_makes_while_it_is_asked_are_gone_afterwards() -> None:
    """Bug: buffers that came up stayed, and a layer looked changed."""
    trainer = LatentTrainer(kind="plain, YaRN", config=FUSED)
    (embedding, *_) = _embeddings(trainer)
    for name in list(embedding._buffers):
        delattr(embedding, name)
    before = {**vars(embedding)}, {**embedding._buffers}
    block: Any = trainer.chunk.decoder
    with LatentTables().answering(block, "a variant"):
        tables = embedding.get_cached_cos_sin(40, dtype=torch.bfloat16, packed_seq=True)
    assert all(table.size(0) == 40 for table in tables)
    assert ({**vars(embedding)}, {**embedding._buffers}) == before


def test_layers_that_are_captured_share_tables_of_their_own() -> None:
    trainer = LatentTrainer(kind="plain, YaRN", config=FUSED)
    block: Any = trainer.chunk.decoder
    embeddings, tables = _embeddings(trainer), LatentTables()
    ask = {"dtype": torch.bfloat16, "packed_seq": True}
    with tables.answering(block, "a variant"):
        first = embeddings[0].get_cached_cos_sin(40, **ask)
        assert all(embedding.get_cached_cos_sin(40, **ask) is first for embedding in embeddings)
    assert all("get_cached_cos_sin" not in vars(embedding) for embedding in embeddings)
    wanted = embeddings[0].get_cached_cos_sin(40, **ask)
    for kept, buffer in zip(first, wanted, strict=True):
        assert torch.equal(kept, buffer) and kept.data_ptr() != buffer.data_ptr()


# -- in place of Megatron's ----------------------------------------------------------------------


class _Called(Exception):
    pass


def _megatrons(seam: seams.Seam) -> Callable[..., Any]:
    """A function of its signature."""

    @functools.wraps(seam.function())
    def called(*_args: Any, **_kwargs: Any) -> None:
        raise _Called

    return called


_QUERY, _KEY = seams.LATENT_QUERY_ROPE, seams.LATENT_KEY_ROPE


def _rows(device: str = "cpu") -> dict[str, Tensor]:
    return {
        "t": torch.randn(12, 2, 12, device=device),
        "kv": torch.randn(12, 2, 10, device=device),
        "k_pos_emb": torch.randn(12, 1, 8, device=device),
        "cos": torch.randn(16, 1, 1, 8, device=device),
        "sin": torch.randn(16, 1, 1, 8, device=device),
    }


def _offsets(values: Sequence[int], *, is_canonical: bool = True) -> Tensor:
    """As a canonical pack has them, or a pack as it was given."""
    names = [f"cu_seqlens_{of}{kind}" for of in ("q", "kv") for kind in ("", "_padded")]
    offsets = torch.tensor(values, dtype=torch.int32)
    params = SimpleNamespace(**dict.fromkeys(names, offsets))
    found = with_canonical_mark(params) if is_canonical else params
    cu_seqlens: Tensor = found.cu_seqlens_q
    return cu_seqlens


@pytest.mark.parametrize("cp", [(0, 1), (1, 2)])
def test_canonical_packs_are_rotated_by_document(cp: tuple[int, int]) -> None:
    given, offsets = _rows(), _offsets([0, 4, 4, 8])
    how = Rotation(
        cos=given["cos"].flatten(1),
        sin=given["sin"].flatten(1),
        cu_seqlens_padded=offsets,
        fused=True,
        cp_rank=cp[0],
        cp_size=cp[1],
    )
    wanted = rope_mla(given["t"].clone(), given["kv"], given["k_pos_emb"], how, v_dim=6)
    angles = given["cos"], given["sin"]
    query = wrap_query_rope(_megatrons(_QUERY))(given["t"].clone(), *angles, 4, 8, offsets, *cp)
    made = wrap_key_rope(_megatrons(_KEY))(given["kv"], given["k_pos_emb"], *angles, 8, 4, 6, offsets, *cp)
    assert all(map(torch.equal, (query, *made), wanted))


@pytest.mark.parametrize(
    "changes",
    [{"offsets": None}, {"offsets": _offsets([0, 4, 8], is_canonical=False)}, {"rotary_interleaved": True}],
    ids=["no pack", "as it was given", "interleaved"],
)
def test_everything_else_is_megatrons(changes: dict[str, Any]) -> None:
    given = _rows()
    offsets = changes.pop("offsets", _offsets([0, 4, 8]))
    angles = given["cos"], given["sin"]
    with pytest.raises(_Called):
        wrap_query_rope(_megatrons(_QUERY))(given["t"], *angles, 4, 8, offsets, **changes)
    with pytest.raises(_Called):
        wrap_key_rope(_megatrons(_KEY))(given["kv"], given["k_pos_emb"], *angles, 8, 4, 6, offsets, **changes)


@pytest.mark.parametrize("seam", [seams.LATENT_QUERY_ROPE, seams.LATENT_KEY_ROPE], ids=lambda seam: seam.path)
def test_a_hosts_kernels_in_place_of_megatrons_are_refused(
    seam: seams.Seam, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rope_of_a_host(*args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError

    trainer = LatentTrainer(kind="plain, YaRN", config=FUSED)
    assert refusal_of(trainer.chunk, trainer.model) is None
    monkeypatch.setattr(seam.owner(), seam.name, rope_of_a_host)
    assert "rope_of_a_host in place of Megatron's RoPE" in refused(trainer.chunk, trainer.model)
    monkeypatch.setattr(trainer.chunk.config, "apply_rope_fusion", False)
    assert refusal_of(trainer.chunk, trainer.model) is None
