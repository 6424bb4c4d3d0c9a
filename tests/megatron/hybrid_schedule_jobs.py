# SPDX-License-Identifier: Apache-2.0
"""What ranks run under the hybrid scheduler of megatron-core itself: one document in each micro-batch.

It deals documents out in sub-steps with a barrier behind each. Within one, ranks run different numbers of
micro-batches, and some of them share theirs. What surrounds it is the release's, too: its groups, the wrapper
of its data loader, and the function that cuts a document to a rank's rows.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import megatron_rig as rig
import torch
from megatron.core import parallel_state, utils
from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper
from megatron.core.packed_seq_params import PackedSeqParams
from schedule_jobs import alone, device, documents_of, how_far, summed
from streams import make_groups
from torch import Tensor, distributed

import megagraph
from megagraph.demo.trainer import Trainer

TOKENS = rig.CAPACITY.tokens


def start(context_parallel: int = 1) -> int:
    """Makes Megatron's groups anew, with those of hybrid context parallelism."""
    tensor_parallel: int = parallel_state.get_tensor_model_parallel_world_size()
    make_groups(
        tensor_model_parallel_size=tensor_parallel,
        context_parallel_size=context_parallel,
        hybrid_context_parallel=True,
    )
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
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=length,
        max_seqlen_kv=length,
        local_cp_size=size,
        cp_group=batch["hybrid_cp_group"],
    )
    return batch, params


def _forward_step(data: Iterator[dict[str, Tensor]] | None, model: Any) -> tuple[Tensor, Any]:
    batch, params = _cut(_on_all_tensor_ranks(None if data is None else dict(next(data))))
    losses = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
        packed_seq_params=params,
    )
    return losses, partial(summed, mask=batch["loss_mask"])


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
            sharers = [
                [sum(number in others for others in group) for number in group[self._place]]
                for group in groups
            ]
            self.sizes.append([size for of_group in sharers for size in of_group])
        return batch, groups


def train(
    *,
    lengths: list[list[list[int]]],  # of documents, by step and rank of data parallelism
    cp_sizes: tuple[int, ...],  # by how many ranks the plugin lets packs be shared
    static: int = 1,  # the model's own context-parallel size
    ddp: dict[str, Any] | None = None,  # further fields of the config of Megatron's DDP
    plugin: dict[str, Any] | None = None,  # its capacities; by default one, of a document
    **options: Any,  # further ones of Megatron's config
) -> dict[str, Any]:
    """Trains eager and graphed under the release's hybrid scheduler, and compares every step's bits."""
    tensor_parallel = start(static)
    config = {
        "calculate_per_token_loss": True,
        "hybrid_context_parallel": True,
        "max_seqlen_per_dp_cp_rank": TOKENS,
        "tensor_model_parallel_size": tensor_parallel,
        "context_parallel_size": static,
        **options,
    }
    make = partial(Trainer, rig.OPTIONS, config=config, ddp=ddp)
    documents = documents_of(lengths)
    is_whole = tensor_parallel == static == 1
    expected = alone(make().chunk, [each for own in documents[0] for each in own] if is_whole else [])
    dealt: list[_Steps] = []  # one of each run

    def with_steps() -> Trainer:
        trainer = make()
        dealt.append(_Steps(documents, trainer.chunk.config))
        return trainer

    def schedule(model: Any, _micros: Any, count: int, _device: Any, **given: Any) -> list[Tensor]:
        found = rig.run_schedule(model, _forward_step, dealt[-1], count, **given)
        return [loss["losses"] for loss in found]

    capacity = {"capacities": (), "max_seqlen_per_dp_cp_rank": TOKENS, "cuda_graph_max_packed_seqs": (1,)}
    given = {"cp_sizes": cp_sizes, **(capacity if plugin is None else plugin)}
    evaluate_at = (1, 2)  # takes the second and the fourth of the steps
    with mock.patch.object(rig, "schedule", schedule):
        micros = [range(1)] * (len(lengths) - len(evaluate_at))  # the scheduler has its own
        run = rig.compare_runs(micros, with_steps, given, evaluate_at=evaluate_at)
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
