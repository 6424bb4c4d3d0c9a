# SPDX-License-Identifier: Apache-2.0
"""Rules of scopes, each by its number: what breaks it, and what is to be written instead."""

import functools
import inspect
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import moe_rig
import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import router
from megatron_rig import OPTIONS, Install, Pair, steps_of
from model_specs import block_spec
from moe_rig import DROPS, FULL_RECOMPUTE, GATHERS, PADS, Config, ExpertTrainer, recompute
from test_docs import SCOPES as SCOPES_PAGE
from test_docs import read, rows_of

import megagraph
from megagraph.demo.trainer import gpt_model, transformer_config
from megagraph.megatron.graphs import refusals
from megagraph.megatron.graphs.refusals import broken_rule, legal_scopes, refusal_of, scopes_of

pytestmark = pytest.mark.both

SCOPES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
ATTN, ROUTER, PERMUTES = ("attn",), ("attn", "moe_router"), ("moe_router", "moe_preprocess")
ONE_EXPERT = {"num_moe_experts": 1, "moe_router_topk": 1, "moe_router_pre_softmax": True}
ATTENTION_DROPOUT, HIDDEN_DROPOUT, JITTER = (
    {option: 0.1} for option in ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps")
)
FP32_RESIDUAL = {"fp32_residual_connection": True}


class Case(NamedTuple):
    """What breaks a rule, and what its sentence says to write instead."""

    rule: str  # its name
    scopes: Sequence[str]  # what is named
    options: Config  # of the model's config
    instead: Sequence[tuple[Sequence[str], Config]]
    words: str = ""  # of the sentence, beside those of the page
    kinds: str = "E-"


CASES = [
    Case("R7", ("attn", "moe", "moe_router"), PADS, [(("attn", "moe"), PADS), (ROUTER, PADS)]),
    Case("R8", ("moe_preprocess",), {}, [(PERMUTES, {})], "names 'moe_preprocess' without 'moe_router', on"),
    *(
        Case("R9", ("attn", *scopes), {}, [(ATTN, {})], f"names '{scopes[0]}', and", "--")
        for scopes in (("moe",), ("moe_router",), PERMUTES)
    ),
    Case("R9", ROUTER, ONE_EXPERT, [(ATTN, ONE_EXPERT)], "names 'moe_router', and"),
    *(
        Case("R10", ("attn", "mlp"), {"moe_layer_freq": often}, [(ATTN, {}), (ROUTER, {})], kinds="EE")
        for often in (1, [1, 1])
    ),
    *(Case("R11", ("attn", "moe"), it, [(("attn", "moe"), PADS), (ROUTER, it)]) for it in ({}, DROPS)),
    Case(
        *("R12", PERMUTES, DROPS),
        [(("moe_router",), DROPS), (PERMUTES, PADS), (PERMUTES, {**DROPS, **GATHERS})],
        "with moe_expert_capacity_factor the dispatcher 'alltoall' waits there for counts",
    ),
    Case("R14", ATTN, FULL_RECOMPUTE, [(ATTN, recompute("core_attn")), (ATTN, {})]),
    Case(
        *("R15", ROUTER, recompute("moe")),
        [(ATTN, recompute("moe")), (ROUTER, recompute("core_attn"))],
        "names 'moe', which runs the router again in the backward pass, and cuda_graph_modules",
    ),
    *(
        Case(
            *("R16", scopes, recompute("core_attn", **ATTENTION_DROPOUT)),
            [
                (scopes, recompute("core_attn")),
                (scopes, recompute("mlp", **ATTENTION_DROPOUT)),
                (("mlp",), recompute("core_attn", **ATTENTION_DROPOUT)),
            ],
            f"names 'core_attn', which with attention_dropout=0.1 must be in no graph, and {words}",
            "--",
        )
        for scopes, words in (
            (("attn", "mlp"), "cuda_graph_modules names 'attn'; leave one of them out"),
            ((), "cuda_graph_modules no scope, so that whole layers are; leave 'core_attn' out, or name"),
        )
    ),
    *(
        Case(
            *("R17", scopes, recompute(module, **HIDDEN_DROPOUT, **PADS)),
            [
                (ATTN, recompute(module, **HIDDEN_DROPOUT, **PADS)),
                (("mlp", "moe"), recompute("core_attn", **HIDDEN_DROPOUT, **PADS)),
            ],
            f"names '{module}', which with hidden_dropout=0.1 must",
        )
        for module, scopes in (("mlp", ("mlp",)), ("moe", ()))
    ),
    Case(
        *("R18", ("moe",), recompute("moe", **JITTER, **PADS)),
        [
            (("attn", "mlp"), recompute("moe", **JITTER, **PADS)),
            (("moe",), recompute("core_attn", **JITTER, **PADS)),
        ],
        "names 'moe', which with moe_input_jitter_eps=0.1 must",
    ),
    Case(
        *("R19", PERMUTES, recompute("layernorm")),
        [(ATTN, recompute("layernorm")), (PERMUTES, recompute("core_attn"))],
        "names 'layernorm', whose output leaves the graph of the router, and cuda_graph_modules",
    ),
    Case(
        *("M1", ROUTER, FP32_RESIDUAL, [(ATTN, FP32_RESIDUAL), (ROUTER, {})]),
        "'moe_router' in cuda_graph_modules with fp32_residual_connection=True is not supported yet",
    ),
]
IDS = [f"{case.rule} {' '.join(case.scopes) or 'whole'} {index}" for index, case in enumerate(CASES)]


