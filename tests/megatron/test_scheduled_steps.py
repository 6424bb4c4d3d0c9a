# SPDX-License-Identifier: Apache-2.0
"""Documents of several ranks come to those that a schedule names: by ours, and by megatron-core's hybrid one.
That deals out one document in a micro-batch, in sub-steps with a barrier behind each; within one, some ranks
share theirs. Its groups, its loader's wrapper and what cuts a document are the release's, too."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import starmap
from types import SimpleNamespace
from typing import Any
from unittest import mock

import megatron_rig as rig
import pytest
import torch
from context_jobs import BOUND, alone, device, documents_of, forward, how_far
from megatron.core import parallel_state, utils
from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper
from streams import make_groups
from torch import Tensor, distributed
from torch.nn.functional import pad
from worlds import World, on_ranks

import megagraph
from megagraph._C import Capacity, PackShape, as_pack
from megagraph.config import GraphConfig
from megagraph.demo.trainer import Trainer
from megagraph.megatron.graphs.refusals import refusal_of
from megagraph.megatron.parallel.context import ContextGroups
from megagraph.megatron.scheduled_steps import MicroBatch, ScheduledSteps
from megagraph.packs.ops import thd_partition_indices
from megagraph.packs.schedule import ScheduleLimits, schedule_packs

pytestmark = pytest.mark.both

OPTIONS = {"cp_sizes": (1, 2, 4), "max_seqlen_per_dp_cp_rank": 64, "max_packed_seqs": 4}
# By step and rank: one that mixes sizes, one where some bring nothing, one document for all.
LENGTHS = [[[120, 7], [60], [58, 3], [1]], [[], [250, 30, 31], [], [5, 6, 7, 8, 9]], [[], [], [11], []]]

CONFIG = SimpleNamespace(calculate_per_token_loss=True)


def document(number: int, length: int) -> dict[str, Tensor]:
    """One that tells by each token which it is. Bug: views that negate were an error, on one rank alone."""
    tokens = torch.arange(length) + 1000 * (number + 1)
    return {"tokens": tokens, "mask": torch._neg_view(-torch.ones(length)), "even": tokens % 2 == 0}


def quantized(rows: Tensor) -> Tensor:
    return torch.quantize_per_tensor(rows.float(), 1.0, 0, torch.quint8)


def on_device(documents: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: rows.to(device()) for name, rows in each.items()} for each in documents]


def groups_of(cp_sizes: tuple[int, ...]) -> ContextGroups:
    groups = ContextGroups(parallel_state.get_data_parallel_group(with_context_parallel=True), cp_sizes)
    groups.warm_up(device())
    return groups


def check_share(pack: Any, batch: MicroBatch, lengths: list[int], limits: ScheduleLimits, rank: int) -> None:
    """Of a rank, of a pack of documents that have these lengths."""
    size, first, documents = pack.cp_size, pack.first_rank, pack.documents
    params = batch.packed_seq_params
    assert batch.cp_size == params.local_cp_size == size
    ranks = [rank] if params.cp_group is None else distributed.get_process_group_ranks(params.cp_group)
    assert ranks == list(range(first, first + size))
    whole = [document(i, lengths[i]) for i in documents]
    padded = [limits.rows(lengths[i], size) * size for i in documents]
    bounds = torch.tensor([0, *padded]).cumsum(0).int()
    indices = thd_partition_indices(bounds, int(bounds[-1]), size, rank - first).long()
    for name, share in batch.tensors.items():
        rows = [pad(it[name], (0, num - it[name].numel())) for it, num in zip(whole, padded, strict=True)]
        assert torch.equal(share.cpu(), torch.cat(rows)[indices][None]), name
    positions = torch.cat([torch.arange(num) for num in padded])
    assert torch.equal(batch.position_ids.cpu(), positions[indices][None])
    assert params.cu_seqlens_q.diff().tolist() == [lengths[i] for i in documents]
    assert params.max_seqlen_q == params.max_seqlen_kv == max(padded)
    bounds_in_pack = params.cu_seqlens_q_padded
    if limits.cp_sizes == (1,) and limits.alignment == 1:
        assert bounds_in_pack is None
    else:
        assert bounds_in_pack.tolist() == bounds.tolist()
    shape = PackShape(indices.numel(), len(documents), params.max_seqlen_kv, size)
    assert shape.exceeds(limits.capacity(size)) is None


@pytest.mark.parametrize("alignment", [1, 4])
@on_ranks(4)
def test_every_rank_gets_its_share_of_every_pack(alignment: int) -> None:
    """Bug: an iterator of documents raised once it was dealt, and other ranks waited."""
    limits = ScheduleLimits(ranks=4, alignment=alignment, **OPTIONS)
    groups, sizes = groups_of(limits.cp_sizes), set()
    own = []
    for of_ranks in LENGTHS:
        first = sum(map(len, of_ranks[: groups.rank]))
        own.append(iter(on_device(starmap(document, enumerate(of_ranks[groups.rank], first)))))
    steps = ScheduledSteps(own, limits=limits, groups=groups, config=CONFIG, device=device())
    for step, of_ranks in zip(steps, LENGTHS, strict=True):
        lengths = [length for of_rank in of_ranks for length in of_rank]
        schedule = schedule_packs(lengths, limits)
        assert len(step) == len(schedule.micro_batches)
        for pack, batch in zip(schedule.of_rank(groups.rank), step, strict=True):
            assert batch.packed_seq_params.cp_group is groups.of_size(batch.cp_size)
            check_share(pack, batch, lengths, limits, groups.rank)
        sizes |= {pack.cp_size for rank in range(4) for pack in schedule.of_rank(rank)}
    assert sizes == {1, 2, 4}


@on_ranks(4)
def test_documents_that_cannot_be_dealt_are_an_error_on_every_rank() -> None:
    rank, groups = distributed.get_rank(), groups_of((1, 2))
    limits = ScheduleLimits(ranks=4, cp_sizes=(1, 2), max_seqlen_per_dp_cp_rank=16, max_packed_seqs=4)
    deal = partial(ScheduledSteps, limits=limits, groups=groups, config=CONFIG, device=device())
    one = [document(0, 5)]

    def with_tokens(change: Callable[[Tensor], Tensor]) -> Any:
        """The document of the second rank has others."""
        other = {name: change(rows) if name == "tokens" else rows for name, rows in one[0].items()}
        return [[one], [[other]], [one], [one]]

    for of_ranks, message in (
        ([[one], [one], [one], []], r"^expected a step of every rank, got none of ranks \[3\]$"),
        (with_tokens(lambda it: it[:-1]), r"^rank 1: document 0: expected tensors of one shape \[L\]"),
        (with_tokens(Tensor.int), "^expected documents with the same tensors on every rank, got rank"),
        # Bug: it raised once it was sent, on one rank.
        (with_tokens(Tensor.to_sparse), "^rank 1: document 0: expected dense tensors, got torch.sparse_coo$"),
        (with_tokens(lambda it: it.to("meta")), "^rank 1: NotImplementedError: Cannot copy out of meta"),
        # Bug: where every rank had such, the process ended in a segmentation fault.
        (with_tokens(quantized), "^rank 1: document 0: expected dense tensors, got torch.quint8$"),
        ([[one], [[document(0, 33)]], [one], [[]]], "^document 1 of 33 tokens is too long"),
        ([[[]], [[]], [[]], [[]]], "^0 documents cannot fill"),
    ):
        with pytest.raises(ValueError, match=message):
            next(deal(map(on_device, of_ranks[rank])))
    # Bugs: what cannot be read, or is a list of numbers, raised alone, and the others waited.
    unread: Any = mock.Mock(side_effect=OSError("no such file"))
    for read, message in (
        (unread, "OSError: no such file"),
        (lambda _: [{"tokens": [1, 2]}], "AttributeError: 'list' object has no attribute 'dtype'"),
    ):
        with pytest.raises(ValueError, match=f"^rank 2: {message}$"):
            next(deal(map(read if rank == 2 else on_device, [one])))
    other = limits.replace(max_packed_seqs=4 + rank // 3)
    with pytest.raises(ValueError, match=r"^max_packed_seqs: expected .*, got 4 on rank 0, .*, 5 on rank 3$"):
        next(deal([on_device(one)], limits=other))


def test_what_cannot_be_trained_is_an_error() -> None:
    limits = ScheduleLimits(ranks=4, cp_sizes=(1, 2), max_seqlen_per_dp_cp_rank=16, max_packed_seqs=4)
    for per_token, sizes, message in (
        (False, (1, 2), "expected calculate_per_token_loss=True"),
        (True, (1,), r"expected limits of 4 ranks in groups of \(1,\), got 4 in groups of \(1, 2\)"),
    ):
        groups: Any = SimpleNamespace(num_ranks=4, cp_sizes=sizes)
        config = SimpleNamespace(calculate_per_token_loss=per_token)
        with pytest.raises(ValueError, match=message):
            ScheduledSteps([], limits=limits, groups=groups, config=config, device=device())


TOKENS = rig.CAPACITY.tokens
# By step and rank of data parallelism; a document has as many rows as the release wants on all ranks.
ON_TWO = [[[120, 8], [64, 32]], [[40], [128, 4]], [[20, 24, 28], [32]], [[8, 124], [12]]]
EVALUATIONS = 2  # one before each step, with documents of its own


# -- megatron-core's own hybrid scheduler: what ranks run -------------------------------------------


def start() -> int:
    tensor_parallel: int = parallel_state.get_tensor_model_parallel_world_size()
    make_groups(tensor_model_parallel_size=tensor_parallel, hybrid_context_parallel=True)
    return tensor_parallel


def _sample(documents: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What a data set of packed samples yields: documents in a row, and where they end."""
    lengths = torch.tensor([document["tokens"].numel() for document in documents])
    sample = {name: torch.cat([document[name] for document in documents]) for name in documents[0]}
    positions = [torch.arange(int(length)) for length in lengths]
    sample["position_ids"] = torch.cat(positions).to(sample["tokens"].device)
    sample["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    return sample


def _on_all_tensor_ranks(sample: Any) -> Any:
    """The scheduler hands data to one of the ranks that share layers; a host sends it to the others."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return sample
    # Over the CPU: tensors of another rank's GPU would stay there.
    sent: list[Any] = [sample and {name: rows.cpu() for name, rows in sample.items()}]
    distributed.broadcast_object_list(sent, parallel_state.get_tensor_model_parallel_src_rank(), group=group)
    return {name: rows.to(device()) for name, rows in sent[0].items()}


def _cut(sample: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """This rank's rows of a document and its pack, as the release makes them."""
    size = int(sample.pop("local_cp_size"))
    if hasattr(utils, "get_batch_on_this_hybrid_cp_rank"):
        return utils.get_batch_on_this_hybrid_cp_rank(sample, size)
    # Since then a host makes the pack, of offsets that it has added to the batch.
    length = sample["tokens"].numel()
    batch: dict[str, Any] = {name: rows[None] for name, rows in sample.items()}
    offsets = torch.tensor([0, length], dtype=torch.int32, device=batch["tokens"].device)
    batch |= {"cu_seqlens": offsets[None], "local_cp_size": torch.tensor([size]), "hybrid_cp_group": None}
    batch = utils.get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=True,
        cp_group=parallel_state.get_context_parallel_group(),
        hybrid_cp_group_func=parallel_state.get_hybrid_data_context_parallel_groups,
    )
    group = batch["hybrid_cp_group"]
    return batch, rig.packed(offsets, max_seqlen_q=length, local_cp_size=size, cp_group=group)


