# SPDX-License-Identifier: Apache-2.0
"""Models whose context-parallel ranks share every pack: graphs have the bits of eager, and eager is right."""

from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any, NamedTuple

import context_jobs
import pytest
import torch
from context_models import EMPTY_DUMMY, MANY_KINDS, OF_ENGINE, ROUTERS
from megatron.core.transformer.enums import AttnMaskType
from megatron_rig import needs_engine
from torch import Tensor, distributed
from worlds import World, Worlds

from megagraph.modules import VarlenAttention
from megagraph.packs.ops import thd_partition_indices

pytestmark = pytest.mark.megatron

ON_GPU = torch.cuda.is_available()
# Over the largest entry: sums over rows in another order, in float32 on the CPU, in bfloat16 on a GPU.
BOUND = 5e-2 if ON_GPU else 2e-5
Options = dict[str, Any]
EXPERTS: Options = {"model": {"experts": True}}
MISFITS: Options = {"misfits": True, "has_tails": False}
engine = [pytest.mark.gpu, needs_engine]
both = pytest.mark.both


def spread(mla: str | None = None, **options: Any) -> Options:
    """Experts over both ranks."""
    model = {"experts": True, "mla": mla}
    return {"model": model, "plugin": ROUTERS, "expert_model_parallel_size": 2, **MANY_KINDS, **options}


TRAININGS: dict[str, tuple[Any, Options]] = {
    "heads exchanged": (both, {"cp_comm_type": "a2a"}),
    "packs that fit no capacity": (both, MISFITS),
    "a tail that is a document": (both, {"plugin": EMPTY_DUMMY}),
    # Bug: longer than a rank's rows, which is 64, the longest document could not be said.
    "a longest document that is said": ((), {"plugin": {"max_seqlen": 112}}),
    "experts": (both, spread(**MISFITS)),
    "MLA experts": ((), spread("plain, RoPE", **MISFITS)),
    # Megatron makes its table on a GPU.
    "MLA experts, YaRN": (pytest.mark.gpu, spread("low rank, YaRN", **MISFITS)),
    "experts beside tensor parallelism": (
        both,
        {
            **EXPERTS,
            "tp_size": 2,
            "sequence_parallel": True,
            "plugin": ROUTERS,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    **{
        f"Transformer Engine, {name}, {tail}": (
            engine,
            {
                **{"num_steps": 10, "model": {"engine": True, **model}, **options},
                "plugin": {**EMPTY_DUMMY, "tail": tail, **scopes},
            },
        )
        # The zero-valid document at the end, and rows that no offset tells of.
        for tail in ("hidden", "empty-dummy")
        for name, (model, scopes, options) in OF_ENGINE.items()
    },
    **{
        f"Transformer Engine, {comm_type}": (engine, {"model": {"engine": True}, "cp_comm_type": comm_type})
        for comm_type in ("a2a", "all_gather")
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks) for name, (marks, _options) in TRAININGS.items()]
)
def test_graphs_have_eager_bits(worlds: Worlds, name: str) -> None:
    _marks, options = TRAININGS[name]
    reports = worlds.of(2 * options.get("tp_size", 1)).run(context_jobs.train_shared, cp_size=2, **options)
    reasons = {"WARMING_UP", *["TOO_MANY_SEQUENCES"] * options.get("misfits", False)}
    for report in reports:
        assert report["failures"] == [] and set(report["eager"]) == reasons
        assert report["eager"] == reports[0]["eager"] and report["replays"] > 0
        assert 0 < report["padding_share"] < 1


def test_capacities_are_learned(world2: World) -> None:
    plugin = {"cuda_graph_max_packed_seqs": (), "max_seqlen_per_dp_cp_rank": None}
    reports = world2.run(context_jobs.train_shared, cp_size=2, has_tails=False, plugin=plugin)
    assert reports[0]["capacities"] == reports[1]["capacities"]
    for report in reports:
        (capacity, *_) = report["capacities"]
        assert capacity["max_seqlen"] == 2 * capacity["tokens"] and report["replays"] > 0


MODELS: dict[str, Options] = {
    "gathered": {"num_attention_heads": 4},
    "heads exchanged": {"num_attention_heads": 4, "cp_comm_type": "a2a"},
    "mla": {"model": {"mla": "low rank, RoPE"}},
    "mla, heads exchanged": {"model": {"mla": "plain, RoPE"}, "cp_comm_type": "a2a"},
    "experts": EXPERTS,
    "a tail that is a document": {"plugin": EMPTY_DUMMY},
    "Transformer Engine": {"model": {"engine": True}},
}
MARKS = {"experts": both, "a tail that is a document": both, "Transformer Engine": engine}
# Other models of these: test_dynamic_context.py.
SAY_WHO_SHARES_THEM = ("experts", "Transformer Engine")


@pytest.mark.parametrize(
    ("ranks", "case", "is_static"),
    [
        *(
            pytest.param(4 if case == "gathered" else 2, case, True, marks=MARKS.get(case, ()))
            for case in MODELS
        ),
        *(
            pytest.param(2, case, False, marks=engine if "Engine" in case else ())
            for case in SAY_WHO_SHARES_THEM
        ),
    ],
)
def test_each_rank_has_its_share_of_whole_packs(
    worlds: Worlds, ranks: int, case: str, is_static: bool
) -> None:
    """Of documents, too, that end right at, before or behind each border between two ranks' rows.

    Losses of routers are those of whole packs, and are logged as these. Bug: in 0.16 they weighed the less
    the more ranks shared a pack, where losses are per token. Where all packs are shared alike that is
    Megatron's own, and all weigh alike.
    """
    options = {"cp_size": ranks, "is_static": is_static, **MODELS[case]}
    if case == "experts":
        options["calculate_per_token_loss"] = not is_static
    for losses, gradients, metrics in worlds.of(ranks).run(context_jobs.beside_one_process, **options):
        assert losses <= BOUND and gradients <= BOUND and metrics <= BOUND
        assert metrics >= 0 or case != "experts"


# -- attention alone -------------------------------------------------------------------------------------


class Heads(NamedTuple):
    """Sizes of an attention."""

    queries: int  # heads
    groups: int  # of queries that share a key
    dim: int  # of queries and keys
    values: int  # dimensions of values


HEADS = {"grouped queries": Heads(8, 4, 16, 16), "mla": Heads(4, 4, 48, 32)}
# One document; several, of which a few are empty; rows past the end.
PACKS = ((64,), 0), ((8, 0, 40, 16, 0), 0), ((16, 8), 24)
# On a GPU partial gradients are rounded before they travel.
ATTENTION_BOUND = 2e-2 if ON_GPU else 2e-6


def _pack(lengths: tuple[int, ...], device: str, **shared: Any) -> Any:
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return SimpleNamespace(
        **{"qkv_format": "thd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets},
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), None),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(lengths)),
        **shared,
    )