def model_of(config: Any, kinds: str = "E-") -> Any:
    with moe_rig.experts_on_cpu():
        return gpt_model(OPTIONS, config, block_spec(kinds))


def model(kinds: str = "E-", **options: Any) -> Any:
    """Of layers of these kinds, and of a real config of Megatron's, as its own checks leave it."""
    options = {**(moe_rig.BASE if "E" in kinds else {}), **options}
    made = model_of(transformer_config(OPTIONS, **{**options, "attention_dropout": 0.0}), kinds)
    made.config = transformer_config(OPTIONS, **options)  # our attention is made without dropout
    return made


def refused_by(rule: str, model: Any, scopes: Sequence[str], reason: str = "SCOPE_UNSUPPORTED") -> str:
    """The sentence, which is that of the page."""
    refusal = refusal_of(model, None, scopes)
    *_rest, told = rows_of(SCOPES_PAGE, "rule")[rule]
    assert refusal is not None and refusal.reason.name == reason and told.strip('"') in refusal.sentence
    assert refusal.sentence.endswith(f" ({rule})")
    return refusal.sentence


def test_every_rule_has_a_case_and_a_row_of_the_page() -> None:
    kept = {name: told for name, (_broken_by, told, _sentence) in rows_of(SCOPES_PAGE, "rule").items()}
    numbers = [name for name in kept if name.startswith("R")]
    assert numbers == [f"R{number}" for number in range(7, 20)]
    assert sorted([*numbers, *rows_of(SCOPES_PAGE, "other rule")]) == sorted(f"R{it}" for it in range(1, 22))
    assert kept.pop("R13") == "the experts"  # which are not named then
    assert {*re.findall(r'"([RM]\d+)"', inspect.getsource(refusals))} == kept.keys()
    of_cases = [name for name in kept if name not in ("M2", "M3", "M4")]
    assert list(dict.fromkeys(case.rule for case in CASES)) == of_cases
    assert kept == {**dict.fromkeys(kept, "the model"), "R14": "the model (`RECOMPUTING`)"}


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_rule_refuses_the_model_as_the_page_says_and_names_what_to_write(case: Case) -> None:
    often = {"E-": {"moe_layer_freq": [1, 0]}}.get(case.kinds, {})
    reason = "RECOMPUTING" if case.rule == "R14" else "SCOPE_UNSUPPORTED"
    broken = model(case.kinds, **{**often, **case.options})
    assert case.words in refused_by(case.rule, broken, case.scopes, reason)
    for scopes, options in case.instead:
        assert refusal_of(model(case.kinds, **{**often, **options}), None, scopes) is None, (scopes, options)


@pytest.mark.parametrize("scopes", [(), ("mlp",), ("attn", "mlp", "moe_router")], ids=" ".join)
def test_under_expert_overlap_nothing_is_graphed_behind_the_dispatch(scopes: Sequence[str]) -> None:
    overlapped = model("-E")
    assert refusal_of(overlapped, None, scopes or ("attn",)) is None
    overlapped.config.overlap_moe_expert_parallel_comm = True
    refused_by("M4", overlapped, scopes)
    assert refusal_of(overlapped, None, scopes_of(overlapped, ())) is None


