# SPDX-License-Identifier: Apache-2.0
"""What ranks do that share packs: beside one process that has them whole, and graphs beside eager."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any
from unittest import mock

import megatron_rig as rig
import moe_rig
import torch
from host_rig import adapt, without_adapters
from megatron.core import parallel_state
from streams import make_groups, makes_groups
from torch import Tensor, distributed

import megagraph
from megagraph.demo.trainer import Trainer, packed_seq_params
from megagraph.megatron import seams
from megagraph.megatron.scheduled_steps import MicroBatch, ScheduledSteps
from megagraph.packs.ops import thd_partition_indices
from megagraph.packs.schedule import ScheduleLimits


class SharedMicro(rig.Micro):
    """A micro-batch of which a rank has its share of every document's rows."""

    def sharers(self) -> tuple[int, int]:
        """How many share it, and this rank's place among them."""
        group = parallel_state.get_context_parallel_group()
        return group.size(), group.rank()

    def mine(self) -> Tensor:
        """Which of the pack's rows this rank has, int32 [rows]."""
        offsets = torch.tensor([0, *accumulate(self.rows)], dtype=torch.int32)
        return thd_partition_indices(offsets, self.physical, *self.sharers())

    def row_lists(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, labels, mask, positions = (rows[self.mine()] for rows in super().row_lists())
        return tokens, labels, mask, positions

    def padding_mask(self) -> Tensor | None:
        mask = super().padding_mask()
        return None if mask is None else mask[:, self.mine()]


@dataclass(frozen=True, kw_only=True)
class OwnMicro(SharedMicro):
    """A micro-batch that says by how many ranks it is shared."""

    group: Any = None  # of the ranks; None for this one alone
    said: dict[str, Any] = field(default_factory=dict)  # by the pack, in place of that and of what it is

    def sharers(self) -> tuple[int, int]:
        return (1, 0) if self.group is None else (self.group.size(), self.group.rank())

    def params(self, device: torch.device) -> Any:
        params = super().params(device)
        vars(params).update({"local_cp_size": self.sharers()[0], "cp_group": self.group, **self.said})
        return params


def steps_of(count: int, size: int, *, misfits: bool = False, has_tails: bool = True) -> list[list[Any]]:
    """Packs of documents that ranks can share, padded; another one in each micro-batch."""
    generator = torch.Generator().manual_seed(17)

    def micro(index: int) -> SharedMicro:
        documents = int(torch.randint(1, 5, (1,), generator=generator))
        units = torch.randint(1, 4, (documents,), generator=generator).tolist()
        rows = tuple(2 * size * unit for unit in units)
        if misfits and index % 5 == 3:
            rows = (2 * size,) * 7
        lengths = tuple(max(1, each - index % 3) for each in rows)
        return SharedMicro(lengths=lengths, seed=index, padded=rows, tail=2 * size * (index % 2) * has_tails)

    return [[micro(2 * step), micro(2 * step + 1)] for step in range(count)]


def at_borders(size: int) -> list[SharedMicro]:
    """Packs of documents that end right at, before or behind a border between ranks' rows, or are empty."""
    part = 4
    rows = 2 * size * part
    packs = [[part * place + by for by in (-1, 0, 1)] for place in range(1, 2 * size)]
    found = [SharedMicro(lengths=(*each,), seed=each[0], padded=(rows,) * 3) for each in packs]
    return [*found, SharedMicro(lengths=(5, 0, rows, 0), padded=(rows, 0, rows, 0))]


# -- models of each kind of layer ---------------------------------------------------------------------

# Of experts as larger models have them.
MANY_KINDS = {"moe_shared_expert_intermediate_size": 48, "moe_router_enable_expert_bias": True}
MANY_KINDS |= {"moe_router_score_function": "sigmoid", "moe_router_load_balancing_type": "seq_aux_loss"}
ROUTERS = {"cuda_graph_modules": ("attn", "moe_router")}
CAPACITY_OF_RANK: dict[str, Any] = {"capacities": (), "max_seqlen_per_dp_cp_rank": rig.CAPACITY.tokens}
CAPACITY_OF_RANK["cuda_graph_max_packed_seqs"] = (rig.CAPACITY.num_seqs,)
EMPTY_DUMMY = {"tail": "empty-dummy", "cuda_graph_max_packed_seqs": (rig.CAPACITY.num_seqs + 1,)}
# Of engines: arguments of `make_trainer()`, options of the plugin, fields of Megatron's config.
OF_ENGINE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}, {"qk_layernorm": True}),
    "fused RoPE": ({}, {}, {"apply_rope_fusion": True}),
    "MLA": ({"mla": "low rank, YaRN"}, {}, {}),
    "experts": ({"experts": True}, ROUTERS, {}),
    "MLA experts": ({"mla": "low rank, YaRN", "experts": True}, ROUTERS, MANY_KINDS),
}


