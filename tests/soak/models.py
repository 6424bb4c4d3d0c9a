# SPDX-License-Identifier: Apache-2.0
"""What scenarios draw: kinds of models, each with the scopes that are legal for it, and options."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import megatron_rig as rig
import moe_rig
import torch
from host_rig import HostTrainer, OwnBlock, OwnModel, adapt
from mamba_rig import mamba, mamba_experts
from megatron_rig import HYBRID_PATTERN, ON_GPU, ModelTrainer, around_mlps, changes_output, graph_config
from model_specs import KINDS as MLA_KINDS
from model_specs import te_layer_spec
from moe_rig import ExpertTrainer
from overlap_rig import OverlapTrainer
from state_changes import Probe
from streams import seeded
from torch import nn

from benchmarks.subjects.overlap import copies_for_all_to_all
from benchmarks.subjects.pipelines import Cut, alone
from megagraph._C import Capacity
from megagraph.config import GraphConfig
from megagraph.demo.trainer import Trainer
from megagraph.megatron import seams
from megagraph.megatron.parallel.model_parallel import schedule_of

Scopes = tuple[str, ...]
UNIT = 4  # rows that two ranks can share, whatever they share
PARTS: tuple[Scopes, ...] = ((), ("attn",), ("mlp",), ("attn", "mlp"))

# How two ranks share a model: fields of Megatron's config. Of packs each of "dp" and "ep" has its own; of
# "some" a few, and these and those that both share say so.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2},
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "some": {"calculate_per_token_loss": True},
    "ep": {"expert_model_parallel_size": 2},
    "dp": {},
}
SHARES_PACKS = ("tp", "sp", "cp", "some")


@dataclass(frozen=True, kw_only=True)
class Kind:
    make: Callable[..., Trainer]  # takes `config`, further fields of Megatron's config
    scopes: tuple[Scopes, ...] = PARTS  # what may be named
    reasons: frozenset[str] = frozenset()  # of layers that are eager by nature
    has: frozenset[str] = frozenset()  # what events ask for
    layouts: frozenset[str] = frozenset()  # of ranks that it can be spread over
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # a scenario of one rank


def _experts(config: dict[str, Any] | None = None, **given: Any) -> Trainer:
    return ExpertTrainer(**{"kinds": "E-", **given}, **(config or {}))


def _overlapped(config: dict[str, Any] | None = None, **given: Any) -> Trainer:
    return OverlapTrainer(overlaps=True, **given, **(config or {}))


STAGES = 3
_CUT = Cut(stages=STAGES)


def _stage(stage: int, config: dict[str, Any] | None = None) -> Trainer:
    ends = {"pre_process": stage == 0, "post_process": stage == STAGES - 1}
    fields = {**_CUT.config(), **(config or {})}
    return ModelTrainer(layers=2 * STAGES, config=fields, arguments=lambda _config: ends)


@contextmanager
def _without_others(stage: int) -> Iterator[None]:
    """Inside, schedules run this stage alone, and hand out what it sends the other ones, too."""
    run = rig.run_schedule

    def run_stage(model: Any, forward_step: Any, data: list[rig.Micro], count: int, **options: Any) -> Any:
        chunk, rows = model, [micro.physical for micro in data]
        while hasattr(chunk, "module"):
            chunk = chunk.module
        others.begin(schedule_of(chunk), rows, forward_only=options.get("forward_only", False))
        return [*run(model, forward_step, data, count, **options), *({"losses": it} for it in others.taken)]

    with alone(_CUT, stage) as others, mock.patch.object(rig, "run_schedule", run_stage):
        yield


def _shares_a_parameter(chunk: Any) -> None:
    one, other = (layer.mlp.linear_fc2 for layer in chunk.decoder.layers)
    other.weight = one.weight


def _reads_a_foreign_parameter(chunk: Any) -> None:
    """Which belongs to the model, and to no layer."""
    chunk.scale = scale = nn.Parameter(torch.full((1,), 1.5))
    changes_output(chunk.decoder.layers[0].mlp, lambda out: out * scale)


def _prepared(prepare: Callable[[Any], Any]) -> Callable[..., Trainer]:
    return partial(ModelTrainer, prepare=prepare)


_SHARED = frozenset({"SHARED_PARAMETER"})
_EXPERTS = frozenset({"experts"})
_RANKS = frozenset({"tp", "sp", "cp", "some", "dp"})
_APART = frozenset({"tp", "dp"})
_SPLIT: tuple[Scopes, ...] = (("attn",), ("attn", "moe_router"), ("attn", "moe_router", "moe_preprocess"))
KINDS: dict[str, Kind] = {
    "dense": Kind(make=ModelTrainer, has=frozenset({"dense"}), layouts=_RANKS),
    "probes": Kind(make=_prepared(around_mlps(Probe)), has=frozenset({"probes"}), layouts=_APART),
    "adapters": Kind(make=_prepared(adapt), has=frozenset({"adapters"})),
    "tied embeddings": Kind(
        make=partial(ModelTrainer, arguments=lambda _config: {"share_embeddings_and_output_weights": True})
    ),
    "three layers": Kind(make=partial(ModelTrainer, layers=3, query_groups=1)),
    "own forwards": Kind(make=partial(HostTrainer, OwnModel, OwnBlock)),
    "shared parameter": Kind(make=_prepared(_shares_a_parameter), reasons=_SHARED),
    "foreign parameter": Kind(make=_prepared(_reads_a_foreign_parameter), reasons=_SHARED),
}
_ATTN, _ROUTED, _PREPROCESSED = _SPLIT
_OF_EXPERTS: dict[str, tuple[dict[str, Any], tuple[Scopes, ...], frozenset[str]]] = {
    "experts": ({}, (_ATTN, ("mlp",), _ROUTED, (*_ROUTED, "mlp")), frozenset({"ep", "dp"})),
    "biased experts": ({"config": {**moe_rig.BIAS, **moe_rig.SHARED}}, (_ATTN, _ROUTED), frozenset()),
    "padded experts": ({"config": moe_rig.PADS}, (("attn", "moe"), _PREPROCESSED, _ROUTED), frozenset()),
    "grouped experts": ({"is_grouped": True}, ((), _ROUTED), frozenset()),
}
for _name, (_given, _scopes, _layouts) in _OF_EXPERTS.items():
    KINDS[_name] = Kind(make=partial(_experts, **_given), scopes=_scopes, has=_EXPERTS, layouts=_layouts)
_OVERLAPPED: dict[str, dict[str, Any]] = {
    "overlapped experts": {},
    "overlapped shared experts": moe_rig.SHARED,
    "late gradients": {"delays": "unfused"},
    "late gradients, fused": {"delays": "fused", **moe_rig.SHARED},
}
if ON_GPU:
    _OVERLAPPED |= {f"{name}, engine": {**given, "engine": True} for name, given in _OVERLAPPED.items()}
KINDS |= {
    name: Kind(
        make=partial(_overlapped, **given),
        scopes=_SPLIT if seams.permutation_sorts() else _SPLIT[:2],
        has=_EXPERTS | {"overlap", *(("late gradients",) if "delays" in given else ())},
        layouts=frozenset({"ep"}),
        around=copies_for_all_to_all,
    )
    for name, given in _OVERLAPPED.items()
}
KINDS |= {
    f"stage {stage}": Kind(
        make=partial(_stage, stage), has=frozenset({"stages"}), around=partial(_without_others, stage)
    )
    for stage in range(STAGES)
}
if seams.hybrid_seams():
    KINDS["hybrid"] = Kind(make=partial(ModelTrainer, pattern=HYBRID_PATTERN), layouts=_APART)
    KINDS["mamba"] = Kind(make=mamba, scopes=((), ("mamba",), ("attn", "mamba")), has=frozenset({"hybrid"}))
    KINDS["mamba and experts"] = Kind(
        make=lambda config=None: mamba_experts("M*E-", **(config or {})),
        scopes=(("mamba", "attn", "moe_router"), ("mamba", "attn", "moe_router", "mlp")),
        has=frozenset({"experts", "hybrid"}),
    )
for _name in MLA_KINDS:
    # The table of one is made on a GPU.
    _layouts = _RANKS if ON_GPU or "YaRN" not in _name else _RANKS - {"cp", "some"}
    KINDS[f"MLA: {_name}"] = Kind(make=partial(ModelTrainer, mla=_name), layouts=_layouts)
if ON_GPU:
    KINDS["engine"] = Kind(make=lambda **given: ModelTrainer(spec=te_layer_spec(), **given))
KINDS = {name: Kind(**{**vars(kind), "make": seeded(kind.make)}) for name, kind in KINDS.items()}

# -- options of the plugin ---------------------------------------------------------------------------

# Of each the plainest first. Capacities are tokens, documents, longest document; none are learned.
PLUGIN: dict[str, tuple[Any, ...]] = {
    "capacities": ([[64, 6, 64]], [[32, 3, 32], [64, 6, 64]], [[64, 6, 40]], [[64, 8, 64], [64, 3, 64]], []),
    "cuda_graph_granularity": ("layer", "layer", "chunk"),
    "cuda_graph_max_states": (8, 4, 2),
    "cuda_graph_slots": (None, None, 2),
    "cuda_graph_warmup_steps": (1, 1, 2),
    "verify": ("capture", "capture", "off", 3),
    "tail": ("hidden", "hidden", "empty-dummy"),
}


def draw_plugin(rng: Random) -> dict[str, Any]:
    """Some options, as plain data."""
    return {name: rng.choice(values) for name, values in PLUGIN.items()}


def plugin_of(kind: Kind, scopes: Scopes, plugin: dict[str, Any], layout: str = "") -> GraphConfig:
    """The same as the plugin takes them, for a first model of this kind."""
    overlaps = "overlap" in kind.has  # whose last documents fill their capacity
    capacities = tuple(
        Capacity(tokens=tokens, num_seqs=documents, max_seqlen=tokens if overlaps else longest)
        for tokens, documents, longest in plugin["capacities"]
    )
    given = {**plugin, "capacities": capacities, "cuda_graph_modules": scopes}
    if overlaps:  # which is refused in one graph of all layers
        given["cuda_graph_granularity"] = "layer"
    if "stages" in kind.has:  # as many as are in flight
        given["cuda_graph_slots"] = None
    if layout == "some":
        given |= {"cp_sizes": (1, 2), "cuda_graph_max_packed_seqs": (6,), "max_seqlen_per_dp_cp_rank": 64}
        given["capacities"] = ()
    if layout in ("cp", "some") or any(each.max_seqlen != each.tokens for each in capacities):
        given["tail"] = "hidden"  # the other one asks for documents as long as the pack
    return graph_config(**given)
