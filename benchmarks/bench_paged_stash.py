# SPDX-License-Identifier: Apache-2.0
"""What a paged stash of grouped experts could save at most, and what copies alone would cost it.

It would keep what backwards read of routed rows in pages, for the rows that came, and nothing in the pools of
slots. Each such byte would be copied there and back. Here as many are copied, in one piece, beside the step
and waiting for nothing of it: no pages, counts or order, nor a layer's buffers, to which a stash is unpacked.
So both figures are kinder than such a stash. Beside it stand products whose inputs are made again, and a
capacity of half a pack; then what upstream's stash asks for and finds.
"""

import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.graph import saved_tensors_hooks

import megagraph
from benchmarks.measuring.children import Answer, caught, measure_part, parts_of
from benchmarks.measuring.clocks import Call, copy_of, in_turns
from benchmarks.measuring.results import Figure, against, in_mib, timed
from benchmarks.subjects.hosts import check_replays, install_for, made_quickly, recorded
from benchmarks.subjects.packs import MICRO_BATCHES, a_pack, model_options, swiglu_experts
from benchmarks.subjects.steps import StepTrainer, batch_of, without_collection
from megagraph.megatron.specs import get_gpt_layer_varlen_spec, with_grouped_experts

FULL, HALF = 8192, 4096  # tokens of packs; routed rows of both fill pages
EXPERTS, TOPK, LAYERS = 64, 8, 4
SLOTS = {f"slots: {count}": count for count in (1, 4)}
MODEL = model_options(1024, layers=LAYERS, tokens=FULL)
CONFIG = swiglu_experts(EXPERTS, topk=TOPK, inner=512)
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True}
WARM_UP, ROUNDS = 4, 10
BYTES_BAR, TIME_BAR = 0.75, 1.03  # of what there is, with half-full packs
FILLS = {"half-full packs": HALF, "full packs": FULL}
# By name, capacity and further config.
KEPT, AGAIN, SMALL = "all kept", "inputs of products made again", f"a capacity of {HALF}"
WAYS: dict[str, tuple[int, dict[str, Any]]] = {KEPT: (FULL, {}), AGAIN: (FULL, RECOMPUTE), SMALL: (HALF, {})}
ALONE, BESIDE = "alone", "beside"


def _routed_bytes(trainer: StepTrainer, batch: dict[str, Any]) -> int:
    """What all layers of an eager micro-batch keep of routed rows; the pack is padded."""
    found: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        if saved.dim() == 0 or saved.size(0) != FULL * TOPK:
            return saved
        found[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved.detach()

    with saved_tensors_hooks(keep, lambda kept: kept):
        trainer.wall_ms([batch], graphs=False)
    return sum(found.values())


def measure_way(slots: int, way: str) -> Answer:
    """Bytes of the `pool`, and a slot's of `routed` rows; by fill walls in ms, `ALONE` or `BESIDE` copies."""
    tokens, further = WAYS[way]
    install_for(tokens, 8, cuda_graph_slots=slots, cuda_graph_warmup_steps=2)
    spec = with_grouped_experts(get_gpt_layer_varlen_spec(num_experts=EXPERTS, moe_grouped_gemm=False))
    trainer = made_quickly(StepTrainer, MODEL, beside=True, spec=spec, config={**CONFIG, **further})
    stream = torch.cuda.Stream()
    packs = {fill: a_pack(rows) for fill, rows in FILLS.items() if rows <= tokens}
    steps = {fill: [batch_of(pack, trainer.device)] * MICRO_BATCHES for fill, pack in packs.items()}
    for batches in [*steps.values()] * WARM_UP:
        trainer.wall_ms(batches, graphs=True)
    routed, report = _routed_bytes(trainer, batches[0]), megagraph.reports()[-1]
    check_replays(report, "DISABLED")
    answer: Answer = {"pool": report["pool_bytes"], "routed": routed}
    for fill, batches in steps.items():
        copy = copy_of(max(routed // LAYERS * FILLS[fill] // FULL, 1))
        copies = recorded(lambda copy=copy: [copy() for _ in range(2 * LAYERS)])  # type: ignore[misc]
        answer[fill] = {ALONE: [], BESIDE: []}
        with without_collection():
            for _, how in in_turns((ALONE, BESIDE), ROUNDS):
                beside = [copies] * MICRO_BATCHES if how == BESIDE else []
                answer[fill][how].append(trainer.wall_ms(batches, graphs=True, beside=beside, on=stream))
    return answer


def measure_upstream() -> Answer:
    """What each thing that `moe_paged_stash` needs says; nothing where it is there."""
    core = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
    engine, group = partial(importlib.import_module, package="transformer_engine.pytorch"), distributed.group
    how = {"num_experts": EXPERTS, "max_tokens_per_rank": FULL, "hidden_dim": MODEL.hidden}
    how |= {"recv_capacity_per_rank": FULL * TOPK}

    def mark() -> None:
        if not engine(".ops.fused.grouped_mlp").GroupedMLP_CuTeGEMMGLU.is_supported():
            raise RuntimeError("the fused ones, which alone mark anything, do not support this GPU")

    asked: dict[str, Call] = {
        "NCCL-EP, as megatron-core starts it": lambda: core.ensure_nccl_ep_bootstrapped(group.WORLD, **how),
        "NCCL-EP on one rank": lambda: engine(".ep").ep_bootstrap(group.WORLD, **how, num_topk=TOPK),
        "HybridEP": lambda: importlib.import_module("deep_ep").HybridEPBuffer,
        "experts of the op fuser that mark what they save": mark,
    }
    answers = {what: caught(lambda ask=ask: {"got": ask()}) for what, ask in asked.items()}  # type: ignore[misc]
    return {what: answer.get("error", "") for what, answer in answers.items()}


PARTS = {"upstream": measure_upstream, **parts_of(measure_way, SLOTS, WAYS)}


def _figures_of(title: str) -> list[Figure]:
    of = {way: measure_part(__name__, f"{title}: {way}") for way in WAYS}
    pool, routed = of[KEPT]["pool"], SLOTS[title] * of[KEPT]["routed"]
    figures = [in_mib(f"{title}: {KEPT}, routed rows in the pools", routed)]
    for fill, tokens in FILLS.items():
        walls, where = of[KEPT][fill], f"{title}, {fill}"
        is_half = tokens == HALF
        least = {"a stash, at least": (pool - routed * (1 - tokens / FULL), walls[BESIDE])}
        ways = (AGAIN, SMALL) if is_half else (AGAIN,)
        held = {way: (of[way]["pool"], of[way][fill][ALONE]) for way in ways}
        for way, (size, times) in {**least, **held}.items():
            pools = in_mib(f"{where}: {way}, pools", size)
            step = timed(f"{where}: {way}, a step, median", times, "ms")
            figures.append(against(pools, KEPT, pool, share=BYTES_BAR if is_half else None))
            figures.append(against(step, KEPT, walls[ALONE], share=TIME_BAR if is_half else None))
    return figures


def _upstream_figures() -> list[Figure]:
    said = measure_part(__name__, "upstream", environment={"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"})
    of = partial(Figure, unit="there")
    return [of(name=f"upstream: {it}", value=int(not no), rival=no or None) for it, no in said.items()]


FIGURES = {**{title: partial(_figures_of, title) for title in SLOTS}, "upstream": _upstream_figures}