def make_trainer(
    *,
    experts: bool = False,  # in the first layer
    engine: bool = False,  # of Transformer Engine's modules
    adapters: bool = False,  # in each MLP, and all else frozen
    config: dict[str, Any] | None = None,  # further fields of Megatron's config
    **given: Any,  # to `ModelTrainer`
) -> Trainer:
    of_experts = {"moe_grouped_gemm": True, "moe_ffn_hidden_size": 64} if experts else {}
    of_engine = {"normalization": "RMSNorm", **of_experts} if experts or "mla" not in given else {}
    changes = {**(of_engine if engine else {}), **(config or {})}
    make = partial(moe_rig.ExpertTrainer, "E-") if experts else rig.ModelTrainer
    return make(engine=engine, prepare=adapt if adapters else lambda chunk: None, **given, **changes)


# -- jobs ---------------------------------------------------------------------------------------------


def start(cp_size: int, tensor_parallel: int = 1, expert_parallel: int = 1) -> None:
    of_experts = {"expert_model_parallel_size": expert_parallel, "expert_tensor_parallel_size": 1}
    make_groups(tensor_model_parallel_size=tensor_parallel, context_parallel_size=cp_size, **of_experts)


@makes_groups
def train_shared(
    *,
    cp_size: int,  # how many share the rows of a pack
    tp_size: int = 1,  # how many share each of their layers
    num_steps: int = 2,  # to train
    misfits: bool = False,  # every fifth pack fits no capacity
    has_tails: bool = True,
    plugin: dict[str, Any] | None = None,  # further options of the plugin
    model: dict[str, Any] | None = None,  # arguments of `make_trainer()`
    **options: Any,  # further ones of Megatron's config
) -> dict[str, Any]:
    """The report of a graphed training on packs that ranks share, with evaluations, that has eager's bits."""
    start(cp_size, tp_size, options.get("expert_model_parallel_size", 1))
    steps = steps_of(num_steps, cp_size, misfits=misfits, has_tails=has_tails)
    config = {"context_parallel_size": cp_size, "tensor_model_parallel_size": tp_size, **options}
    plugin = {**CAPACITY_OF_RANK, **(plugin or {})}
    make = partial(make_trainer, config=config, **(model or {}))
    return rig.compare_runs(steps, make, plugin, evaluate_at=(num_steps - 2, num_steps - 1)).report


