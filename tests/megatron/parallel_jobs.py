# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a parallel job run: a model trained eager and graphed, compared on each rank."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any
from unittest import mock

import megatron_rig as rig
import torch
from latent_rig import LatentTrainer
from megatron.core import parallel_state
from rl_rig import Offload
from same_bits import assert_same_bits
from streams import seed_streams
from torch import Tensor, distributed, nn

import megagraph
from megagraph.bank import capture
from megagraph.bank.bank import Bank
from megagraph.decide.reasons import EagerReason
from megagraph.demo.trainer import ModelOptions, Trainer, transformer_config
from megagraph.megatron.graphs.block_bank import BlockBank

OPTIONS = dataclasses.replace(rig.OPTIONS, layers=2, hidden=32, heads=4)
TAMPERED_STEP = 3


MISFIT = (5,) * (rig.CAPACITY.num_seqs + 1)  # lengths of a pack that fits no capacity


def steps_of(
    count: int, *, seed: int = 0, misfits: bool = False, masks: bool = False
) -> list[list[rig.Micro]]:
    """Steps of three packs that change every micro-batch; two ranks can share the rows of each.

    With `misfits`, the last pack of every second step fits no capacity; with `masks`, all but the first of
    each step have a padding mask.
    """
    shapes = [(10, 30, 24), (64,), (20, 8), (2, 2, 2, 58), (16, 16, 16, 16), (40,), (33, 7)]
    steps = []
    for index in range(count):
        micros = []
        for micro in range(3):
            lengths = shapes[(index * 3 + micro + seed) % len(shapes)]
            tail = 64 - sum(lengths) if micro == 1 else 0
            if misfits and index % 2 and micro == 2:
                lengths = MISFIT
            number = 100 * seed + 10 * index + micro
            mask_seed = number if masks and micro else None
            micros.append(rig.Micro(lengths=lengths, seed=number, tail=tail, mask_seed=mask_seed))
        steps.append(micros)
    return steps


class ShardedSGD:
    """Updates this rank's shard of each parameter buffer and makes the others unusable until they are
    gathered: a stand-in for Megatron's distributed optimizer, which refuses the CPU.

    Args:
        model: Megatron's DDP.
    """

    def __init__(self, model: Any) -> None:
        self._buckets = [bucket for buffer in model.buffers for bucket in buffer.buckets]

    def zero_grad(self) -> None:
        """Gradients live in the buffers, which the schedule's caller zeroes."""

    def step(self) -> None:
        """One step; the gather of the parameters is left to the next forward pass."""
        rank = parallel_state.get_data_parallel_rank()
        size = parallel_state.get_data_parallel_world_size()
        with torch.no_grad():
            for bucket in self._buckets:
                shards = bucket.param_data.view(size, -1)
                updated = shards[rank] - 0.05 * bucket.grad_data.view(size, -1)[rank]
                shards.fill_(float("nan"))
                shards[rank] = updated


class ShardedTrainer(Trainer):
    """A `Trainer` whose parameters are sharded over data-parallel ranks, on a GPU or not."""

    def make_optimizer(self) -> Any:
        return super().make_optimizer() if self.device.type == "cuda" else ShardedSGD(self.model)


class HookedTrainer(Trainer):
    """A `Trainer` of whose layers the second has a hook, so that it stays eager."""

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        chunk: Any = super().make_chunk(config, spec)
        chunk.decoder.layers[1].mlp.register_forward_hook(lambda *args: None)
        made: nn.Module = chunk
        return made


