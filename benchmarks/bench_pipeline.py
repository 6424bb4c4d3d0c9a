# SPDX-License-Identifier: Apache-2.0
"""Pipelines: what slots cost, memory of a stage, bits of every stage, and trainings of two ranks.

What a stage does depends on its order of forwards and backwards alone. So time by slots, memory and the bits
of larger pipelines are of one stage in one process, with recorded activations in place of what stages send
("one stage alone"). The trainings are of real ranks; where there is one GPU they share it, and what they
send goes over sockets: such times tell nothing of ranks on GPUs of their own. Bits and trainings are with
deterministic algorithms, eager and graphed alike; the last training leaves its report. Each part runs in a
process of its own.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.figures import Measurement, plain, timed, timed_ratio
from benchmarks.measuring.results import Figure
from benchmarks.subjects import orders, pipelines
from benchmarks.subjects.hosts import answer_ours
from benchmarks.subjects.packs import model_options
from benchmarks.subjects.pipelines import Cut
from benchmarks.subjects.ranks import on_ranks
from benchmarks.subjects.stages import DETERMINISTIC, LAYERS
from megagraph.decide.in_flight import StageSchedule

MIB = 2**20
SLOTS = (1, 4, 16)
SLOTS_MODEL = model_options(512, layers=4 * orders.IN_THE_MIDDLE.stages, tokens=512)
# Stage 0, which has the most in flight.
MEMORY = {
    "stage 0 of PP=4, 12 layers": StageSchedule(stages=4),
    "stage 0 of PP=4, 2 chunks of 6 layers": StageSchedule(stages=4, chunks=2),
}
MEMORY_MODEL = model_options(1024, layers=48, tokens=4096)
MEMORY_NAME = "hidden 1024, full packs of 4096"
HOW = ("eager", "graphed")
PEAK = 1.10
ORDERS = {f"PP={stages}, {chunks} chunks": (stages, chunks) for stages, chunks in ((4, 2), (8, 4))}
REPLAYS = 5_000  # of each of `ORDERS` and kind of layers, all stages together
CUTS = {cut.name: cut for cut in (Cut(), Cut(chunks=2))}
RANKS = 2


def _of(layers: str, what: str) -> str:
    """The name of a part."""
    return f"{what}, {layers} layers"


def _slot_figures() -> list[Figure]:
    found = measure_part(__name__, "slots")
    one, *others = (found[str(slots)] for slots in SLOTS)
    name = "one stage alone, hidden 512, 4 layers"
    figures = [timed(f"{name}, one slot: host time of a micro-batch", one["host"], "us")]
    for slots, of in zip(SLOTS[1:], others, strict=True):
        title = f"{name}, {slots} slots that micro-batches take in turns"
        beside = {"rival": "one slot", "rival_value": median(one["host"])}
        figures += [
            timed(f"{title}: host time of a micro-batch", of["host"], "us", **beside),
            timed_ratio(f"{title}: its host time over that of one", of["host"], one["host"], "x", bar=1.03),
            Figure(
                name=f"{title}: launches of graphs in a micro-batch",
                value=of["launches"],
                unit="launches",
                bar=one["launches"],
            ),
        ]
    return figures


def _measured_memory(name: str) -> Answer:
    return {how: measure_part(__name__, f"{name}: {how}") for how in HOW}


def _memory_figures(name: str, found: Answer) -> list[Figure]:
    eager, graphed = (found[how] for how in HOW)
    few, many = (pool / MIB for pool in graphed["pools"])
    kept = graphed["slots"] * eager["kept"] / MIB
    title = f"one stage alone, {name}, {MEMORY_NAME}"
    peak = eager["reserved"] / MIB
    return [
        Figure(
            name=f"{title}: peak memory reserved",
            value=graphed["reserved"] / MIB,
            unit="MiB",
            bar=PEAK * peak,
            rival="eager, the same order",
            rival_value=peak,
        ),
        Figure(
            name=f"{title}: pools of the graphs after steps of {orders.MANY} micro-batches",
            value=many,
            unit="MiB",
            bar=few,
            rival=f"after steps of {orders.FEW}",
            rival_value=few,
        ),
        *plain(
            title,
            {
                "slots of all chunks": (graphed["slots"], "slots"),
                "graphs": (graphed["graphs"], "graphs"),
                "of the pools, what eager keeps of as many micro-batches": (kept, "MiB"),
                "of the pools, the rest: gradients, gaps, and what is temporary": (many - kept, "MiB"),
            },
        ),
    ]


def _measured_order(name: str) -> Answer:
    """Sums over all stages, each in a process of its own, side by side."""
    (stages,) = (stages for order, (stages, _) in ORDERS.items() if name.startswith(order))
    ask = partial(measure_part, __name__, environment=DETERMINISTIC)
    with ThreadPoolExecutor(stages) as pool:
        found = [*pool.map(ask, (f"{name}, stage {stage}" for stage in range(stages)))]
    return {key: sum(of_stage[key] for of_stage in found) for key in found[0]}


def _order_figures(name: str, found: Answer) -> list[Figure]:
    title = f"every stage alone of {name}, poisoned slots"
    return [
        Figure(
            name=f"{title}: values that differ from eager", value=found["differing"], unit="values", bar=0
        ),
        Figure(
            name=f"{title}: calls not replayed after the warm-up", value=found["eager"], unit="calls", bar=0
        ),
        Figure(
            name=f"{title}: stages without the slots of their schedule",
            value=found["unfit"],
            unit="stages",
            bar=0,
        ),
        *plain(title, {"replays": (found["replays"], "replays"), "steps": (found["steps"], "steps")}),
    ]


def _ranks() -> str:
    own = torch.cuda.device_count() >= RANKS
    return f"{RANKS} ranks {'on GPUs of their own' if own else 'that share a GPU'}"


def _training_figures(name: str, report: Path) -> list[Figure]:
    environment = {**DETERMINISTIC, "MEGAGRAPH_REPORT": str(report)}
    found = measure_part(__name__, name, environment=environment)
    title = f"{_ranks()}, {name}, hidden 1024, 8 layers, packs of up to 2048"
    walls = {how: timed(f"{title}, {how}: a step, median", found[how], "ms") for how in HOW}
    waits = [
        timed(f"{title}, {how}: host time for shapes in a step, median", found[f"{how} waits"], "ms")
        for how in HOW
    ]
    counts = {
        "values that differ from eager": (found["differing"], "values"),
        "calls of cudaMalloc after the first 10": (found["allocations"], "calls"),
        "graphs captured after the first 10": (found["late"], "graphs"),
        "chunks with other slots than their schedule needs": (found["unfit"], "chunks"),
    }
    checked = [
        Figure(name=f"{title}, {pipelines.STEPS} steps: {what}", value=value, unit=unit, bar=0)
        for what, (value, unit) in counts.items()
    ]
    return [*walls.values(), *waits, *checked]


def measure(measurement: Measurement) -> None:
    """Measures slots, memory, trainings and orders."""
    measurement.take("slots", _slot_figures)
    measurement.take_side_by_side(dict.fromkeys(MEMORY, _memory_figures), _measured_memory)
    for cut in CUTS:
        for layers in LAYERS:
            name = _of(layers, cut)
            report = measurement.path.with_name(f"{measurement.path.stem}_report.json")
            measurement.take(name, partial(_training_figures, name, report))
    orders_of = [_of(layers, name) for name in ORDERS for layers in LAYERS]
    measurement.take_side_by_side(dict.fromkeys(orders_of, _order_figures), _measured_order)


def _train(cut: Cut, layers: str) -> None:
    model = model_options(1024, layers=8, tokens=2048)
    ranks: Sequence[Answer] = on_ranks(RANKS, pipelines.train, model, cut, layers)
    slowest = {how: [*map(max, *(rank[how] for rank in ranks))] for how in HOW}
    waits = {name: ranks[-1][name] for name in (f"{how} waits" for how in HOW)}
    counts = {key: sum(rank[key] for rank in ranks) for key in ("differing", "allocations", "late", "unfit")}
    print(json.dumps({**slowest, **waits, **counts}), flush=True)


def _parts() -> dict[str, Callable[[], None]]:
    """What runs in processes of their own, by name."""
    ours = partial(partial, answer_ours, seeded=True)
    parts: dict[str, Callable[[], None]] = {}
    parts["slots"] = ours(partial(orders.measure_slots, SLOTS_MODEL, SLOTS))
    for name, schedule in MEMORY.items():
        for how in HOW:
            measured = partial(orders.measure_memory, MEMORY_MODEL, schedule, graphs=how == "graphed")
            parts[f"{name}: {how}"] = ours(measured)
    for layers in LAYERS:
        for name, (stages, chunks) in ORDERS.items():
            model = model_options(64, layers=stages * chunks, tokens=256, head_dim=32)
            for stage in range(stages):
                schedule = StageSchedule(stages=stages, stage=stage, chunks=chunks)
                measured = partial(orders.measure_order, model, schedule, layers, -(-REPLAYS // stages))
                parts[f"{_of(layers, name)}, stage {stage}"] = ours(measured)
        for name, cut in CUTS.items():
            parts[_of(layers, name)] = partial(_train, cut, layers)
    return parts


def answer(part: str) -> None:
    """A part, by its name."""
    _parts()[part]()
