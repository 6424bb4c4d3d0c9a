# SPDX-License-Identifier: Apache-2.0
"""Hosts as their users start them, under MEGAGRAPH_AUTO=1: their own loops, optimizers and packs.
`started/launch.py` says what stands in for a GPU, with `started/transformer_engine`. MEGAGRAPH_TEST_HOSTS is
the folder of `pip install --no-deps --target FOLDER` of verl 0.9.1, mbridge 0.15.1, megatron-bridge 0.3.1,
ms-swift 4.6.0, mcore-bridge 1.6.5, transformers 5.8.1 and what they import."""

import json
import os
from pathlib import Path

import pytest
import torch
from run_scripts import add_to_packages, environment_with, run_python
from same_bits import assert_same_bits

HOSTS = os.environ.get("MEGAGRAPH_TEST_HOSTS", "")
STARTED = Path(__file__).parent / "started"
TOKENS = "400"
pytestmark = [
    pytest.mark.megatron,
    pytest.mark.soak,
    pytest.mark.skipif(not HOSTS, reason="needs MEGAGRAPH_TEST_HOSTS, a folder with installed hosts"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="its stand-ins are for a machine without a GPU"),
]

_FUSED = ["gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm", "apply_rope_fusion"]
_SETTINGS = ["use_cpu_initialization=True", *(f"{name}=False" for name in _FUSED)]
_VERL = ["vanilla_mbridge=True", "sequence_parallel=False", "use_distributed_optimizer=False"]
_VERL += [f"+override_transformer_config.{it}" for it in [*_SETTINGS, "attention_backend=flash"]]
_ACTOR = "actor_rollout_ref."


def _verl(place: str, settings: list[str]) -> list[str]:
    """Options of a part of its configuration, which has some of them already."""
    return [f"{'++' * it.startswith('+')}{place}{it.lstrip('+')}" for it in settings]


# How a user starts it, behind `python -m`.
STARTS = {
    "verl's supervised trainer": [
        *("verl.trainer.sft_trainer", "engine=megatron", "optim=megatron", "optim.lr=1e-2"),
        *("model.path=model", "model.use_remove_padding=True", *_verl("engine.", _VERL)),
        *("data.train_files=talks.parquet", "data.val_files=talks.parquet", "data.train_batch_size=8"),
        *(f"data.max_token_len_per_gpu={TOKENS}", "data.num_workers=0", "data.max_length=128"),
        *("data.ignore_input_ids_mismatch=True", "trainer.logger=[console]", "trainer.total_epochs=1"),
        *("trainer.total_training_steps=6", "trainer.test_freq=3", "trainer.resume_mode=disable"),
    ],
    "verl's actor and its reference": [
        *("verl_actor", "model_engine=megatron", f"{_ACTOR}model.path=model"),
        *(f"{_ACTOR}model.use_remove_padding=True", f"{_ACTOR}rollout.name=vllm"),
        *(f"{_ACTOR}rollout.tensor_model_parallel_size=1", f"{_ACTOR}actor.use_kl_loss=True"),
        *(f"{_ACTOR}actor.use_dynamic_bsz=True", f"{_ACTOR}actor.ppo_max_token_len_per_gpu={TOKENS}"),
        *(f"{_ACTOR}actor.ppo_mini_batch_size=8", f"{_ACTOR}actor.optim.lr=1e-2"),
        *(f"{_ACTOR}{it}.log_prob_use_dynamic_bsz=True" for it in ("rollout", "ref")),
        *(f"{_ACTOR}{it}.log_prob_max_token_len_per_gpu={TOKENS}" for it in ("rollout", "ref")),
        f"{_ACTOR}actor.optim.total_training_steps=100",
        *(it for role in ("actor", "ref") for it in _verl(f"{_ACTOR}{role}.megatron.", _VERL)),
    ],
    "Megatron-Bridge's pretrain()": ["bridge_pretrain", "model"],
    "ms-swift's megatron sft": [
        *("swift.cli._megatron.sft", "--model", "model", "--model_type", "qwen3", "--template", "qwen3"),
        *("--dataset", "talks.jsonl", "--packing", "true", "--packing_length", TOKENS, "--max_length", "128"),
        *("--micro_batch_size", "1", "--global_batch_size", "4", "--train_iters", "6", "--lr", "1e-2"),
        *("--output_dir", "output", "--save_steps", "100000", "--torch_dtype", "bfloat16"),
        *("--attention_backend", "flash", "--no_save_optim", "true", "--no_save_rng", "true"),
        *("--dataset_num_proc", "1"),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, conversations, and our `.pth` among the packages of each Python that begins there."""
    folder = tmp_path_factory.mktemp("hosts")
    add_to_packages(folder)
    run(folder, [str(STARTED / "small_model.py")])
    return folder


def run(folder: Path, command: list[str], **variables: str) -> None:
    clean = environment_with(folder, STARTED, HOSTS) | {"TOKENIZERS_PARALLELISM": "false"}
    clean |= {"HF_HUB_OFFLINE": "1", "USE_HF": "1", "VERL_PLATFORM": "nvidia", "MASTER_ADDR": "127.0.0.1"}
    clean |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29671"}
    run_python(*command, cwd=folder, env=clean | variables, timeout=500)


@pytest.mark.parametrize("host", STARTS)
def test_a_host_started_as_ever_replays_with_the_bits_of_an_unpatched_run(folder: Path, host: str) -> None:
    kept, report = {}, folder / "report.json"
    options = {"MEGAGRAPH_CUDA_GRAPH_MAX_PACKED_SEQS": "32", "MEGAGRAPH_CUDA_GRAPH_WARMUP_STEPS": "1"}
    options |= {"MEGAGRAPH_MAX_SEQLEN_PER_DP_CP_RANK": TOKENS, "MEGAGRAPH_REPORT": str(report)}
    for mode in ("off", "eager", "graph"):
        keep = folder / f"{mode}.pt"
        named = {**options, "MEGAGRAPH_AUTO": "1", "MEGAGRAPH_MODE": mode, "KEEP": str(keep)}
        run(folder, [str(STARTED / "launch.py"), *STARTS[host]], **named)
        kept[mode] = torch.load(keep)
    assert len(kept["graph"]) >= 5
    for other in ("eager", "off"):
        assert_same_bits(kept["graph"], kept[other], other)
    models = json.loads(report.read_text())["models"]
    print(host, [(it["model"], it["replays"], it["calls"], it["eager"]) for it in models])
    for model in models:
        assert set(model["eager"]) == {"WARMING_UP"} and model["replays"] >= 0.5 * model["calls"]
