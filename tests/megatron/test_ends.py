# SPDX-License-Identifier: Apache-2.0
"""Jobs under torchrun end, and one rank speaks; ranks of tests that hang or fail are named. NCCL waits for
ever for a communicator that a living graph holds. As a program this is a rank of such a job."""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from unittest import mock

import context_jobs
import megatron_rig as rig
import moe_rig
import overlap_rig
import pytest
import torch
import worlds
from overlap_rig import OverlapTrainer
from run_scripts import TRAINING, environment_with, patience
from streams import make_groups
from torch import distributed

import megagraph
from megagraph import cli
from megagraph.cli.reports import read_report
from megagraph.demo.cpu import megatron_on_cpu

SECONDS = 240  # imports of all ranks
COMMAND = "run"
WAYS = ("released", "destroyed", "forgotten", "raised")
OVERLAPPED = "overlapped"  # of experts whose exchange of rows overlaps; else as forgotten
KEPT: list[Any] = []  # until the process has ended
# On a GPU whether it ends is a matter of chance, so that each way has jobs of its own, of twenty seconds.
needs_two = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs or none")
ON_GPU = [
    pytest.param([COMMAND], marks=needs_two),
    *([way] for way in (*WAYS, OVERLAPPED)),
    *(pytest.param([way], marks=pytest.mark.soak) for way in WAYS for _ in range(4)),
    *(pytest.param([OVERLAPPED], marks=pytest.mark.soak) for _ in range(19)),
]
# Documents of 16 tokens on rank 0 and of 15 on rank 1, four to a pack: each learns a capacity of its own.
SCRIPT = TRAINING.replace("n % 20 + 5", "16 - int(os.getenv('RANK'))").replace("import sys", "import os, sys")
END = "from megagraph.log import log; log.info('one line'); log.warning('a warning')"