def _forward_step(data: Iterator[dict[str, Tensor]] | None, model: Any) -> tuple[Tensor, Any]:
    batch, params = _cut(_on_all_tensor_ranks(None if data is None else dict(next(data))))
    return forward(model, batch, batch["position_ids"], params)


class _Steps:
    """Steps as the release's scheduler deals them out, and what this rank has had of each."""

    def __init__(self, documents: Sequence[Sequence[Sequence[dict[str, Tensor]]]], config: Any) -> None:
        rank = parallel_state.get_data_parallel_rank()
        is_first = parallel_state.get_tensor_model_parallel_rank() == 0
        batches = iter([[_sample(of_ranks[rank])] for of_ranks in documents]) if is_first else None
        self._wrapped = HybridCPDataLoaderWrapper(batches, config)
        self._place = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self.sizes: list[list[int]] = []  # of this rank's micro-batches, by step

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch, groups = next(self._wrapped)
        if groups is not None:
            sizes = [[sum(it in others for others in group) for it in group[self._place]] for group in groups]
            self.sizes.append([size for of_group in sizes for size in of_group])
        return batch, groups


def train(
    *,
    lengths: list[list[list[int]]],  # of documents, by step and rank of data parallelism
    cp_sizes: tuple[int, ...],  # by how many ranks the plugin lets packs be shared
    ddp: dict[str, Any] | None = None,  # further fields of the config of Megatron's DDP
    plugin: dict[str, Any] | None = None,  # its capacities; by default one, of a document
    **options: Any,  # further ones of Megatron's config
) -> dict[str, Any]:
    """Trains eager and graphed under the release's hybrid scheduler, and compares every step's bits."""
    tensor_parallel = start()
    config = {"calculate_per_token_loss": True, "hybrid_context_parallel": True, **options}
    config |= {"max_seqlen_per_dp_cp_rank": TOKENS, "tensor_model_parallel_size": tensor_parallel}
    make = partial(Trainer, rig.OPTIONS, config=config, ddp=ddp)
    documents, is_whole = documents_of(lengths), tensor_parallel == 1
    expected = alone(make().chunk, [each for own in documents[1] for each in own] if is_whole else [])
    dealt: list[_Steps] = []  # one of each run

    def with_steps() -> Trainer:
        trainer = make()
        dealt.append(_Steps(documents, trainer.chunk.config))
        return trainer

    def schedule(model: Any, _micros: Any, count: int, _device: Any, **given: Any) -> list[Tensor]:
        return [loss["losses"] for loss in rig.run_schedule(model, _forward_step, dealt[-1], count, **given)]

    capacity = {"capacities": (), "max_seqlen_per_dp_cp_rank": TOKENS, "cuda_graph_max_packed_seqs": (1,)}
    given = {"cp_sizes": cp_sizes, **(capacity if plugin is None else plugin)}
    with mock.patch.object(rig, "schedule", schedule):
        micros = [range(1)] * (len(lengths) - EVALUATIONS)  # the scheduler has its own
        run = rig.compare_runs(micros, with_steps, given, evaluate_at=range(EVALUATIONS))
    off = how_far(run.steps[0].grads, expected) if is_whole else 0.0
    return {"report": run.report, "sizes": dealt[-1].sizes, "off": off}


