# SPDX-License-Identifier: Apache-2.0
"""Training under expert-parallel overlap in one process: by Megatron's own schedule, with a stand-in for the
all-to-all, and with what tests do in the nodes of its plans."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import megatron_rig as rig
import moe_rig
import torch
from delayed_linear import Delays
from megatron_rig import Micro, Run
from model_specs import block_spec
from same_bits import assert_same_bits
from streams import seed_streams
from torch import Tensor, nn

from benchmarks.subjects.overlap import copies_for_all_to_all

COUNTS = (3, 1, 4, 2)  # micro-batches of each step
CALLS = rig.LAYERS  # in each micro-batch
SCOPES = ("attn", "moe_router")
# Of a plan of one micro-batch. That up to the dispatch, `attn` in 0.16, is called as it is in later releases.
FIRST = "pre_dispatch_computation"
OF_LAYERS = (FIRST, "moe_dispatch", "mlp", "moe_combine")
EXCHANGES = ("moe_dispatch", "moe_combine")  # on the communication stream
REDUCES = {"overlap_grad_reduce": True, "bucket_size": 4000}  # of DDP
NODES = ("pre_process", *OF_LAYERS, "post_process", "loss_func")


class Descent:
    """An optimizer that takes bfloat16 on the CPU, as Megatron's does not."""

    def __init__(self, chunk: Any) -> None:
        self._parameters = [*chunk.parameters()]

    def zero_grad(self) -> None: ...
    def step(self) -> None:
        with torch.no_grad():
            for parameter in self._parameters:
                parameter -= 0.05 * parameter.main_grad


_LATE = ("fused", "unfused")  # which may be followed by "at once"


def linears_of(chunk: Any) -> list[Any]:
    """Linear layers of attention and of shared experts."""
    attention = [layer.self_attention for layer in chunk.decoder.layers]
    shared = [getattr(layer.mlp, "shared_experts", None) for layer in chunk.decoder.layers]
    return [
        *itertools.chain(*((it.linear_qkv, it.linear_proj) for it in attention)),
        *itertools.chain(*((it.linear_fc1, it.linear_fc2) for it in shared if it is not None)),
    ]