def with_graphs(scopes: Sequence[str], options: Config) -> Any:
    """A config under which Megatron makes graphs of its own, or what its checks raise."""
    name = "cuda_graph_modules"
    if not hasattr(TransformerConfig, name):  # up to 0.17
        name = "cuda_graph_scope"
    options = {"cuda_graph_impl": "transformer_engine", name: list(scopes) or "full", **options}
    return transformer_config(OPTIONS, **options)


@pytest.mark.parametrize("options", [{}, GATHERS, moe_rig.OVERLAPPED], ids=str)
def test_rule_19_is_where_megatron_switches_recomputing_off(options: Config) -> None:
    """For scopes in its own config, whoever makes the graphs. With ours the layers do recompute."""
    scopes = ("attn", "moe_router")
    options = {**moe_rig.BASE, **recompute("layernorm", **options)}
    plain, theirs = model_of(transformer_config(OPTIONS, **options)), model_of(with_graphs(scopes, options))
    with_names = model_of(with_graphs(scopes, {**options, "cuda_graph_impl": "none"}))
    assert plain.decoder.layers[0].recompute_pre_mlp_layernorm
    assert not theirs.decoder.layers[0].recompute_pre_mlp_layernorm
    refused_by("R19", plain, scopes)
    assert set(scopes_of(with_names, ())) == set(scopes)
    assert refusal_of(with_names, None, scopes) is None


# Options of which each rule asks some, every one with every other and every set of scopes.
GRID: Sequence[Sequence[Config]] = (
    (
        {},
        moe_rig.BASE,
        {**moe_rig.BASE, **DROPS},
        {**moe_rig.BASE, **PADS},
        {**moe_rig.BASE, **DROPS, **GATHERS, "moe_layer_freq": [0, 1]},
    ),
    ({}, FULL_RECOMPUTE, *(recompute(module) for module in ("core_attn", "mlp", "moe"))),
    ({}, HIDDEN_DROPOUT, ATTENTION_DROPOUT, JITTER),
)


def test_all_combinations_are_refused_that_megatron_refuses_and_no_others() -> None:
    """Without layers at hand, since Megatron asks its config alone which of them have experts."""
    subsets = [scopes for count in range(7) for scopes in itertools.combinations(SCOPES, count)]
    seen = {True: 0, False: 0}
    for chosen in itertools.product(*GRID):
        options = {name: value for part in chosen for name, value in part.items()}
        plain = transformer_config(OPTIONS, **options)
        for scopes in subsets:
            broken = broken_rule(plain, scopes, [])
            try:
                with_graphs(scopes, options)
            except AssertionError as error:
                assert broken is not None, (scopes, options, error)
            else:
                assert broken is None, (scopes, options, broken[1])
            seen[broken is None] += 1
    assert min(seen.values()) > 500


def test_rule_12_of_rows_that_are_padded_for_narrow_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which Megatron asks by the option's older name only. It comes with fp8 alone, which is refused."""
    config = transformer_config(OPTIONS, **moe_rig.BASE)
    monkeypatch.setattr(config, "moe_router_padding_for_quantization", True)
    broken = broken_rule(config, ("moe_router", "moe_preprocess"), [])
    assert broken is not None and broken[1].endswith("counts from the device; leave it out (R12)")
    assert broken_rule(config, ("moe_router",), []) is None


