# SPDX-License-Identifier: Apache-2.0
"""Packs that ranks share in groups of several sizes: memory of their graphs, trainings, a long document.

Pools of several sizes stand beside those of the largest alone, on one GPU where every other rank is a
pretence: torch's fake process groups do nothing. So shapes, kernels and pools are those of one rank of eight,
what comes from other ranks is whatever the memory held, and NCCL has no memory of its own. The rest is of
real ranks. Where there is one GPU they share it, and what they send goes over sockets: such times compare
ways to train with each other, and tell nothing of ranks on GPUs of their own. Where there are two, these run
a long document, too. Each part runs in a process of its own.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed

from benchmarks.measuring.children import Answer, measure_part
from benchmarks.measuring.clocks import MIB
from benchmarks.measuring.figures import Measurement, timed
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import (
    Parts,
    answering,
    check_replays,
    install,
    of_slowest,
    on_ranks,
    seed_streams,
)
from benchmarks.subjects.inside import pretended_ranks
from benchmarks.subjects.packs import model_options
from benchmarks.subjects.steps import Batch, StepTrainer, rows_of, without_collection
from megagraph import megatron
from megagraph.cli.demo import quiet_megatron
from megagraph.decide.dispatch import Capacity
from megagraph.demo.lengths import lognormal_lengths
from megagraph.demo.trainer import ModelOptions
from megagraph.megatron.parallel.context import ContextGroups
from megagraph.megatron.scheduled_steps import MicroBatch, ScheduledSteps
from megagraph.packs.schedule import ScheduleLimits

NUM_SEQS = 32  # of the packs of simulated ranks
REPLAYED_STEPS = 2
MAX_SEQS = 64
DOCUMENTS = 32  # of a rank and step
WARM_UP_STEPS, STEPS = 4, 8
ROUNDS = 10  # of a long document, after the warm-up


class SharingTrainer(StepTrainer):
    """A model whose batches say by how many ranks they are shared."""

    def params_of(self, batch: Batch) -> Any:
        params = super().params_of(batch)
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = batch["offsets"].clone()
        params.local_cp_size, params.cp_group = batch["cp_size"], batch["cp_group"]
        return params


def batch_of(groups: ContextGroups, size: int, documents: int, length: int, device: torch.device) -> Batch:
    """Documents of one length, shared by so many ranks."""
    tokens = torch.randint(256, (1, documents * length // size), device=device)
    offsets = torch.arange(0, (documents + 1) * length, length, dtype=torch.int32, device=device)
    return {
        **{"tokens": tokens, "labels": tokens, "mask": torch.ones_like(tokens)},
        **{"positions": torch.zeros_like(tokens), "offsets": offsets, "longest": length},
        **{"cp_size": size, "cp_group": groups.of_size(size)},
    }


def measure_pools(model: ModelOptions, cp_sizes: Sequence[int]) -> Answer:
    """Graphs and their pools, where packs may be shared in groups of these sizes.

    Nothing is verified: eager and graphs would read different remains of other memory.
    """
    rows, documents = model.max_tokens, NUM_SEQS // 2
    with pretended_ranks(cp_sizes) as groups:
        install(
            cuda_graph_max_packed_seqs=(NUM_SEQS,),
            max_seqlen_per_dp_cp_rank=rows,
            cp_sizes=cp_sizes,
            cuda_graph_warmup_steps=1,
            verify="off",
        )
        trainer = SharingTrainer(model, calculate_per_token_loss=True)
        lengths = {size: rows * size // documents // (2 * size) * 2 * size for size in groups.cp_sizes}
        batches = [
            batch_of(groups, size, documents, length, trainer.device) for size, length in lengths.items()
        ]
        for _ in range(1 + REPLAYED_STEPS):
            trainer.wall_ms(batches, graphs=True)
        report = megatron.reports()[-1]
        check_replays(report)
        replayed = {size: counts.get("replayed", 0) for size, counts in report["cp_sizes"].items()}
        if set(replayed.values()) != {REPLAYED_STEPS}:
            raise RuntimeError(f"expected {REPLAYED_STEPS} replays of each size, got {replayed}")
        return {"graphs": report["graphs"], "pools": report["pool_bytes"]}


class ScheduledTrainer(StepTrainer):
    """A model on scheduled packs, which may say by how many ranks they are shared. Losses are per token."""

    def __init__(self, options: ModelOptions, *, names_ranks: bool, **transformer: Any) -> None:
        self._names_ranks = names_ranks
        super().__init__(options, calculate_per_token_loss=True, **transformer)

    def _forward_step(self, packs: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        batch: MicroBatch = next(packs)
        params = batch.packed_seq_params
        if not self._names_ranks:
            params = copy.copy(params)
            params.local_cp_size = params.cp_group = None
        rows = rows_of({**batch.tensors, "positions": batch.position_ids})
        return model(**rows, packed_seq_params=params), partial(_sums, mask=batch.tensors["mask"])


def _sums(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss = (losses.float() * mask).sum()
    return loss, mask.sum().int(), {"loss": loss.detach().clone()}


def _lengths(step: int, rank: int) -> list[int]:
    """Of a rank's documents, those of `mlm-dcp`; the same at every call."""
    seed = 1000 * step + rank
    drawn = lognormal_lengths(DOCUMENTS, mean=1024, sigma=1.5, minimum=128, maximum=8192, seed=seed)
    lengths: list[int] = drawn.tolist()
    return lengths


