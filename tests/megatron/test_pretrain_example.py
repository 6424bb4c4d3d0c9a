# SPDX-License-Identifier: Apache-2.0
"""docs/examples/pretrain_packed.py: its packs, and a run in Megatron-LM's own loop, which 0.19 has. That is
on a CPU that it takes for a GPU: what names a device there is replaced, and nothing else."""

import functools
import importlib.util
import json
import re
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typing_extensions
from megatron.core import num_microbatches_calculator, rerun_state_machine
from torch.utils.data import DataLoader

import megagraph
from megagraph._C import Capacity

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))
import packed_documents  # noqa: E402
import pretrain_packed  # noqa: E402
from packed_documents import PackedDocuments, canonical_sample, pack_sample  # noqa: E402

TOKENS = 64
LINES = ("def", "return", "import torch", "for row in rows:", "assert one == other", "x" * 70, "pass")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Paragraphs of many lengths, enough for some sixty packs."""
    path = tmp_path_factory.mktemp("documents") / "paragraphs.jsonl"
    texts = (
        "\n".join(LINES[(file + place + line) % len(LINES)] for line in range(1 + place % 4))[:TOKENS]
        for file in range(3)
        for place in range(60)
    )
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def packs(documents: Path) -> list[Any]:
    return packed_documents.read_packs(documents, TOKENS, None)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])) for name, value in one.items()
    )


def test_a_sample_is_told_by_number_and_an_epoch_has_each_pack_once_in_its_order(packs: list[Any]) -> None:
    count, far = len(packs), 3 * len(packs)
    one = PackedDocuments(packs, far, seed=5)
    in_order = [one[number] for number in range(far)]
    other = PackedDocuments(packs, 2 * far, seed=5)  # a run that goes on for longer
    for number in reversed(range(far)):
        assert same(in_order[number], other[number])
    epochs = [[it["tokens"].tolist() for it in in_order[start : start + count]] for start in (0, count)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(pack.tokens.tolist() for pack in packs)
    assert epochs[0] != epochs[1]


def test_what_is_held_out_is_not_trained_on(packs: list[Any]) -> None:
    parts = packed_documents.split_packs(packs)
    assert all(parts)
    assert sorted(id(pack) for part in parts for pack in part) == sorted(map(id, packs))
    with pytest.raises(ValueError, match="at least 20 packs, got 3"):
        packed_documents.split_packs(packs[:3])


def test_a_batch_is_the_pack_of_its_sample(packs: list[Any]) -> None:
    """Packs of different sizes go through torch's own collate, as Megatron's loader calls it."""
    dataset = PackedDocuments(packs, 40, seed=5)
    batches = iter(DataLoader(dataset, batch_sampler=[[number] for number in range(40)]))
    counts = set()
    for number in range(40):
        sample, batch = dataset[number], pretrain_packed.get_batch(batches, torch.device("cpu"))
        params = batch["packed_seq_params"]
        offsets = params.cu_seqlens_q
        assert params.cu_seqlens_kv is offsets and params.qkv_format == "thd"
        assert offsets.dtype == torch.int32 and torch.equal(offsets, sample["cu_seqlens"])
        assert offsets[0] == 0 and offsets[-1] == batch["tokens"].numel() <= TOKENS
        assert type(params.max_seqlen_q) is int
        assert params.max_seqlen_q == params.max_seqlen_kv == int(offsets.diff().max())
        counts.add(offsets.numel())
        for first, last in zip(offsets.tolist(), offsets[1:].tolist(), strict=False):
            tokens, labels = batch["tokens"][0, first:last], batch["labels"][0, first:last]
            assert torch.equal(labels[:-1], tokens[1:])
            assert batch["loss_mask"][0, first:last].tolist() == [1.0] * (last - first - 1) + [0.0]
            assert torch.equal(batch["position_ids"][0, first:last], torch.arange(last - first))
    assert len(counts) > 2, "packs of one size show nothing"


def test_a_canonical_sample_is_a_pack_and_a_document_without_loss(packs: list[Any], documents: Path) -> None:
    """For which there is room, or it is refused."""
    for sample in map(pack_sample, packs):
        rows, given = sample["tokens"].numel(), sample["cu_seqlens"]
        padded = canonical_sample(sample, TOKENS, 12)
        assert same(canonical_sample(padded, TOKENS, 12), padded)
        if given.tolist() == [0, TOKENS]:
            assert same(padded, sample)
            continue
        assert padded["max_seqlen"] == int(padded["cu_seqlens"].diff().max())
        assert padded["cu_seqlens"].shape == (13,) and padded["cu_seqlens"].dtype == torch.int32
        assert torch.equal(padded["cu_seqlens"][: given.numel()], given)
        assert (padded["cu_seqlens"][given.numel() :] == TOKENS).all()
        assert padded["loss_mask"].sum() == sample["loss_mask"].sum()
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert padded[name].shape == (TOKENS,) and padded[name].dtype == sample[name].dtype
            assert torch.equal(padded[name][:rows], sample[name])
    short = next(pack for pack in packs if pack.num_tokens < TOKENS)
    with pytest.raises(ValueError, match=f"fewer than {short.num_seqs} documents"):
        canonical_sample(pack_sample(short), TOKENS, short.num_seqs)
    roomy = packed_documents.read_packs(documents, TOKENS, 2)
    dataset = PackedDocuments(roomy, None, seed=5, canonical=(TOKENS, 3))
    samples = [dataset[number] for number in range(len(dataset))]
    assert {sample["cu_seqlens"].numel() for sample in samples if sample["max_seqlen"] < TOKENS} == {4}


# --- Megatron-LM's loop ----------------------------------------------------------------------

ARGUMENTS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --position-embedding-type rope "
    f"--seq-length {TOKENS} --max-position-embeddings {TOKENS} --global-batch-size 2 --seed 7 --lr 1e-2 "
    "--lr-decay-iters 100 --log-interval 1 --eval-interval 4 --eval-iters 2 --transformer-impl local "
    "--no-gradient-accumulation-fusion --no-rope-fusion --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --attention-dropout 0 --hidden-dropout 0 "
    # A CPU has neither of these.
    "--use-cpu-initialization --clip-grad 0 --distributed-backend gloo --num-workers 0 "
    # The other format starts processes and needs psutil. There are no random states of a GPU.
    "--ckpt-format torch --no-save-rng --no-load-rng"
)

Pretrain = Callable[[str], dict[str, str]]


def log_figures(log: str) -> dict[str, str]:
    """The printed loss and gradient norm of each step, and the loss of each evaluation."""
    figures = dict(re.findall(r"validation loss at (.+?) \| lm loss value: (\S+)", log))
    for number, loss, norm in re.findall(r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+) ", log):
        figures |= {f"loss {number}": loss, f"grad norm {number}": norm}
    return figures


@pytest.fixture
def pretrain(monkeypatch: Any, capfd: Any, documents: Path) -> Pretrain:
    """Runs the script with arguments; returns what the log says of each step and evaluation."""
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("this megatron-core has no megatron.training")
    if torch.cuda.is_available():
        pytest.skip("stands for a GPU; there is one: run the script")
    if not hasattr(typing, "override"):  # Python 3.12
        monkeypatch.setattr(typing, "override", typing_extensions.override, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")  # as a launcher does
    from megatron.training import global_vars, initialize, training

    properties = SimpleNamespace(total_memory=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *args: properties)
    without_gpu = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    monkeypatch.setattr(training, "initialize_megatron", without_gpu)
    monkeypatch.setattr(training, "set_jit_fusion_options", lambda **kwargs: None)  # compiles for a GPU

    def run(arguments: str) -> dict[str, str]:
        line = f"{ARGUMENTS} --documents {documents} {arguments}"
        monkeypatch.setattr(sys, "argv", ["pretrain_packed.py", *line.split()])
        try:
            pretrain_packed.main()
        finally:
            global_vars.destroy_global_vars()
            num_microbatches_calculator.destroy_num_microbatches_calculator()
            rerun_state_machine.destroy_rerun_state_machine()
        return log_figures(capfd.readouterr().out)

    return run


def install(mode: str) -> None:
    """Installs the plugin as the script's packs need it."""
    capacity = Capacity(tokens=TOKENS, num_seqs=8, max_seqlen=TOKENS)
    megagraph.install(megagraph.GraphConfig(mode=mode, capacities=(capacity,), progress=False))


