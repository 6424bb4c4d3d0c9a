# SPDX-License-Identifier: Apache-2.0
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from offsets import offsets, pack_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megagraph import _C
from megagraph._C import Capacity, PackForm, PackShape, VariantKey
from megagraph.packs.ops import TailConvention

HIDDEN, EMPTY_DUMMY = TailConvention
tails = pytest.mark.parametrize("tail", TailConvention)
CAPACITY = Capacity(tokens=64, num_seqs=8, max_seqlen=64)
Given = tuple[Tensor, Tensor | None]


@st.composite
def packs(draw: st.DrawFn) -> Given:
    """Actual and perhaps padded offsets of up to five documents, empty ones included."""
    lengths = draw(st.lists(st.integers(0, 5), max_size=5))
    if draw(st.booleans()):
        return offsets(lengths), None
    return offsets(lengths), offsets([length + draw(st.integers(0, 3)) for length in lengths])


CU, PADDED = offsets([2, 3]), offsets([4, 4])
PADDED_FORM = PackForm(True, False, None)
FORMS: list[tuple[Any, PackForm | None]] = [
    *((pack_of(cu), PackForm(False, False, None)) for cu in (CU, CU.clone())),
    (pack_of(CU, PADDED), PADDED_FORM),
    (pack_of(CU, CU), PackForm(False, True, None)),
    (pack_of(CU, seq_idx=torch.zeros(1, 5, dtype=torch.int32)), PackForm(False, False, None, True)),
    *((pack_of(CU, pad_between_seqs=said), PackForm(False, False, said)) for said in (None, False, True)),
    # Neither yes nor no.
    *((pack_of(CU, pad_between_seqs=said), None) for said in (1, "no")),
    # Views of one memory are the same offsets.
    (pack_of(CU, PADDED, cu_seqlens_kv=CU.view(-1), cu_seqlens_kv_padded=PADDED[:]), PADDED_FORM),
    # Bug: padded offsets that are the actual ones of the queries alone were counted, and not read.
    *((pack_of(CU, CU, **{f"cu_seqlens_{of}": CU.view(-1)}), PADDED_FORM) for of in ("kv", "kv_padded")),
    # Keys with offsets of their own, or fewer. To compare their values would wait for the device.
    (pack_of(CU, cu_seqlens_kv=CU[:2]), None),
    (pack_of(CU[:2], cu_seqlens_kv=CU[::2]), None),  # bug: other entries of one memory were the same offsets
    (pack_of(CU, PADDED, cu_seqlens_kv=CU.clone()), None),
    (pack_of(CU, PADDED, cu_seqlens_kv_padded=PADDED.clone()), None),
    *((pack_of(CU, PADDED, **{f"cu_seqlens_{of}": None}), None) for of in ("kv", "kv_padded", "q_padded")),
    # Bug: the reader took whatever it was given for a tensor, and the process died.
    *(
        (pack_of(CU, PADDED, **{f"cu_seqlens_{of}": given}), None)
        for of in ("q", "kv", "q_padded", "kv_padded")
        for given in ([0, 2, 5], "0 2 5")
    ),
    # Bug: these raised in an op, where Megatron alone trains.
    *(
        (pack_of(given, **{f"cu_seqlens_{of}": given}), None)
        for of in ("q_padded", "kv")
        for given in (CU.long(), torch.stack((CU, CU), 1)[:, 0], CU[None], CU[:0])
    ),
    # Bug: the reader raised, of what attention of a host's own may never look at.
    *((pack_of(CU, max_seqlen_q=longest), None) for longest in ([3], "long", float("inf"), 2**70, CU)),
]


@pytest.mark.parametrize(("pack", "form"), FORMS)
def test_the_form_of_a_pack(pack: Any, form: PackForm | None) -> None:
    assert PackForm.of(pack) == form


@given(
    lengths=st.lists(st.integers(0, 9), max_size=6),
    tokens=st.integers(0, 99),
    cp_size=st.sampled_from([1, 2, 4]),
    longest=st.integers(0, 99),
    on_host_tensor=st.booleans(),
    tail=st.sampled_from(TailConvention),
)
def test_a_shape_is_what_the_host_knows_and_the_tails_own_documents(
    lengths: list[int], tokens: int, cp_size: int, longest: int, on_host_tensor: bool, tail: TailConvention
) -> None:
    pack = pack_of(offsets(lengths), max_seqlen_q=torch.tensor(longest) if on_host_tensor else longest)
    expected = PackShape(tokens, len(lengths) + (1 if tail is EMPTY_DUMMY else 0), max(longest, 1), cp_size)
    assert PackShape.of(pack, tokens, tail.extra_seqs, cp_size) == expected