def _document(length: int) -> dict[str, Tensor]:
    tokens = torch.arange(length) % 256
    mask = torch.ones(length)
    mask[-1] = 0  # its last token has no label
    return {"tokens": tokens, "labels": tokens.roll(-1), "mask": mask}


def _in_step(run: Callable[[], float]) -> float:
    """What it answers, begun on all ranks at once."""
    distributed.all_reduce(torch.zeros(1, device="cuda"))
    return run()


def _start(context_parallel_size: int = 1) -> None:
    """Makes Megatron's groups."""
    from megatron.core import parallel_state

    quiet_megatron()
    parallel_state.initialize_model_parallel(context_parallel_size=context_parallel_size)
    seed_streams()


def _end() -> None:
    """Graphs go before their groups."""
    from megatron.core import parallel_state

    megatron.uninstall()
    parallel_state.destroy_model_parallel()


def train(model: ModelOptions, *, is_static: bool) -> Answer:
    """Trains on lognormal documents, on packs of as many rows on each rank; this rank's part.

    If it `is_static` all ranks share every pack, as the model's own context parallelism; else each pack has
    as many as it needs. Answers `graphed` and `eager`, walls in ms of the same steps, eager on canonical
    packs; and the `tokens` of all ranks in each.
    """
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    _start(ranks if is_static else 1)
    sizes = (ranks,) if is_static else tuple(2**power for power in range(ranks.bit_length()))
    groups = megatron.context_groups(sizes)
    rows = model.max_tokens
    limits = ScheduleLimits(
        ranks=ranks, cp_sizes=sizes, max_seqlen_per_dp_cp_rank=rows, max_packed_seqs=MAX_SEQS
    )
    capacity = {"cuda_graph_max_packed_seqs": (MAX_SEQS,), "max_seqlen_per_dp_cp_rank": rows}
    install(cp_sizes=() if is_static else sizes, cuda_graph_warmup_steps=1, **capacity)
    own = {"context_parallel_size": ranks} if is_static else {}
    trainer = ScheduledTrainer(model, names_ranks=not is_static, **own)
    documents = [[*map(_document, _lengths(step, rank))] for step in range(WARM_UP_STEPS + STEPS)]
    config, device = trainer.chunk.config, trainer.device
    steps = [*ScheduledSteps(documents, limits=limits, groups=groups, config=config, device=device)]
    found: Answer = {"graphed": [], "eager": []}
    for step in steps[:WARM_UP_STEPS]:
        trainer.wall_ms(step, graphs=True)
    with without_collection():
        for step in steps[WARM_UP_STEPS:]:
            for name, walls in found.items():
                walls.append(_in_step(partial(trainer.wall_ms, step, graphs=name == "graphed")))
    check_replays(megatron.reports()[-1], "DISABLED")
    _end()
    every = range(WARM_UP_STEPS, WARM_UP_STEPS + STEPS)
    return {**found, "tokens": [sum(sum(_lengths(step, each)) for each in range(ranks)) for step in every]}