# What torch's loader says on a CPU.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.parametrize("packs", ["", "--pack-canonical 8"], ids=["as they are", "canonical"])
def test_the_log_is_eagers_through_save_and_resume(pretrain: Pretrain, tmp_path: Path, packs: str) -> None:
    options = f"--train-iters 8 {packs}"
    install("eager")
    eager = pretrain(f"{options} --save {tmp_path / 'eager'} --save-interval 4")
    megagraph.uninstall()
    assert len(eager) == 2 * 8 + 4  # evaluations after 4 and 8, and of both parts at the end

    install("graph")
    graphed = pretrain(f"{options} --save {tmp_path / 'graph'} --save-interval 4")
    (report,) = megagraph.reports()
    megagraph.uninstall()
    assert report["replays"] > report["calls"] / 2
    assert report["calls"] == report["replays"] + report["eager"]["WARMING_UP"]
    assert graphed == eager

    install("graph")
    resumed = pretrain(f"{options} --load {tmp_path / 'graph'} --ckpt-step 4 --exit-on-missing-checkpoint")
    megagraph.uninstall()
    # The second line after a start has the mean loss of two steps: Megatron's.
    assert resumed.pop("loss 6") != eager["loss 6"]
    assert resumed == {name: eager[name] for name in resumed}
    assert {"loss 5", "grad norm 6", "loss 8"} <= resumed.keys()

    # Without the plugin packs are not padded, and RoPE rounds otherwise. Norms have four digits in the log.
    assert {name: float(figure) for name, figure in pretrain(options).items()} == {
        name: pytest.approx(float(it), rel=1e-3 if "norm" in name else 1e-5) for name, it in eager.items()
    }


def test_what_packs_cannot_do_is_refused_by_name(pretrain: Pretrain) -> None:
    for option, sentence in (
        ("--micro-batch-size 2", "--micro-batch-size: a micro-batch is one pack"),
        ("--pack-canonical 1", "--pack-canonical: expected at least 2 documents, got 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            pretrain(f"--train-iters 2 {option}")
