# SPDX-License-Identifier: Apache-2.0
"""What ranks run that schedule their documents together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import context_jobs
import context_models
import megatron_rig as rig
import moe_rig
import torch
from megatron.core import parallel_state
from same_bits import assert_same_bits
from torch import Tensor, distributed

import megagraph
from megagraph.demo.trainer import Trainer, packed_seq_params
from megagraph.megatron.parallel.context import ContextGroups
from megagraph.megatron.scheduled_steps import MicroBatch, ScheduledStep, ScheduledSteps
from megagraph.packs.schedule import ScheduleLimits

CONFIG = SimpleNamespace(calculate_per_token_loss=True)


def document(number: int, length: int, device: torch.device) -> dict[str, Tensor]:
    """One that tells by each token which it is."""
    tokens = torch.arange(length, device=device) + 1000 * (number + 1)
    return {"tokens": tokens, "loss_mask": torch.ones(length, device=device), "even": tokens % 2 == 0}


def _device() -> torch.device:
    on_gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _groups(cp_sizes: tuple[int, ...]) -> ContextGroups:
    parent = parallel_state.get_data_parallel_group(with_context_parallel=True)
    groups = ContextGroups(parent, cp_sizes)
    groups.warm_up(_device())
    return groups


def steps_of_rank(*, lengths: list[list[list[int]]], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Every micro-batch of this rank, for documents of given lengths by step and rank."""
    limits = ScheduleLimits(ranks=distributed.get_world_size(), **options)
    groups = _groups(limits.cp_sizes)
    device = _device()
    rank = groups.rank
    steps = []
    for of_ranks in lengths:
        first = sum(map(len, of_ranks[:rank]))
        steps.append([document(first + i, length, device) for i, length in enumerate(of_ranks[rank])])
    found = []
    for number, step in enumerate(
        ScheduledSteps(steps, limits=limits, groups=groups, config=CONFIG, device=device)
    ):
        assert len(step) == len(list(step)) == len(step.schedule.micro_batches)
        for pack, batch in zip(step.schedule.of_rank(rank), step, strict=True):
            params = batch.packed_seq_params
            assert params.cp_group is groups.of_size(batch.cp_size)
            found.append(
                {
                    "step": number,
                    "pack": tuple(pack),
                    "tensors": {name: tensor.cpu() for name, tensor in batch.tensors.items()},
                    "position_ids": batch.position_ids.cpu(),
                    "offsets": params.cu_seqlens_q.cpu(),
                    "padded": None
                    if params.cu_seqlens_q_padded is None
                    else params.cu_seqlens_q_padded.cpu(),
                    "max_seqlen": params.max_seqlen_kv,
                    "size": params.local_cp_size,
                    "group": [rank]
                    if params.cp_group is None
                    else distributed.get_process_group_ranks(params.cp_group),
                }
            )
    return found


def error_of_rank(*, lengths: list[list[int] | None], case: str = "") -> str:
    """What a rank hears where something is wrong on some rank; None is a rank without a step."""
    rank = distributed.get_rank()
    limits = ScheduleLimits(
        ranks=len(lengths), cp_sizes=(1, 2), max_seqlen_per_dp_cp_rank=16, max_packed_seqs=4
    )
    device = _device()
    own = lengths[rank]
    documents = None if own is None else [document(i, length, device) for i, length in enumerate(own)]
    if rank == 1 and documents:
        if case == "shape":
            documents[0]["tokens"] = documents[0]["tokens"][:-1]
        elif case == "dtype":
            documents[0]["tokens"] = documents[0]["tokens"].int()
    steps = ScheduledSteps(
        [] if documents is None else [documents],
        limits=limits,
        groups=_groups((1, 2)),
        config=CONFIG,
        device=device,
    )
    try:
        next(steps)
    except ValueError as error:
        return str(error)
    return "no error"


# -- a model of today's ------------------------------------------------------------------------------

VOCAB = rig.OPTIONS.vocab


def text(number: int, length: int, device: torch.device) -> dict[str, Tensor]:
    """A document to train on; its last token has no label."""
    drawn = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCAB, (length,), generator=drawn)
    mask = torch.ones(length)
    mask[-1] = 0
    return {"tokens": tokens.to(device), "labels": tokens.roll(-1).to(device), "loss_mask": mask.to(device)}