def _nothing(trainer: Trainer, index: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


Around = Callable[[Trainer, int], contextlib.AbstractContextManager[None]]


def _run(
    make: Callable[[], Trainer],
    config: Any,
    *,
    eager: bool,
    around: Around,
    evaluate_at: Collection[int],
    steps: list[list[rig.Micro]],
) -> tuple[list[rig.Step], list[Tensor], dict[str, Any]]:
    megagraph.install(config)
    try:
        seed_streams()
        trainer = make()
        done, evaluated = [], []
        for index, micros in enumerate(steps):
            if index in evaluate_at:
                evaluated += rig.evaluate(trainer, steps[0], eager=eager)
            with around(trainer, index):
                done.append(rig.step(trainer, micros, eager=eager))
        return done, evaluated, rig.report_of(trainer)
    finally:
        megagraph.uninstall()


def train_pair(
    *,
    num_steps: int = 6,
    transformer: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    options: ModelOptions = OPTIONS,
    transformer_engine: bool = False,
    latent: str = "",
    data_parallel: bool = False,
    sharded: bool = False,
    hooked: bool = False,
    misfits_on: int | None = None,
    masks: bool = False,
    evaluate_at: Collection[int] = (),
    around: Around = _nothing,
) -> dict[str, Any]:
    """Trains eager and graphed and compares every step's bits on this rank.

    Args:
        num_steps: to train.
        transformer: further fields of Megatron's config.
        ddp: further fields of Megatron's DDP config.
        config: of the plugin.
        options: of the model.
        transformer_engine: layers of its modules.
        latent: the kind of the layers' multi-latent attention (latent_rig.py); none by default.
        data_parallel: give each rank packs of its own.
        sharded: shard the parameters over the ranks.
        hooked: keep the second layer eager.
        misfits_on: the rank some of whose packs fit no capacity.
        masks: give most packs a padding mask.
        evaluate_at: the steps before which both evaluate.
        around: entered around each step of the graphed run.

    Returns:
        The report of the graphed run.
    """
    rank = distributed.get_rank()
    seed, misfits = rank if data_parallel else 0, rank == misfits_on
    steps = steps_of(num_steps, seed=seed, misfits=misfits, masks=masks)
    trainer_type = ShardedTrainer if sharded else HookedTrainer if hooked else Trainer
    spec = rig.te_layer_spec() if transformer_engine and not latent else None
    make = partial(trainer_type, options, config=transformer, ddp=ddp, spec=spec)
    if latent:
        make = partial(
            LatentTrainer, kind=latent, config=transformer, ddp=ddp, transformer_engine=transformer_engine
        )
    run = partial(_run, make, rig.graph_config(**(config or {})), evaluate_at=evaluate_at, steps=steps)
    eager_steps, eager_losses, _ = run(eager=True, around=_nothing)
    graphed_steps, graphed_losses, report = run(eager=False, around=around)
    assert_same_bits(eager_steps, graphed_steps, "steps")
    for one, other in zip(eager_losses, graphed_losses, strict=True):
        assert torch.equal(one, other), "evaluation"
    return report


def one_step(*, sequence_parallel: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and gradients of a step of two tensor-parallel ranks, with norms of queries and keys."""
    spec = megagraph.get_gpt_block_varlen_spec(transformer_config(OPTIONS), qk_layernorm=True)
    config = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": sequence_parallel,
        "qk_layernorm": True,
    }
    trainer = Trainer(OPTIONS, config=config, spec=spec)
    micros = [rig.Micro(lengths=(9, 21)), rig.Micro(lengths=(3, 30, 7), seed=1)]
    left = rig.step(trainer, micros, update=False)
    return [loss.cpu() for loss in left.losses], {name: grad.cpu() for name, grad in left.grads.items()}


@contextlib.contextmanager
def _regrouped(trainer: Trainer, index: int) -> Iterator[None]:
    """Every rank makes Megatron's groups anew before a step, in which graphs are captured anew."""
    from megatron.core import parallel_state

    if index == TAMPERED_STEP:
        (before,) = megagraph.reports()
        parallel_state.destroy_model_parallel()
        (after,) = megagraph.reports()
        assert before["graphs"] > 0 and after["graphs"] == 0
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    yield


def regroup(*, transformer: dict[str, Any]) -> dict[str, Any]:
    """As `train_pair()`, with other process groups from some step on."""
    return train_pair(transformer=transformer, around=_regrouped)


# -- what one rank alone does ----------------------------------------------------------------------


def _fails_to_capture(layer: nn.Module) -> None:
    from megatron.core.transformer import cuda_graphs

    forward = layer.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)  # with all of its collectives
        if cuda_graphs.is_graph_capturing():
            raise RuntimeError("this rank cannot capture")
        return out

    layer.forward = failing


def _fails(*args: Any) -> None:
    raise RuntimeError("this rank gives up")


_capture = Bank.capture


def _seals_less(bank: Bank, *args: Any) -> None:
    """Loses the graphs of a layer, and tells nobody."""
    _capture(bank, *args)
    bank.keep_eager(1, EagerReason.CAPTURE_FAILED)


@contextlib.contextmanager
def _tamper(how: str, trainer: Trainer, index: int) -> Iterator[None]:
    """Does `how` to rank 0 alone."""
    layer = trainer.chunk.decoder.layers[1]
    if distributed.get_rank() != 0:
        yield
    elif how == "capture" and index == 0:
        _fails_to_capture(layer)
        yield
    elif how == "hook" and index == 0:
        layer.mlp.register_forward_hook(lambda *args: None)
        yield
    elif how == "address" and index == TAMPERED_STEP:
        layer.mlp.linear_fc1.weight.data = layer.mlp.linear_fc1.weight.data.clone()
        yield
    elif how == "state" and index == TAMPERED_STEP:
        layer.mlp.note = "of nobody's"
        yield
        del layer.mlp.note
    elif how == "precision" and index == TAMPERED_STEP:
        torch.set_float32_matmul_precision("high")
        yield
        torch.set_float32_matmul_precision("highest")
    elif how == "gradients" and index == TAMPERED_STEP:
        offload = Offload()  # holds what takes the old place
        offload.move_gradients(trainer.model)
        yield
    elif how == "hold" and index == 1:
        # The step whose boundary captures.
        with mock.patch.object(BlockBank, "is_idle", lambda block: False):
            yield
    elif how == "sealed" and index == 1:
        with mock.patch.object(Bank, "capture", _seals_less):
            yield
    elif how.endswith("skip") and index == TAMPERED_STEP:
        with megagraph.disable_cuda_graphs_this_step():
            yield
    elif how.startswith("give up") and index == 0:
        # Outside of any layer, so that the whole capture ends here.
        capture.CapturePlan._empty_rows = _fails  # type: ignore[method-assign]
        yield
    elif how == "group" and index == TAMPERED_STEP:
        alone = distributed.new_group([0], backend="gloo", use_local_synchronization=True)
        distributed.destroy_process_group(alone)
        yield
    elif how == "suspend" and index == TAMPERED_STEP:
        megagraph.suspend()
        yield
        megagraph.resume()
    else:
        yield


def disagree(*, how: str, **given: Any) -> dict[str, Any]:
    """As `train_pair()`, which takes what else is given, while something happens to rank 0 alone."""
    empty_rows = capture.CapturePlan._empty_rows
    try:
        return train_pair(around=partial(_tamper, how), **given)
    finally:
        capture.CapturePlan._empty_rows = empty_rows  # type: ignore[method-assign]


def change_alone(*, transformer: dict[str, Any]) -> str:
    """Rank 0 alone changes a layer inside of a step. Returns what the next step says."""
    megagraph.install(rig.graph_config())
    try:
        trainer = Trainer(OPTIONS, config=transformer)
        (micros,) = steps_of(1)
        for _ in range(2):
            rig.step(trainer, micros)
        layer = trainer.chunk.decoder.layers[1]

        def changing() -> Iterator[rig.Micro]:
            for index, micro in enumerate(micros):
                if index == len(micros) - 1 and distributed.get_rank() == 0:
                    layer.mlp.note = "of nobody's"
                yield micro

        rig.schedule(trainer.model, changing(), len(micros), trainer.device)
        try:
            rig.step(trainer, micros)
        except RuntimeError as error:
            return str(error)
        return ""
    finally:
        megagraph.uninstall()