def _pass(trainer: Trainer, micros: Sequence[rig.Micro]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of the rows that count, and what they add to the gradients of this rank, summed."""
    trainer.zero_grad()
    losses = []
    for micro in micros:
        given, _ = rig.forward(trainer.model, micro, trainer.device)
        losses.append(given.float().view(-1) * micro.row_lists()[2].to(given.device))
        losses[-1].sum().backward()
    return [each.detach() for each in losses], rig.grads(trainer.chunk)


def _metrics() -> dict[str, Tensor]:
    """What routers have recorded, as in Megatron's log: summed over a group, and the mean of all ranks."""
    groups = {name: record.get("reduce_group") for name, record in seams.moe_records().items()}
    found = rig.metrics()
    for name, values in found.items():
        if groups[name] is not None:
            distributed.all_reduce(values, group=groups[name])
        distributed.all_reduce(values)
        values /= distributed.get_world_size()
    return found


@makes_groups
def beside_one_process(
    *,
    cp_size: int,  # how many share a pack
    is_static: bool = True,  # the model is made for as many; else each pack says so
    model: dict[str, Any] | None = None,  # arguments of `make_trainer()`
    plugin: dict[str, Any] | None = None,  # further options of the plugin
    **options: Any,  # further ones of Megatron's config
) -> tuple[float, ...]:
    """Runs the same micro-batches on packs that all ranks share, and each rank alone on whole ones."""
    found = []
    # Calls outside of schedules get packs of several sizes as they are given.
    shared = [micro for micros in steps_of(1, cp_size, has_tails=is_static) for micro in micros]
    shared += at_borders(cp_size)
    whole = [rig.Micro(**vars(micro)) for micro in shared]
    for size, micros in ((1, whole), (cp_size, shared)):
        own = size if is_static else 1
        start(own)
        cp_sizes = () if is_static or size == 1 else (1, size)
        if cp_sizes:
            group = megagraph.context_groups(cp_sizes).of_size(size)
            micros = [OwnMicro(**vars(micro), group=group) for micro in shared]
        config = {"mode": "eager", "max_seqlen_per_dp_cp_rank": 64 * cp_size // size, "cp_sizes": cp_sizes}
        megagraph.install(rig.graph_config(**{**CAPACITY_OF_RANK, **config, **(plugin or {})}))
        rig.forget_metrics()
        made = make_trainer(config={"context_parallel_size": own, **options}, **(model or {}))
        found.append((*_pass(made, micros), _metrics()))
        megagraph.uninstall()
    (losses_alone, *alone), (losses, grads, metrics) = found
    for grad in grads.values():
        distributed.all_reduce(grad)
    far_losses = [
        (mine - other[micro.mine()]).abs().max() / other.abs().max()
        for mine, other, micro in zip(losses, losses_alone, micros, strict=True)
    ]
    return float(max(far_losses)), how_far(grads, alone[0]), how_far(metrics, alone[1]) if metrics else -1


# -- packs of two ranks, and of one ---------------------------------------------------------------------

STEPS = 2  # one warms up


def new_trainer(*, model: Any = None, cp_sizes: tuple[int, ...] = (1, 2), **config: Any) -> Trainer:
    install(cp_sizes=cp_sizes, **(ROUTERS if "experts" in (model or {}) else {}))
    return make_trainer(config={"calculate_per_token_loss": True, **config}, **(model or {}))


def install(*, cp_sizes: tuple[int, ...] = (1, 2), **plugin: Any) -> None:
    megagraph.install(rig.graph_config(cp_sizes=cp_sizes, **CAPACITY_OF_RANK, **plugin))


def micros_of(group: Any) -> list[OwnMicro]:
    """One of both ranks, and one of this rank alone."""
    shared = OwnMicro(lengths=(20, 8), padded=(20, 8), group=group)
    return [shared, OwnMicro(lengths=(12, 4, 8), padded=(12, 4, 8), seed=1)]


def warmed(trainer: Trainer) -> list[OwnMicro]:
    """Trains until everything has graphs."""
    micros = micros_of(megagraph.context_groups((1, 2)).of_size(2))
    rig.step(trainer, micros, times=STEPS)
    return micros


def losses_of(trainer: Trainer, micro: OwnMicro) -> Tensor:
    trainer.zero_grad()
    return torch.cat(rig.schedule(trainer.model, [micro], 1, trainer.device))


# -- documents that ranks schedule together, beside one process that has them all ------------------------

# Over the largest entry of each gradient: sums over rows in another order; in bfloat16 on a GPU.
BOUND = 5e-2 if rig.ON_GPU else 2e-5


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if rig.ON_GPU else torch.device("cpu")


def text(number: int, length: int) -> dict[str, Tensor]:
    """A document to train on; its last token has no label."""
    *lists, _positions = rig.Micro(lengths=(length,), seed=number).row_lists()
    found = dict(zip(("tokens", "labels", "loss_mask"), lists, strict=True))
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
    given = {"input_ids": rows["tokens"], "labels": rows["labels"], "position_ids": positions}
    losses = model(attention_mask=None, packed_seq_params=params, **given)
    return losses, partial(summed, mask=rows["loss_mask"])


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


def train_scheduled(
    *,
    lengths: list[list[list[int]]],  # of documents, by step and rank
    cp_sizes: tuple[int, ...] = (1,),  # by how many ranks packs may be shared
    static: int = 1,  # the model's own context-parallel size
    plugin: dict[str, Any] | None = None,  # further options of the plugin
    model: dict[str, Any] | None = None,  # arguments of `make_trainer()`
    evaluates: bool = False,  # the first step's packs between steps, too, without adapters
    in_training: bool = False,  # the model is in training mode then, as hosts take log-probabilities
    has_reference: bool = True,  # losses are sums over tokens alone, of which one process is asked, too
    **options: Any,  # further ones of Megatron's config
) -> dict[str, Any]:
    """Trains eager and graphed on what is scheduled, and compares every step's bits."""
    experts = options.get("expert_model_parallel_size", 1)
    if static > 1 or experts > 1:
        start(static, expert_parallel=experts)
        options["context_parallel_size"] = static
    groups = megagraph.context_groups(cp_sizes)
    most = {"max_seqlen_per_dp_cp_rank": rig.CAPACITY.tokens, "max_packed_seqs": rig.CAPACITY.num_seqs}
    limits = ScheduleLimits(ranks=groups.num_ranks, cp_sizes=cp_sizes, **most)
    documents = documents_of(lengths)
    config = {"calculate_per_token_loss": True, **options}
    make: Callable[..., Trainer] = partial(make_trainer, config=config, **(model or {}))
    is_whole = has_reference and static == experts == 1
    # Megatron's fused RoPE runs on GPUs alone, but for canonical packs.
    unfused = make(config={**config, "apply_rope_fusion": False})
    expected = alone(unfused.chunk, [each for own in documents[0] for each in own] if is_whole else [])
    own = (of_ranks[groups.rank] for of_ranks in documents)
    how = {"limits": limits, "groups": groups, "device": device()}
    steps = [*ScheduledSteps(own, config=unfused.chunk.config, **how)]
    options_of_plugin = {"cp_sizes": cp_sizes, **CAPACITY_OF_RANK, **(plugin or {})}
    evaluate_at = (1, *range(2, len(steps), 2)) if evaluates else ()

    def forward_batch(model: Any, batch: MicroBatch, _device: torch.device) -> tuple[Tensor, Any]:
        return forward(model, batch.tensors, batch.position_ids, batch.packed_seq_params)

    def evaluate(trainer: Trainer, step: Any, *, eager: bool) -> list[Tensor]:
        assert not eager  # runs in mode `eager` are
        with rig.evaluating(trainer.model, in_training=in_training), without_adapters(trainer.chunk):
            return rig.schedule(trainer.model, step, len(step), trainer.device, forward_only=True)

    with mock.patch.multiple(rig, forward=forward_batch, evaluate=evaluate):
        run = rig.compare_runs(steps, make, options_of_plugin, evaluate_at=evaluate_at)
    return {
        "report": run.report,
        "num_sizes": len({*cp_sizes, static}),
        "evaluated": len(steps[0]) * len(evaluate_at[1:]),
        "sizes": [[batch.cp_size for batch in step] for step in steps],
        "off": how_far(run.steps[0].grads, expected) if is_whole else 0.0,
    }
