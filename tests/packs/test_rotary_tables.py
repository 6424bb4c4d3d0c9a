# SPDX-License-Identifier: Apache-2.0
import gc
import itertools
import weakref
from types import ModuleType
from unittest import mock

import pytest
import torch
from offsets import offsets
from rope_cases import frequencies

from megagraph.packs.rope import RotaryTables

# -- how long tables live ------------------------------------------------------------------------


def test_tables_are_made_once_for_each_frequencies_dtype_and_mscale() -> None:
    tables, both = RotaryTables(), [frequencies(), frequencies()]
    seen: dict[int, tuple[object, ...]] = {}
    keys = list(itertools.product(range(2), (torch.float32, torch.bfloat16), (1.0, 1.2)))
    for index, dtype, mscale in keys * 2:
        cos, sin = tables.tables(both[index], dtype, mscale)
        for table in (cos, sin):
            assert seen.setdefault(id(table), (index, dtype, mscale, table)) == (index, dtype, mscale, table)
    assert len(seen) == 2 * len(keys)
    made = tables.tables(both[0], torch.float32, 1.0)[0]
    tables.rotate(torch.randn(5, 1, 8), both[0], offsets([5]))  # as every layer does
    assert tables.tables(both[0], torch.float32, 1.0)[0] is made
    assert RotaryTables().tables(both[0], torch.float32, 1.0)[0] is not made


def test_views_of_frequencies_share_tables_by_their_place() -> None:
    """Bug: multi-latent attention cuts its table to the rows of its pack in each call, and each such view got
    tables of its own, which a capture made inside of its graph."""
    tables, freqs = RotaryTables(), frequencies()
    made = tables.tables(freqs, torch.float32, 1.0)
    assert tables.tables(freqs[0:32], torch.float32, 1.0)[0] is made[0]
    assert tables.tables(freqs.detach(), torch.float32, 1.0)[0] is made[0]
    for begin, end in ((0, 20), (4, 24), (4, 32)):
        first, again = (tables.tables(freqs[begin:end], torch.float32, 1.0) for _ in range(2))
        assert first[0].data_ptr() == again[0].data_ptr() and torch.equal(first[0], made[0][begin:end])
    dying = weakref.ref(made[0])
    del first, again, made, freqs
    assert dying() is None


def test_views_of_fewer_rows_need_no_tables_of_their_own() -> None:
    """Bug: each length had some, as long as the frequencies, and packs of many lengths filled memory."""
    tables, freqs = RotaryTables(), frequencies()
    for rows in (8, *range(20, 0, -1), 32, *range(1, 33)):
        cos, sin = tables.tables(freqs[:rows], torch.float32, 1.0)
        assert torch.equal(cos, freqs[:rows].flatten(1).cos()) and torch.equal(
            sin, freqs[:rows].flatten(1).sin()
        )
    (pairs,) = (pairs for known in tables._tables.values() for pairs in known.values())
    assert [cos.size(0) for cos, _sin in pairs] == [8, 20, 32]


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.bfloat16]])
def test_tables_die_with_the_frequencies(dtypes: list[torch.dtype]) -> None:
    tables, freqs, others = RotaryTables(), frequencies(), frequencies()
    kept = weakref.ref(tables.tables(others, torch.float32, 1.0)[0])
    dying = [weakref.ref(table) for dtype in dtypes for table in tables.tables(freqs, dtype, 1.0)]
    gc.disable()
    try:
        del freqs
        assert all(table() is None for table in dying)
    finally:
        gc.enable()
    assert kept() is not None


def test_frequencies_at_a_dead_ones_place_get_tables_of_their_own() -> None:
    """Python hands a dead object's id to a new one."""
    tables, ids, repeated = RotaryTables(), set(), False
    for step in range(1, 200):
        freqs = torch.full((4, 1, 1, 2), float(step))
        repeated |= id(freqs) in ids
        ids.add(id(freqs))
        cos, _ = tables.tables(freqs, torch.float32, 1.0)
        assert torch.equal(cos, freqs.flatten(1).cos())
        del freqs
    assert repeated


def test_tables_keep_neither_the_frequencies_nor_the_object_alive() -> None:
    """Whichever of both dies first."""
    tables, freqs = RotaryTables(), frequencies()
    cos, _ = tables.tables(freqs, torch.float32, 1.0)
    dying = weakref.ref(tables), weakref.ref(freqs)
    del tables
    gc.collect()
    assert dying[0]() is None and dying[1]() is not None
    del freqs
    assert dying[1]() is None and cos.shape == (32, 8)


# -- Megatron's bits -----------------------------------------------------------------------------


@pytest.mark.megatron
def test_frequencies_come_once_from_megatrons_embedding_and_so_do_the_tables(rope_utils: ModuleType) -> None:
    """`RotaryEmbedding` caches its result, which is what makes the tables last over layers and steps."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megagraph.demo.cpu import megatron_on_cpu

    group = mock.Mock(size=lambda: 1, rank=lambda: 0)
    with megatron_on_cpu():
        embedding = RotaryEmbedding(kv_channels=8, rotary_percent=1.0, use_cpu_initialization=True)
        first, second = (embedding(32, packed_seq=True, cp_group=group) for _ in range(2))
    tables = RotaryTables()
    once = tables.tables(first, torch.bfloat16, 1.0)
    assert tables.tables(second, torch.bfloat16, 1.0)[0] is once[0]
    assert torch.equal(first.cpu(), frequencies())