def _run(comm_type: str | None, qkv: list[Tensor], grad: Tensor, pack: Any) -> list[Tensor]:
    config = SimpleNamespace(
        attention_dropout=0.0, context_parallel_size=1, apply_query_key_layer_scaling=False
    )
    module = VarlenAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type=comm_type)
    leaves = [rows.clone().requires_grad_() for rows in qkv]
    out = module(*leaves, None, packed_seq_params=pack)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def attend(comm_type: str | None, heads: Heads, lengths: tuple[int, ...], tail: int) -> None:
    """For this rank's rows of a pack, and for all of them alone."""
    group = distributed.group.WORLD
    assert group is not None
    size, rank = group.size(), group.rank()
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    end, generator = sum(lengths), torch.Generator().manual_seed(11)
    shapes = (heads.queries, heads.dim), (heads.groups, heads.dim), (heads.groups, heads.values)
    rows = [torch.randn(end + tail, *shape, generator=generator) for shape in shapes]
    rows.append(torch.randn(end + tail, heads.queries * heads.values, generator=generator))
    for tensor in rows:
        tensor[end:] = float("nan")
    *qkv, grad = (tensor.to(device, dtype) for tensor in rows)
    alone = _run(comm_type, qkv, grad, _pack(lengths, device))
    mine = thd_partition_indices(_pack(lengths, device).cu_seqlens_q, end + tail, size, rank).long()
    shared = _pack(lengths, device, local_cp_size=size, cp_group=group)
    local = [tensor[mine] for tensor in qkv]
    ours, again = (_run(comm_type, local, grad[mine], shared) for _ in range(2))
    for name, one, other, whole in zip(("out", "q", "k", "v"), ours, again, alone, strict=True):
        assert not one[end // size :].any(), f"the tail of {name}"
        assert torch.equal(one, other), name
        distance = (one.double() - whole[mine].double()).abs().max() / whole.double().abs().max()
        assert distance <= ATTENTION_BOUND, f"{name}: {distance}"


def attend_in_each() -> None:
    for (lengths, tail), heads, comm_type in product(PACKS, HEADS.values(), (None, "a2a")):
        attend(comm_type, heads, lengths, tail)


def test_each_rank_has_its_rows_of_the_whole(world4: World) -> None:
    world4.run(attend_in_each)