@pytest.mark.ranks
@pytest.mark.parametrize(
    "ways", ON_GPU if rig.ON_GPU else [(COMMAND, OVERLAPPED, "forgotten", "raised")], ids="-".join
)
def test_a_job_of_two_ranks(ways: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    here, *further = Path(__file__).parents[:2]
    variables = {"GLOO_SOCKET_IFNAME": "lo", "TORCHDYNAMO_DISABLE": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with subprocess.Popen(
        [*torchrun, __file__, str(tmp_path), *ways],
        env={**environment_with(here, *further), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            out, log = job.communicate(timeout=SECONDS * patience())
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun then ends its ranks; it could not if it were killed
            raise
    assert (job.returncode != 0) == ("on purpose" in log) == ("raised" in ways), log
    assert out.count("has ended") == 2 * len({*ways} - {"raised"})
    if COMMAND in ways:
        (model,) = read_report(tmp_path / "report.json")
        assert model["replays"] == 2 * 2


def run_command(folder: Path) -> None:
    """Every rank printed the table, the log and its own advice on capacities, without its number."""
    options = {"MEGAGRAPH_REPORT": str(folder / "report.json"), "MEGAGRAPH_CUDA_GRAPH_WARMUP_STEPS": "1"}
    rank, out, err = int(os.environ["RANK"]), io.StringIO(), io.StringIO()
    with mock.patch.dict(os.environ, options), redirect_stdout(out), redirect_stderr(err):
        assert cli.main(["run", str(folder / "script.py"), "3", END]) == 0
    assert out.getvalue().count("loss") == 3  # both trained
    assert err.getvalue().count("layer calls") == 2 * (1 - rank)  # in the table and the verdict
    once = ["of layer calls replayed", "installed in megatron-core", "learned from", "captured 4 graphs"]
    once.append("one line")
    assert [err.getvalue().count(words) for words in once] == [1 - rank] * len(once), err.getvalue()
    said = [line for line in err.getvalue().splitlines() if "a warning" in line]
    assert said == [f"megagraph: {'[rank 1] ' * rank}a warning"]


def fail(*_args: Any) -> None:
    raise RuntimeError("on purpose")


def train_overlapped() -> None:
    """Leaves graphs of a model whose ranks exchange rows beside them."""
    make_groups(expert_model_parallel_size=2)
    megagraph.install(rig.graph_config(cuda_graph_modules=overlap_rig.SCOPES))
    with moe_rig.experts_on_cpu():
        trainer = OverlapTrainer(expert_model_parallel_size=2, overlap_moe_expert_parallel_comm=True)
        KEPT.append(trainer)
        for micros in overlap_rig.steps_of(2):
            rig.step(trainer, micros)
    rig.ran(rig.report_of(trainer), WARMING_UP=overlap_rig.COUNTS[0] * overlap_rig.CALLS)


def train_and_end(way: str) -> None:
    """Ends a job whose graphs hold communicators of several sizes."""
    trainer = context_jobs.new_trainer()
    micros = context_jobs.warmed(trainer)
    assert rig.report_of(trainer)["replays"] > 0
    if way == "raised":
        trainer.chunk.output_layer.register_forward_hook(fail)
        rig.step(trainer, micros)
    if way == "released":
        megagraph.uninstall()
    if way != "forgotten":
        distributed.destroy_process_group()


def main(folder: Path, way: str) -> None:
    """Makes a rank of this process, which trains and ends."""
    if way == COMMAND:
        run_command(folder)
        return
    megagraph.uninstall()  # of the way before
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rig.ON_GPU:
        worlds.take_gpu(rank, size)
    if not distributed.is_initialized():
        # torchrun's, in which each job after another has names of its own.
        store = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size)
        names = distributed.PrefixStore(way, store)
        backend = "nccl" if rig.ON_GPU else "gloo"
        distributed.init_process_group(backend, store=names, rank=rank, world_size=size)
    with megatron_on_cpu():
        if way == OVERLAPPED:
            train_overlapped()
        else:
            make_groups()
            train_and_end(way)


# -- the world of ranks that tests run in: whoever fails or waits for ever is named, and soon ---------

in_gloo = partial(distributed.new_group, backend="gloo")


def waits_alone(*, rank: int) -> None:
    """One rank enters a collective that no other enters; it is stopped before, until somebody asks."""
    group, pid = in_gloo(), os.getpid()
    if distributed.get_rank() == rank:
        subprocess.Popen(["sh", "-c", f"sleep {patience()}; kill -CONT {pid}"])
        os.kill(pid, signal.SIGSTOP)
        distributed.all_reduce(torch.zeros(1), group=group)


def fails_alone(*, rank: int) -> None:
    """One rank raises while the others wait for it."""
    group = in_gloo()
    if distributed.get_rank() == rank:
        raise RuntimeError("of this rank alone")
    distributed.all_reduce(torch.zeros(1), group=group)


def will_end_badly(*, rank: int) -> None:
    """One rank answers, and ends with another exit code than 0."""
    if distributed.get_rank() == rank:
        Finalize(None, os._exit, (3,), exitpriority=0)


@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="the world of tests itself: shown on the CPU")
def test_ranks_that_hang_or_fail_or_end_badly_are_named_and_the_next_function_runs() -> None:
    """Bugs: a rank that waited was named nowhere; how ranks ended was an error of the next test."""
    made = worlds.Worlds()
    world = made.of(2)
    world.run(will_end_badly, rank=1)
    assert world.close() == [0, 3]
    assert world.run(distributed.get_rank) == [0, 1]  # others
    with pytest.raises(AssertionError) as hung:
        world.run(waits_alone, rank=1, late_seconds=0.2)
    first, *rest = str(hung.value).splitlines()
    assert first == "answered: ranks [0]; did not answer in time: ranks [1]"
    assert re.match(r"rank 1: no answer after \d+ s\. It is at:", rest[0])
    assert any("in waits_alone" in line for line in rest) and any("in all_reduce" in line for line in rest)
    with pytest.raises(AssertionError, match=r"answered: ranks \[\]; .* ranks \[0\]") as failed:
        world.run(fails_alone, rank=1, late_seconds=0.2)
    assert "rank 1: Traceback" in str(failed.value) and "of this rank alone" in str(failed.value)
    assert "in fails_alone" in str(failed.value).partition("rank 1:")[0]  # where rank 0 waits for it
    assert made.close() == [0, 3]  # of those that nothing broke


if __name__ == "__main__":
    for each in sys.argv[2:]:
        main(Path(sys.argv[1]), each)
        print("has ended", flush=True)