def groups(*, is_hybrid: bool) -> dict[int, bool]:
    """By size, whether a group of `context_groups()` is the release's; each is used once."""
    if is_hybrid:
        start()
    found = megagraph.context_groups((1, 2, 4))
    found.warm_up(device())
    ask = parallel_state.get_hybrid_data_context_parallel_groups
    return {size: found.of_size(size) is ask(group_size=size) for size in (2, 4)}


def check(runs: list[dict[str, Any]]) -> None:
    """Every rank replays all but the first steps, and is as far from one process as sums in another order."""
    for run in runs:
        evaluation, training = run["sizes"][:2]
        rig.ran(run["report"], WARMING_UP=rig.LAYERS * (len(training) + len(evaluation)))
        assert run["off"] <= BOUND


def sizes_of(runs: list[dict[str, Any]]) -> set[int]:
    return {size for run in runs for of_step in run["sizes"] for size in of_step}


def test_two_ranks(world2: World) -> None:
    """Gradients are reduced in the last backward of each rank."""
    capacities = tuple(Capacity(tokens=rows, num_seqs=1, max_seqlen=2 * rows) for rows in (16, 64))
    ddp = {"overlap_grad_reduce": True, "bucket_size": 4000}
    runs = world2.run(train, lengths=ON_TWO, cp_sizes=(1, 2), ddp=ddp, plugin={"capacities": capacities})
    check(runs)
    assert all(run["report"]["graphs"] == rig.LAYERS * 3 * 2 * len(capacities) for run in runs)
    assert sizes_of(runs) == {1, 2}
    one, other = ([len(of_step) for of_step in run["sizes"]] for run in runs)
    assert one != other


