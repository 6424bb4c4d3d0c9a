# SPDX-License-Identifier: Apache-2.0
"""More or less of a model in graphs: experts with more and more of their layers, and all layers in one graph.

Experts stand beside mode `eager`, on whose canonical packs everything runs; Transformer Engine's layers also
beside Megatron's own graphs of the same parts, which take no packs: on unpacked batches of as many tokens.
Graphs of all neighbouring layers stand beside a graph for each layer and beside eager, graphs disabled, in a
step that the host limits and in one that the GPU limits. Each part runs in a process of its own.
"""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

from benchmarks.measuring.children import Answer, measure_part, try_part
from benchmarks.measuring.clocks import MIB
from benchmarks.measuring.figures import Measurement, beside, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import Parts, answering, engines_spec
from benchmarks.subjects.packs import LAYER_KINDS
from benchmarks.subjects.steps import measure_rival, measure_steps, step_case
from megagraph.megatron.specs import get_gpt_layer_varlen_spec

EAGER, RIVAL = "mode eager", "Megatron's graphs"
SCOPES: Mapping[str, tuple[str, ...]] = {
    EAGER: (),
    "attn": ("attn",),
    "attn, moe_router": ("attn", "moe_router"),
    "attn, moe_router, moe_preprocess": ("attn", "moe_router", "moe_preprocess"),
}
PEAK_BAR, EXPERTS, ROUNDS = 1.05, 8, 9
CASE = step_case(1024, layers=8, tokens=4096)
GRANULARITIES = ("layer", "chunk")
CHUNKS = {
    "limited by the host, hidden 512, 24 layers, packs of 2048": step_case(512, layers=24, tokens=2048),
    "limited by the GPU, hidden 4096, 4 layers, packs of 8192": step_case(4096, layers=4, tokens=8192),
}
CHUNK_ROUNDS = 10  # of each distinct step


def _experts(is_engine: bool) -> dict[str, Any]:
    """Of a trainer: dropless, as most are trained."""
    kind = {"num_experts": EXPERTS, "moe_grouped_gemm": is_engine}
    return {
        "spec": (engines_spec if is_engine else get_gpt_layer_varlen_spec)(**kind),
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 1024,
        "moe_grouped_gemm": is_engine,
        "add_bias_linear": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
    }


def _scopes(is_engine: bool, scopes: str) -> Answer:
    return measure_steps(
        CASE,
        "graphed",
        rounds=ROUNDS,
        trainer=_experts(is_engine),
        cuda_graph_modules=SCOPES[scopes],
        mode="eager" if scopes == EAGER else "graph",
    )


def _megatrons(scopes: str) -> Answer:
    modules = SCOPES[scopes]
    return measure_rival(
        CASE, "transformer_engine", modules=modules, rounds=ROUNDS, packed=False, **_experts(True)
    )


def _parts() -> dict[str, Callable[[], Answer]]:
    parts: dict[str, Callable[[], Answer]] = {}
    for scopes in SCOPES:
        parts |= {f"{kind}: {scopes}": partial(_scopes, of, scopes) for kind, of in LAYER_KINDS.items()}
        parts[f"{RIVAL}: {scopes}"] = partial(_megatrons, scopes)
    for name, case in CHUNKS.items():
        for granularity in GRANULARITIES:
            rounds = CHUNK_ROUNDS * case.distinct_steps
            measured = partial(
                measure_steps, case, "graphed", "eager", rounds=rounds, trainer={"beside": True}
            )
            parts[f"{name}, {granularity}"] = partial(measured, cuda_graph_granularity=granularity)
    return parts


PARTS: Parts = _parts()
answer = answering(PARTS)


def figures_of(name: str, answer: Answer, eager: Answer | None) -> list[Figure]:
    """What one training came to, beside mode `eager`."""
    wall, reserved = (f"{name}: a step of four micro-batches", f"{name}: peak memory reserved")
    walls: dict[str, Any] = {}
    peaks: dict[str, Any] = {}
    if eager is not None:
        its, peak = median(eager["graphed"]), eager["reserved"] / MIB
        walls = {"rival": EAGER, "rival_value": its, "bar": its}
        peaks = {"rival": EAGER, "rival_value": peak, "bar": PEAK_BAR * peak}
    return [
        timed(wall, answer["graphed"], "ms", **walls),
        Figure(name=reserved, value=answer["reserved"] / MIB, unit="MiB", **peaks),
    ]


def _layer_figures(kind: str) -> list[Figure]:
    answers = {scopes: measure_part(__name__, f"{kind}: {scopes}") for scopes in SCOPES}
    figures: list[Figure] = []
    for scopes, answer in answers.items():
        eager = None if scopes == EAGER else answers[EAGER]
        figures += figures_of(f"{kind}: {scopes}", answer, eager)
        if LAYER_KINDS[kind] and eager is not None:
            rival = try_part(__name__, f"{RIVAL}: {scopes}")
            bar = None if "error" in rival else median(rival["walls"])
            figure = timed(
                f"{kind}: {scopes}: a step beside unpacked batches", answer["graphed"], "ms", bar=bar
            )
            figures.append(beside(figure, RIVAL, rival, lambda answer: median(answer["walls"])))
    return figures


def _chunk_figures(name: str) -> list[Figure]:
    figures = []
    for granularity in GRANULARITIES:
        title = f"{name}, {granularity}"
        found = measure_part(__name__, title)
        peak = Figure(name=f"{title}: peak memory reserved", value=found["reserved"] / MIB, unit="MiB")
        steps = {"a step": "graphed", "a step eager": "eager"}
        figures += [timed(f"{title}: {what}, median", found[of], "ms") for what, of in steps.items()]
        figures.append(peak)
    return figures


def measure(measurement: Measurement) -> None:
    """Measures each kind of layers, then each granularity."""
    for kind in LAYER_KINDS:
        measurement.take(kind, partial(_layer_figures, kind))
    for name in CHUNKS:
        measurement.take(name, partial(_chunk_figures, name))