def summed(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Losses that are sums over tokens, and the number of these."""
    loss = (losses.float() * mask).sum()
    return loss, mask.sum().int(), {"loss": loss.detach().clone()}


def _forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    losses = model(
        input_ids=batch.tensors["tokens"],
        position_ids=batch.position_ids,
        attention_mask=None,
        labels=batch.tensors["labels"],
        packed_seq_params=batch.packed_seq_params,
    )
    return losses, partial(summed, mask=batch.tensors["loss_mask"])


def scheduled(
    forward_step: Any, data: Any, count: int, trainer: Trainer, *, eager: bool, forward_only: bool = False
) -> list[Tensor]:
    """Megatron's own schedule. Returns the loss of each micro-batch."""
    with megagraph.disable_cuda_graphs_this_step() if eager else nullcontext():
        found = rig.run_schedule(trainer.model, forward_step, data, count, forward_only=forward_only)
    return [loss["loss"] for loss in found]


def _trained(
    steps: Sequence[ScheduledStep], trainer: Trainer, *, eager: bool, evaluates: bool, in_training: bool
) -> Iterator[rig.Step]:
    for index, step in enumerate(steps):
        trainer.zero_grad()
        losses = scheduled(_forward_step, step, len(step), trainer, eager=eager)
        yield rig.Step(losses=losses, grads=context_models.left(trainer.chunk))
        trainer.update()
        if evaluates and index % 2:
            trainer.model.train(in_training)
            with torch.no_grad(), context_models.without_adapters(trainer.chunk):
                losses = scheduled(
                    _forward_step, steps[0], len(steps[0]), trainer, eager=eager, forward_only=True
                )
            trainer.model.train()
            yield rig.Step(losses=losses, grads={})


def alone(chunk: Any, documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Gradients of the mean loss of all tokens, each document by itself and without other ranks."""
    params = {name: param for name, param in chunk.named_parameters() if param.requires_grad}
    sums = [torch.zeros_like(param) for param in params.values()]
    num_tokens = 0.0
    for document in documents:
        length = document["tokens"].numel()
        offsets = torch.tensor([0, length], dtype=torch.int32, device=document["tokens"].device)
        losses = chunk(
            input_ids=document["tokens"][None],
            position_ids=torch.arange(length, device=offsets.device)[None],
            attention_mask=None,
            labels=document["labels"][None],
            packed_seq_params=packed_seq_params(offsets, length),
        )
        loss = (losses.float() * document["loss_mask"]).sum()
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
    forced: int | None = None,  # all are shared by as many
    plugin: dict[str, Any] | None = None,  # further options of the plugin
    model: dict[str, Any] | None = None,  # arguments of `context_models.trainer()`
    evaluates: bool = False,  # the first step's packs after each second step, too, without adapters
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
        cp_sizes=cp_sizes if forced is None else (forced,),
        max_seqlen_per_dp_cp_rank=rig.CAPACITY.tokens,
        max_packed_seqs=rig.CAPACITY.num_seqs,
        alignment=options.get("tensor_model_parallel_size", 1),
    )
    device = _device()
    numbers = [[100 * step + 10 * rank for rank in range(groups.num_ranks)] for step in range(len(lengths))]
    documents = [
        [
            [text(first + i, length, device) for i, length in enumerate(own)]
            for first, own in zip(firsts, of_ranks, strict=True)
        ]
        for firsts, of_ranks in zip(numbers, lengths, strict=True)
    ]

    config = {"calculate_per_token_loss": True, **options}
    make: Callable[..., Trainer] = partial(context_models.trainer, config=config, **(model or {}))
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    is_whole = has_reference and static == 1 and tensor_parallel == 1 and experts == 1
    of_first = [document for own in documents[0] for document in own] if is_whole else []
    # Megatron's fused RoPE runs on GPUs alone, but for canonical packs.
    unfused = partial(make, config={**config, "apply_rope_fusion": False})
    expected = alone(unfused().chunk, of_first)

    capacity = {
        "max_seqlen_per_dp_cp_rank": rig.CAPACITY.tokens,
        "cuda_graph_max_packed_seqs": (rig.CAPACITY.num_seqs,),
    }

    def run(eager: bool) -> tuple[list[rig.Step], dict[str, Any], list[ScheduledStep]]:
        given = {"capacities": (), "cp_sizes": cp_sizes, **capacity, **(plugin or {})}
        megagraph.install(rig.graph_config(**given))
        try:
            trainer = make()
            own = (of_ranks[groups.rank] for of_ranks in documents)
            steps = list(
                ScheduledSteps(own, limits=limits, groups=groups, config=trainer.chunk.config, device=device)
            )
            rig.forget_metrics()
            done = list(_trained(steps, trainer, eager=eager, evaluates=evaluates, in_training=in_training))
            return done, rig.report_of(trainer), steps
        finally:
            megagraph.uninstall()

    eager_steps, _, _ = run(True)
    graphed_steps, report, scheduled = run(False)
    assert_same_bits(eager_steps, graphed_steps, "steps")
    return {
        "report": report,
        "num_sizes": len({*cp_sizes, static}),
        "evaluated": len(scheduled[0]) * (len(scheduled) // 2 - 1) * evaluates,
        "numbers": [len(step) for step in scheduled],
        "sizes": [[pack.cp_size for pack in step.schedule.of_rank(groups.rank)] for step in scheduled],
        "off": how_far(eager_steps[0].grads, expected) if is_whole else 0.0,
    }