def run_document(model: ModelOptions) -> Answer:
    """A step of one document, on every rank alone and on all of them; this rank's part.

    Answers walls in ms, `eager` and `graphed`, of each number of ranks: `1 eager` and so on.
    """
    _start()
    ranks, length = distributed.get_world_size(), model.max_tokens
    sizes = (1, ranks)
    groups = megatron.context_groups(sizes)
    rows = [length // size for size in sizes]
    capacities = tuple(Capacity(tokens=each, num_seqs=1, max_seqlen=each) for each in rows)
    install(capacities=capacities, cp_sizes=sizes, cuda_graph_warmup_steps=1, verify="off")
    trainer = SharingTrainer(model, calculate_per_token_loss=True)
    batches = {size: batch_of(groups, size, 1, length, trainer.device) for size in sizes}
    found: Answer = {}
    for size, batch in batches.items():
        for name in ("graphed", "eager"):
            run = partial(trainer.wall_ms, [batch], graphs=name == "graphed")
            walls = [_in_step(run) for _ in range(WARM_UP_STEPS + ROUNDS)]
            found[f"{size} {name}"] = walls[WARM_UP_STEPS:]
    check_replays(megatron.reports()[-1], "DISABLED")
    _end()
    return found


POOLS = model_options(2048, layers=8, tokens=8192, head_dim=128)
POOLS_NAME = "hidden 2048, 8 layers, 8192 rows a rank"
SETS = ((1, 2), (1, 2, 4), (1, 2, 4, 8))
SLACK, SHARE = 1.10, 0.6
RANKS = 2
TRAINED = model_options(2048, layers=8, tokens=4096, head_dim=128)
TRAINING = "4096 rows each, hidden 2048, 8 layers, documents of mlm-dcp"
TRAININGS = {"dynamic CP": False, "static CP=2": True}
LONG = model_options(2048, layers=4, tokens=65536, head_dim=128)
LONG_NAME = "hidden 2048, 4 layers, one document of 65536 tokens"
HOW = ("eager", "graphed")


def _trained(is_static: bool) -> Answer:
    return of_slowest(on_ranks(RANKS, partial(train, is_static=is_static), TRAINED), *HOW)


def _long() -> Answer:
    ranks = on_ranks(RANKS, run_document, LONG)
    return of_slowest(ranks, *ranks[0])


def _words(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


PARTS: Parts = {
    **{_words(of): partial(measure_pools, POOLS, of) for every in SETS for of in (every, every[-1:])},
    **{way: partial(_trained, is_static) for way, is_static in TRAININGS.items()},
    LONG_NAME: _long,
}
answer = answering(PARTS)


def _measured_pools(words: str) -> Answer:
    *_, largest = words.split(", ")
    return {"every": measure_part(__name__, words), "alone": measure_part(__name__, largest)}


def _pool_figures(words: str, found: Answer) -> list[Figure]:
    every, alone = found["every"], found["alone"]["pools"] / MIB
    name = f"{POOLS_NAME}, simulated sizes {words}"
    rival = {"rival": f"size {words.split(', ')[-1]} alone", "rival_value": alone, "bar": SLACK * alone}
    return [
        Figure(name=f"{name}: pools of the graphs", value=every["pools"] / MIB, unit="MiB", **rival),
        Figure(name=f"{name}: graphs", value=every["graphs"], unit="graphs"),
    ]


def _ranks() -> str:
    """How many, and whose GPUs they are on."""
    return f"{RANKS} ranks {'on GPUs of their own' if _have_gpus() else 'that share a GPU'}"


def _have_gpus() -> bool:
    return torch.cuda.device_count() >= RANKS


def _training_figures(way: str) -> list[Figure]:
    figures, found = [], measure_part(__name__, way)
    for how in HOW:
        name = f"{_ranks()}, {TRAINING}, {way}, {how}"
        speed = 1e3 * sum(found["tokens"]) / sum(found[how])
        figures.append(timed(f"{name}: a step, median", found[how], "ms"))
        figures.append(Figure(name=f"{name}: tokens a second", value=speed, unit="tokens/s"))
    return figures


def _long_figures() -> list[Figure]:
    found, figures = measure_part(__name__, LONG_NAME), []
    for how in HOW:
        alone = median(found[f"1 {how}"])
        rival = {"rival": "one rank", "rival_value": alone, "bar": SHARE * alone}
        title = f"{LONG_NAME}, {how}: a step of {_ranks()}, median"
        figures.append(timed(title, found[f"{RANKS} {how}"], "ms", **rival))
    return figures


def measure(measurement: Measurement) -> None:
    """Measures every set of sizes, trainings, and a long document."""
    measurement.take_side_by_side(dict.fromkeys(map(_words, SETS), _pool_figures), _measured_pools)
    for way in TRAININGS:
        measurement.take(way, partial(_training_figures, way))
    if _have_gpus():
        measurement.take(LONG_NAME, _long_figures)