def test_beside_tensor_parallelism(world4: World) -> None:
    """Half of the ranks get no data from the scheduler."""
    one, other = [[120, 8], [64]], [[40], [128, 8]]
    parallel = {"tensor_parallel": 2, "sequence_parallel": True}
    lengths = [other, one, one, other]
    runs = world4.run(train, lengths=lengths, cp_sizes=(1, 2), **parallel)
    check([run for run in runs if run["sizes"]])
    assert [bool(run["sizes"]) for run in runs] == [True, False] * 2
    assert sizes_of(runs) == {1, 2}
    assert [run["report"]["replays"] for run in runs[::2]] == [run["report"]["replays"] for run in runs[1::2]]


def test_groups_are_those_of_the_release_while_they_last(world4: World) -> None:
    assert world4.run(groups, is_hybrid=True) == [{2: True, 4: True}] * 4
    # The release keeps the group of two ranks beyond the end of its world.
    assert world4.run(groups, is_hybrid=False) == [{2: False, 4: True}] * 4


def test_a_model_is_refused_where_the_plugin_knows_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(rig.OPTIONS)
    monkeypatch.setattr(trainer.chunk.config, "hybrid_context_parallel", True)
    assert rig.refused(trainer.chunk, trainer.model) == (
        "hybrid context parallelism (hybrid_context_parallel=True) without cp_sizes is not supported yet"
    )
    assert refusal_of(trainer.chunk, trainer.model, options=GraphConfig(cp_sizes=(1, 2))) is None


def described(**changes: Any) -> Any:
    ends = torch.tensor([0, 24])
    return rig.packed(ends, ends.clone(), **{"qkv_format": "sbhd", "local_cp_size": 1, **changes})


def test_packs_and_what_names_no_ranks_stay_and_several_documents_are_an_error() -> None:
    for given in (described(qkv_format="thd"), described(local_cp_size=None), None):
        assert as_pack(given, torch.zeros(1, 24), None) is given
    of_two = described(cu_seqlens_q=torch.tensor([0, 8, 24]))
    for given, batch in ((described(), 2), (described(cu_seqlens_q=None), 1), (of_two, 1)):
        with pytest.raises(ValueError, match="expected a pack"):
            as_pack(given, torch.zeros(batch, 24), None)
