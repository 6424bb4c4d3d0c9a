# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a parallel job run: a model trained eager and graphed, compared on each rank."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import megatron_rig as rig
import torch
from host_rig import Offload
from moe_rig import ExpertTrainer
from notes import precision, told
from same_bits import assert_same_bits
from streams import make_groups, makes_groups, seeded
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

import megagraph
from megagraph.bank import capture, verify
from megagraph.bank.bank import Bank
from megagraph.demo.trainer import Trainer
from megagraph.megatron.graphs.captures import Captures
from megagraph.reasons import EagerReason

OPTIONS = dataclasses.replace(rig.OPTIONS, layers=2, hidden=32, heads=4)
PACKS = 2  # of each step that ranks train
MISFIT = (5,) * (rig.CAPACITY.num_seqs + 1)  # lengths of a pack that fits no capacity

# Two ranks can share the rows of each.
SHAPES = [(10, 30, 24), (64,), (20, 8), (2, 2, 2, 58), (16, 16, 16, 16), (40,), (33, 7)]


def steps_of(
    count: int,
    *,
    packs: int = 3,
    seed: int = 0,
    misfits: bool = False,  # the last pack of every second step fits no capacity
    masks: bool = False,  # all but the first pack of each step have a padding mask
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    of_misfits: Sequence[tuple[int, ...]] = (MISFIT,),  # in turns
) -> list[list[rig.Micro]]:
    """Steps of packs that change every micro-batch."""
    steps = []
    for index in range(count):
        micros = []
        for micro in range(packs):
            lengths = shapes[(index * packs + micro + seed) % len(shapes)]
            tail = 64 - sum(lengths) if micro == 1 else 0
            if misfits and index % 2 and micro == packs - 1:
                lengths, tail = of_misfits[index // 2 % len(of_misfits)], 0
            number = 100 * seed + 10 * index + micro
            mask_seed = number if masks and micro else None
            micros.append(rig.Micro(lengths=lengths, seed=number, tail=tail, mask_seed=mask_seed))
        steps.append(micros)
    return steps


small_steps = partial(steps_of, packs=PACKS)
model = partial(rig.ModelTrainer, options=OPTIONS)


def steps_with_tails(count: int, **_: Any) -> list[list[rig.Micro]]:
    """Steps of packs below the capacity, with rows behind the last document in each."""
    return [
        [rig.Micro(lengths=(20, 8 + 2 * (index + micro) % 6), tail=10, seed=index) for micro in range(PACKS)]
        for index in range(count)
    ]


def hook_second(chunk: Any) -> None:
    chunk.decoder.layers[1].mlp.register_forward_hook(lambda *args: None)


def freeze_below(chunk: Any) -> None:
    """Nothing trains up to the second layer."""
    for below in (chunk.embedding, chunk.decoder.layers[0]):
        below.requires_grad_(False)


def train_pair(
    *,
    make: rig.Make = model,  # makes each trainer
    steps_of: Callable[..., list[list[rig.Micro]]] = small_steps,  # makes the packs
    num_steps: int = 2,  # to train
    own_packs: bool = False,  # give each rank packs of its own
    misfits_on: int | None = None,  # the rank some of whose packs fit no capacity
    **options: Any,  # for `compare_runs()`
) -> dict[str, Any]:
    """Trains eager and graphed and compares all bits on this rank. Returns the report of the graphed run."""
    rank = distributed.get_rank()
    steps = steps_of(num_steps, seed=rank if own_packs else 0, misfits=rank == misfits_on)
    return rig.compare_runs(steps, seeded(make), **options).report


@contextlib.contextmanager
def hearing(level: int) -> Iterator[list[str]]:
    """What the plugin says in its log from a level on."""
    said: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("megagraph")
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    with told(logger.setLevel, level, logger.level):
        yield said
    logger.removeHandler(handler)


# -- models with experts, each rank on packs of its own --------------------------------------------------


def train_experts(*, scopes: Sequence[str], plugin: Any = None, **options: Any) -> dict[str, Any]:
    """As `train_pair()`, which takes `options`; what is left of them is of the model."""
    plugin = {"cuda_graph_modules": scopes, **(plugin or {})}
    options = {"own_packs": True, **options}
    return train_pair(make=partial(ExpertTrainer, "E-"), plugin=plugin, **options)


@makes_groups
def train_spread(**options: Any) -> dict[str, Any]:
    """As `train_experts()`, with these spread over all ranks."""
    size = {"expert_model_parallel_size": distributed.get_world_size()}
    make_groups(**size)
    return train_experts(**size, **options)


# -- what one rank alone does ----------------------------------------------------------------------


class SeesOps(TorchDispatchMode):
    """As a memory tool does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _fails(*args: Any) -> None:
    raise RuntimeError("this rank gives up")


_capture = Bank.capture


def _seals_less(bank: Bank, *args: Any) -> None:
    """Loses the graphs of a layer, and tells nobody."""
    _capture(bank, *args)
    bank.keep_eager(1, EagerReason.CAPTURE_FAILED)


@contextlib.contextmanager
def _tamper(how: dict[int, str], trainer: Trainer, index: int) -> Iterator[None]:
    """Does to rank 0 alone what `how` says of a step."""
    layer = trainer.chunk.decoder.layers[1]
    with contextlib.ExitStack() as around:
        match how.get(index) if distributed.get_rank() == 0 else None:
            case "capture":
                rig.breaks(layer)
            case "wrong":  # in its own output alone
                rig.changes_output(layer.mlp, lambda out: out + 1.0 if rig.is_capturing() else out)
            case "hook":
                layer.mlp.register_forward_hook(lambda *args: None)
            case "give up":  # outside of any layer, so that the whole capture ends here
                mock.patch.object(capture.CapturePlan, "warm_up", _fails).start()
            case "hold":
                around.enter_context(mock.patch.object(Captures, "is_idle", lambda captures: False))
            case "sealed":
                around.enter_context(mock.patch.object(Bank, "capture", _seals_less))
            case "address":
                layer.mlp.linear_fc1.weight.data = layer.mlp.linear_fc1.weight.data.clone()
            case "gradients":
                offload = Offload()  # holds what takes the old place
                offload.move_gradients(trainer.model)
            case "state":
                layer.mlp.note = "of nobody's"
                around.callback(delattr, layer.mlp, "note")
            case "precision":
                around.enter_context(precision("high"))
            case "mode":
                around.enter_context(SeesOps())
            case "hooks":
                around.enter_context(torch.autograd.graph.save_on_cpu())
            case "verify":
                around.enter_context(mock.patch.object(verify.Verification, "_compare", _fails))
            case "skip":
                around.enter_context(megagraph.disable_cuda_graphs_this_step())
            case "suspend":
                megagraph.suspend()
                around.callback(megagraph.resume)
            case "group":
                alone = distributed.new_group([0], backend="gloo", use_local_synchronization=True)
                distributed.destroy_process_group(alone)
        yield


def disagree(*, how: dict[int, str], **given: Any) -> dict[str, Any]:
    """As `train_pair()`, which takes what else is given, while something happens to rank 0 alone in steps."""
    try:
        return train_pair(tamper=partial(_tamper, how), **given)
    finally:
        mock.patch.stopall()


def cannot_capture(micros: Sequence[rig.Micro], config: dict[str, Any]) -> None:
    """Steps of a model of whose layers none can be captured leave what Megatron alone leaves."""
    megagraph.install(rig.graph_config())
    with mock.patch.object(capture.CapturePlan, "warm_up", _fails):
        trainer = model(config=config)
        found = [rig.step(trainer, micros, update=False) for _ in range(2)]
    calls = len(micros) * OPTIONS.layers
    assert rig.report_of(trainer)["eager"] == {"WARMING_UP": calls, "CAPTURE_FAILED": calls}
    megagraph.uninstall()
    assert_same_bits(found[-1], rig.step(trainer, micros, update=False))