@tails
def test_nothing_on_the_device_is_read_and_what_is_not_known_may_be_one_document(tail: Any) -> None:
    """A fake tensor on a CUDA device has a shape and raises on every look at its values."""
    with FakeTensorMode():
        on_device = torch.empty(5, dtype=torch.int32, device="cuda")
        longest = torch.empty((), dtype=torch.int32, device="cuda")
    assert longest.is_cuda
    with pytest.raises(RuntimeError):
        int(longest)
    for declared in (longest, None):
        pack = pack_of(on_device, max_seqlen_q=declared, max_seqlen_kv=declared)
        shape = PackShape.of(pack, 8, tail.extra_seqs, 2)
        assert shape == PackShape(tokens=8, num_seqs=4 + tail.extra_seqs, max_seqlen=16, cp_size=2)


def test_what_is_no_pack_has_no_shape() -> None:
    assert PackShape.of(None, 8, 0) is None
    for change in ({"qkv_format": "sbhd"}, {"qkv_format": None}, {"cu_seqlens_q": None}):
        assert PackShape.of(pack_of(offsets([2]), **change), 8, 0) is None


def specs_of(tail: TailConvention, tokens: int, num_seqs: int, *, has_padded: bool) -> Any:
    """The offsets that graphs have a buffer for."""
    capacity = Capacity(tokens=tokens, num_seqs=num_seqs, max_seqlen=tokens)
    key = VariantKey(capacity, PackForm(has_padded, False, None), grad=False)
    layout = _C.CanonicalPacks(key, tail.extra_seqs).layout(
        rows=tokens, valid_tokens=torch.zeros(1, dtype=torch.int64), freqs=None, masks_tail=False
    )
    return {name: spec for name, spec in layout.metadata if name in ("actual", "padded")}


@tails
@given(pack=packs(), tail_rows=st.integers(0, 9), spare=st.integers(0, 3))
def test_canonical_offsets_follow_the_convention(tail: Any, pack: Given, tail_rows: int, spare: int) -> None:
    """Each row of the table: what the actual and what the padded offsets hold past the last document."""
    sources = [given for given in pack if given is not None]
    actual, physical = sources[0].tolist(), sources[-1].tolist()
    tokens, extra = physical[-1] + tail_rows, max(tail.extra_seqs + spare, len(actual) == 1)
    assume(tokens > 0)  # or there is no capacity
    expected = {"actual": actual + [actual[-1]] * extra}
    if tail is EMPTY_DUMMY:
        expected["padded"] = physical + [tokens] * extra
    elif len(sources) > 1:
        expected["padded"] = physical + [physical[-1]] * extra
    buffers = specs_of(tail, tokens, len(actual) - 1 + extra, has_padded=len(sources) > 1)
    found = {name: spec.content(spec.buffer(), sources, 0) for name, spec in buffers.items()}
    assert {name: ends.tolist() for name, ends in found.items()} == expected


# What packs of a release carry.
FIELDS = (*vars(pack_of(CU)), "pad_between_seqs")
Pack = dataclasses.make_dataclass("Pack", [(name, Any, None) for name in FIELDS])


def made(form: PackForm | None, tail: TailConvention, *offsets: Tensor) -> Any:
    return _C.CanonicalPacks(VariantKey(CAPACITY, form, grad=False), tail.extra_seqs).make(Pack, *offsets)


@tails
@pytest.mark.parametrize("has_padded", [True, False])
@pytest.mark.parametrize("said", [None, False, True])
def test_canonical_packs_hold_shared_constants(tail: TailConvention, has_padded: bool, said: Any) -> None:
    """Padded offsets that are the actual ones stay so: for two objects engines have another kernel."""
    cu = offsets([2, 3])
    form = PackForm.of(pack_of(cu, cu.clone() if has_padded else None, pad_between_seqs=said))
    given = [cu.clone() for _ in specs_of(tail, CAPACITY.tokens, 8, has_padded=has_padded)]
    pack = made(form, tail, *given)
    assert pack.qkv_format == "thd"
    assert (pack.max_seqlen_q, pack.max_seqlen_kv) == (64, 64)
    for side in ("q", "kv"):
        assert getattr(pack, f"cu_seqlens_{side}") is given[0]
        assert getattr(pack, f"cu_seqlens_{side}_padded") is (given[1] if given[1:] else None)
    # A tail that is padded but not valid needs it said, whatever the pack said.
    assert pack.pad_between_seqs is (True if tail is EMPTY_DUMMY else said)

    aliased = made(PackForm.of(pack_of(cu, cu)), TailConvention.HIDDEN, cu)
    for side in ("q", "kv"):
        assert getattr(aliased, f"cu_seqlens_{side}_padded") is getattr(aliased, f"cu_seqlens_{side}")