def delay_linears(chunk: Any, how: str) -> None:
    """Has core's linear layers do as Transformer Engine's do on a GPU."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    class Later(Delays):
        def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            return self.apply_weight(hidden), None

    class AtOnce:
        def backward_dw(self) -> None: ...  # which the later release has

    late = linears_of(chunk)
    for linear in late:
        linear.__class__ = type("Linear", (Later, type(linear)), {})
        linear.init_delay(is_fused=how.startswith("fused"), delays=how in _LATE)
    for module in chunk.modules():
        if type(module) is RowParallelLinear:
            module.__class__ = type("Linear", (AtOnce, RowParallelLinear), {})


class OverlapTrainer(moe_rig.ExpertTrainer):
    """Overlap demands half precision. In it, the mean that the router logs of its z-loss rounds otherwise
    where rows that count are chosen."""

    def __init__(
        self,
        kinds: str = "EE",
        *,
        overlaps: bool = False,  # on one rank, for which Megatron's config refuses it
        engine: bool = False,  # layers of Transformer Engine's modules
        delays: str = "",  # how linear layers make gradients that could come later
        **changes: Any,
    ) -> None:
        self._overlaps, self._delays = overlaps, delays
        self._needs_shim = bool(delays) and not engine  # core's linear layers delay nothing
        if delays in _LATE:
            changes["ddp"] = {"delay_wgrad_compute": True, **changes.get("ddp", {})}
        of_engine = {"moe_grouped_gemm": True, "normalization": "RMSNorm"} if engine else {}
        given = {"bf16": True, "moe_z_loss_coeff": None, **of_engine, **changes}
        super().__init__(kinds, spec=block_spec(kinds, engine=engine), **given)

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        config.overlap_moe_expert_parallel_comm |= self._overlaps
        config.delay_wgrad_compute |= self._delays in _LATE
        chunk = super().make_chunk(config, spec)
        if self._needs_shim:
            delay_linears(chunk, self._delays)
        for module in chunk.decoder.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = self._delays.startswith("fused")
        return chunk

    def make_optimizer(self) -> Any:
        return super().make_optimizer() if self.model.ddp_config.overlap_param_gather else Descent(self.chunk)


def filled(micro: Micro) -> Micro:
    """The same, but for its last document, with which it fills its capacity."""
    missing = max(rig.CAPACITY.tokens - micro.physical, 0)
    longer = {"lengths": (*micro.lengths[:-1], micro.lengths[-1] + missing)}
    if micro.padded is not None:
        longer["padded"] = (*micro.padded[:-1], micro.padded[-1] + missing)
    return dataclasses.replace(micro, **longer)


def steps_of(number: int, *, fills: bool = True, masks: bool = False) -> list[list[Micro]]:
    """Steps whose packs and counts change. With `fills` all packs are equally long, their documents not.
    Plans run packs as they were given, and means that routers log round by the number of rows."""
    steps = rig.steps_of(number * max(COUNTS), tails=False, masks=masks)
    packs = map(filled if fills else dataclasses.replace, itertools.chain.from_iterable(steps))
    return [[*itertools.islice(packs, COUNTS[index % len(COUNTS)])] for index in range(number)]


def name_of(node: Any) -> str:
    """As later releases call it."""
    return {"attn": FIRST}.get(node.name, node.name)


@contextlib.contextmanager
def in_nodes(act: Callable[[str], None], *, behind: bool = False) -> Iterator[None]:
    """Each pass of each node made inside calls `act` on its stream, of its name and pass: `mlp backward`."""
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    make = ScheduleNode.__init__

    def acting(place: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def acts(*args: Any) -> Any:
            if not behind:
                act(place)
            found = run(*args)
            if behind:
                act(place)
            return found

        return acts

    def init(node: Any, *args: Any, **kwargs: Any) -> None:
        make(node, *args, **kwargs)
        name = name_of(node)
        node.forward_func = acting(f"{name} forward", node.forward_func)
        node.backward_func = acting(f"{name} backward", node.backward_func)

    with mock.patch.object(ScheduleNode, "__init__", init):
        yield


def raising(place: str, number: int) -> Callable[[str], None]:
    """For `in_nodes()`: the pass of this number, counted from 1, that runs there raises."""
    passes = itertools.count(1)

    def act(at: str) -> None:
        if at == place and next(passes) == number:
            moe_rig.lose()

    return act


def train(
    steps: Sequence[Sequence[Micro]],
    mode: str | None,  # of the plugin, which is not there in None
    *,
    overlaps: bool = True,
    us: float = 0.0,  # that all-to-alls take on a GPU
    plugin: dict[str, Any] | None = None,  # further options of `graph_config()`
    **given: Any,  # to `megatron_rig.train()`
) -> Run:
    """Trains experts of one rank."""
    options = {"cuda_graph_modules": SCOPES, **(plugin or {}), "mode": mode}
    config = rig.graph_config(**options) if mode else None
    seed_streams()
    with copies_for_all_to_all(us):
        return rig.train(config, steps, OverlapTrainer, overlaps=overlaps, **given)


def check_calls(report: dict[str, Any], mode: str, micro_batches: int) -> None:
    """Nothing failed, and each layer of each micro-batch was counted once."""
    layers = report["layers"]
    eager = {"DISABLED": micro_batches * layers} if mode == "eager" else {"WARMING_UP": COUNTS[0] * layers}
    rig.ran(report, calls=micro_batches * layers, **eager)


_eager: dict[str, tuple[Run, Any]] = {}


def train_eager(steps: Sequence[Sequence[Micro]], **given: Any) -> Run:
    """Trains in mode `eager`, once for all that compare with the same."""
    return rig.kept(_eager, train, steps, "eager", **given)


def compare(steps: Sequence[Sequence[Micro]], scopes: Sequence[str] = SCOPES, **given: Any) -> dict[str, Any]:
    """Trains eager and graphed, which must leave the same bits. Returns the report of the graphed run."""
    graphed = train(steps, "graph", plugin={"cuda_graph_modules": scopes}, **given)
    assert_same_bits(train_eager(steps, **given), graphed)
    check_calls(graphed.report, "graph", sum(map(len, steps)))
    return graphed.report
