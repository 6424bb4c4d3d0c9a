# SPDX-License-Identifier: Apache-2.0
"""What ranks train that schedule their documents together, beside one process that has them all."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import context_jobs
import megatron_rig as rig
import moe_rig
import torch
from host_rig import without_adapters
from megatron.core import parallel_state
from torch import Tensor

import megagraph
from megagraph.demo.trainer import Trainer, packed_seq_params
from megagraph.megatron.scheduled_steps import MicroBatch, ScheduledSteps
from megagraph.packs.schedule import ScheduleLimits

# Over the largest entry of each gradient: sums over rows in another order; in bfloat16 on a GPU.
BOUND = 5e-2 if torch.cuda.is_available() else 2e-5


def device() -> torch.device:
    on_gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def text(number: int, length: int) -> dict[str, Tensor]:
    """A document to train on; its last token has no label."""
    drawn = torch.Generator().manual_seed(number)
    tokens = torch.randint(rig.VOCAB, (length,), generator=drawn)
    mask = torch.ones(length)
    mask[-1] = 0
    found = {"tokens": tokens, "labels": tokens.roll(-1), "loss_mask": mask}
    return {name: rows.to(device()) for name, rows in found.items()}


def documents_of(lengths: Sequence[Sequence[Sequence[int]]]) -> list[list[list[dict[str, Tensor]]]]:
    return [
        [
            [text(100 * step + 10 * rank + place, length) for place, length in enumerate(own)]
            for rank, own in enumerate(of_ranks)
        ]
        for step, of_ranks in enumerate(lengths)
    ]


def summed(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Losses that are sums over tokens, and the number of these."""
    loss = (losses.float() * mask).sum()
    return loss, mask.sum().int(), {"losses": loss.detach().clone()}


def forward(model: Any, rows: Mapping[str, Tensor], positions: Tensor, params: Any) -> tuple[Tensor, Any]:
    """Losses of rows of a pack, each tensor [1, T], and what sums them."""
    losses = model(
        input_ids=rows["tokens"],
        position_ids=positions,
        attention_mask=None,
        labels=rows["labels"],
        packed_seq_params=params,
    )
    return losses, partial(summed, mask=rows["loss_mask"])


def _forward(model: Any, batch: MicroBatch, _device: torch.device) -> tuple[Tensor, Any]:
    return forward(model, batch.tensors, batch.position_ids, batch.packed_seq_params)


def _evaluate(trainer: Trainer, step: Any, *, eager: bool, in_training: bool) -> list[Tensor]:
    assert not eager  # runs in mode `eager` are
    trainer.model.train(in_training)
    with torch.no_grad(), without_adapters(trainer.chunk):
        losses = rig.schedule(trainer.model, step, len(step), trainer.device, forward_only=True)
    trainer.model.train()
    return losses


def alone(chunk: Any, documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Gradients of the mean loss of all tokens, each document by itself and without other ranks."""
    params = {name: param for name, param in chunk.named_parameters() if param.requires_grad}
    sums = [torch.zeros_like(param) for param in params.values()]
    num_tokens = 0.0
    for document in documents:
        length = document["tokens"].numel()
        offsets = torch.tensor([0, length], dtype=torch.int32, device=document["tokens"].device)
        rows = {name: values[None] for name, values in document.items()}
        positions = torch.arange(length, device=offsets.device)[None]
        losses, _ = forward(chunk, rows, positions, packed_seq_params(offsets, length))
        loss = (losses.float() * rows["loss_mask"]).sum()
        for total, grad in zip(sums, torch.autograd.grad(loss, list(params.values())), strict=True):
            total += grad
        num_tokens += float(document["loss_mask"].sum())
    return {name: total / num_tokens for name, total in zip(params, sums, strict=True)}


def how_far(grads: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """How far the farthest of some gradients is, over the largest entry of each; 0 where none is expected."""
    far = ((grads[name] - grad).abs().max() / grad.abs().max() for name, grad in expected.items())
    return float(max(far, default=0.0))


@moe_rig.experts_on_cpu()
def train_scheduled(
    *,
    lengths: list[list[list[int]]],  # of documents, by step and rank
    cp_sizes: tuple[int, ...] = (1,),  # by how many ranks packs may be shared
    static: int = 1,  # the model's own context-parallel size
    plugin: dict[str, Any] | None = None,  # further options of the plugin
    model: dict[str, Any] | None = None,  # arguments of `context_jobs.make_trainer()`
    evaluates: bool = False,  # the first step's packs between steps, too, without adapters
    in_training: bool = False,  # the model is in training mode then, as hosts take log-probabilities
    has_reference: bool = True,  # losses are sums over tokens alone, of which one process is asked, too
    **options: Any,  # further ones of Megatron's config
) -> dict[str, Any]:
    """Trains eager and graphed on what is scheduled, and compares every step's bits."""
    experts = options.get("expert_model_parallel_size", 1)
    if static > 1 or experts > 1:
        context_jobs.start(static, expert_parallel=experts)
        options["context_parallel_size"] = static
    groups = megagraph.context_groups(cp_sizes)
    limits = ScheduleLimits(
        ranks=groups.num_ranks,
        cp_sizes=cp_sizes,
        max_seqlen_per_dp_cp_rank=rig.CAPACITY.tokens,
        max_packed_seqs=rig.CAPACITY.num_seqs,
        alignment=options.get("tensor_model_parallel_size", 1),
    )
    documents = documents_of(lengths)
    config = {"calculate_per_token_loss": True, **options}
    make: Callable[..., Trainer] = partial(context_jobs.make_trainer, config=config, **(model or {}))
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    is_whole = has_reference and static == 1 and tensor_parallel == 1 and experts == 1
    # Megatron's fused RoPE runs on GPUs alone, but for canonical packs.
    unfused = make(config={**config, "apply_rope_fusion": False})
    expected = alone(unfused.chunk, [each for own in documents[0] for each in own] if is_whole else [])
    own = (of_ranks[groups.rank] for of_ranks in documents)
    steps = list(
        ScheduledSteps(own, limits=limits, groups=groups, config=unfused.chunk.config, device=device())
    )
    capacity = {
        "max_seqlen_per_dp_cp_rank": rig.CAPACITY.tokens,
        "cuda_graph_max_packed_seqs": (rig.CAPACITY.num_seqs,),
    }
    evaluate_at = (1, *range(2, len(steps), 2)) if evaluates else ()
    with (
        mock.patch.object(rig, "forward", _forward),
        mock.patch.object(rig, "evaluate", partial(_evaluate, in_training=in_training)),
    ):
        run = rig.compare_runs(
            steps,
            make,
            {"capacities": (), "cp_sizes": cp_sizes, **capacity, **(plugin or {})},
            evaluate_at=evaluate_at,
        )
    return {
        "report": run.report,
        "num_sizes": len({*cp_sizes, static}),
        "evaluated": len(steps[0]) * len(evaluate_at[1:]),
        "numbers": [len(step) for step in steps],
        "sizes": [[batch.cp_size for batch in step] for step in steps],
        "off": how_far(run.steps[0].grads, expected) if is_whole else 0.0,
    }