# Of layers "E-": options, and what is graphed if nothing is named.
CHOSEN: dict[str, tuple[Config, Sequence[str]]] = {
    "router": ({}, ("attn", "mlp", "moe_router")),
    "recomputed": (recompute("moe"), ("attn", "mlp")),
    "wide": (FP32_RESIDUAL, ("attn", "mlp")),
    "replayed": ({"moe_enable_routing_replay": True}, ("attn", "mlp")),
    "replayed, grouped": ({"moe_enable_routing_replay": True, "is_grouped": True}, ("attn", "mlp")),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_rule_13_leaves_experts_eager_alone_if_nothing_is_named(case: str, install: Install) -> None:
    """Megatron checks it nowhere, and fails in the capture. Bug: such layers stayed eager."""
    if case == "wide" and torch.cuda.is_available():
        pytest.skip("Megatron's local norms take no wide residual in bfloat16")
    options, chosen = CHOSEN[case]
    with_graphs((), moe_rig.BASE)  # raises nothing
    install()
    with moe_rig.experts_on_cpu():
        report = Pair(ExpertTrainer, kinds="E-", **options).train([micro] for micro, *_others in steps_of(3))
    assert report["cuda_graph_modules"] == [*chosen] and report["failures"] == []
    assert report["eager"] == {"WARMING_UP": 2} and report["replays"] == 2 * 2


def test_rules_10_11_and_13_ask_the_layers_too() -> None:
    """A config may say that all layers have experts while a spec, or a hybrid's pattern, says otherwise."""
    of_kinds = {kinds: model(kinds) for kinds in ("--", "E-", "EE")}
    for kinds, is_broken in (("E-", False), ("EE", True)):
        assert of_kinds[kinds].config.moe_layer_freq == 1
        assert (refusal_of(of_kinds[kinds], None, ("attn", "mlp")) is not None) == is_broken
    stage = of_kinds["EE"]
    of_stage = transformer_config(OPTIONS, **moe_rig.BASE, moe_layer_freq=[0, 1])
    assert broken_rule(of_stage, ("attn", "mlp"), stage.decoder.layers) is None
    # Those of another stage may be grouped.
    assert broken_rule(of_stage, ("attn", "moe"), of_kinds["--"].decoder.layers) is None
    for config, kinds in ((moe_rig.BASE, "--"), (FULL_RECOMPUTE, "E-")):
        given = transformer_config(OPTIONS, **{**moe_rig.BASE, **config})
        assert legal_scopes(given, of_kinds[kinds].decoder.layers) == ()
    assert [*legal_scopes(stage.config, stage.decoder.layers)] == ["attn", "moe_router"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_rule_m2_refuses_a_choice_of_experts_by_a_host(when: str, install: Install, monkeypatch: Any) -> None:
    """In a graph it would choose as in the micro-batch of the capture, whatever it looks at."""
    if when == "after":
        install()
    of_experts, grouped = model(), ExpertTrainer("E-", is_grouped=True).chunk
    assert refusal_of(of_experts, None, ROUTER) is refusal_of(grouped, None) is None
    megatrons = router.topk_routing_with_score_function
    chosen = functools.wraps(megatrons)(lambda *args, **kwargs: megatrons(*args, **kwargs))
    with monkeypatch.context() as patched:
        patched.setattr(router, "topk_routing_with_score_function", chosen)
        if when == "before":
            install()
        for whose, scopes in ((of_experts, ROUTER), (of_experts, ("moe_router",)), (grouped, ())):
            refused_by("M2", whose, scopes)
        assert refusal_of(grouped, None, scopes_of(grouped, ())) is None
        megagraph.uninstall()


def test_rule_m3_refuses_gradients_of_experts_that_are_made_apart() -> None:
    """By a config as it is: Megatron allows the option with Transformer Engine's experts only."""
    config = transformer_config(OPTIONS, **{**moe_rig.BASE, **PADS})
    layers = model().decoder.layers
    assert broken_rule(config, ("attn", "moe"), layers) is None
    config.overlap_dispatch_backward_with_experts_wgrad = True
    _reason, sentence = broken_rule(config, ("attn", "moe"), layers) or pytest.fail("no rule is broken")
    assert sentence.endswith("leave one of them out (M3)")
    assert broken_rule(config, ("attn", "moe_router"), layers) is None
    assert broken_rule(config, (), layers) is None  # no layer with experts is graphed whole


# -- docs/scopes.md ------------------------------------------------------------------------------

KINDS_OF_EXPERTS: dict[str, Config] = {
    "dropless": {},
    "dropped, `alltoall`": DROPS,
    "dropped, `allgather`": {**DROPS, **GATHERS},
    "dropped and padded": PADS,
}


def test_the_page_of_scopes_has_the_combinations_that_break_no_rule() -> None:
    told = rows_of(SCOPES_PAGE, "of experts")
    assert f"| of experts | {' | '.join(KINDS_OF_EXPERTS)} |" in read(SCOPES_PAGE)
    assert len(told) == 2**3
    for names, cells in told.items():
        scopes = () if names == "none of the three" else tuple(names.split())
        assert set(scopes) <= {"moe", "moe_router", "moe_preprocess"}
        for (kind, options), cell in zip(KINDS_OF_EXPERTS.items(), cells, strict=True):
            config = transformer_config(OPTIONS, **{**moe_rig.BASE, **options})
            broken = broken_rule(config, ("attn", *scopes), [])
            said = "" if broken is None else broken[1]
            assert said == "" if cell == "yes" else said.endswith(f" ({cell})"), (names, kind)
