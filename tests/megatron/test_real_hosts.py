# SPDX-License-Identifier: Apache-2.0
"""Models of real size on real ranks: the bits of eager in every step, and processes that end by themselves.
With a folder in the variable OUT, figures are written there as real_hosts.json."""

import dataclasses
import importlib.util
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from model_specs import te_layer_spec
from torch import distributed
from torch.profiler import profile
from worlds import World, Worlds

import megagraph
from benchmarks.measuring.clocks import ACTIVITIES
from benchmarks.measuring.results import Figure
from benchmarks.subjects.hosts import install_for
from benchmarks.subjects.inside import Replays
from benchmarks.subjects.packs import CASES, Case, model_options
from megagraph.demo.compare import compare_steps
from megagraph.demo.packs import Pack
from megagraph.demo.trainer import ModelOptions, Trainer

pytestmark = [pytest.mark.soak, pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
NUM_EXITS = 10
REPLAYED_MICRO_BATCHES = 84  # of 24 layers, forward and backward: more than 4,000 replays
TIMEOUT_SECONDS = 540
ALARMS = ("STATE_CHANGED", "VERIFY_FAILED")  # nothing changes here, and nothing is wrong


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model on one arrangement of ranks; `num_seqs` documents at most, so that some packs are eager.
    Packs are those of `main_case` where it is there, else lognormal. Transformer Engine's deterministic
    attention of packs takes 128 bytes of memory for each document * head * longest**2."""

    model: ModelOptions
    ranks: int = 1
    transformer_engine: bool = False
    transformer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    steps: int = 40
    num_seqs: int = 20
    longest: int = 1024
    verify: int | str = "capture"
    main_case: Case | None = None  # of `benchmarks training`

    @property
    def tensor_parallel(self) -> int:
        """Ranks that share each layer, and see the same packs."""
        return self.transformer.get("tensor_model_parallel_size", 1)

    @property
    def case(self) -> Case:
        tokens = self.model.max_tokens
        return self.main_case or Case(
            name="packs",
            model=self.model,
            max_packed_seqs=(8, self.num_seqs),
            mean_length=tokens // 8,
            longest=min(self.longest, tokens),
            multiple=self.tensor_parallel,
        )

    def packs(self, rank: int) -> list[list[Pack]]:
        groups = self.ranks // self.tensor_parallel
        return self.case.steps(self.steps * groups)[rank // self.tensor_parallel :: groups]


_SHARED = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 5_000_000}
_GATHER = {**_BUCKETS, "use_distributed_optimizer": True, "overlap_param_gather": True}
_SMALL = model_options(1024, layers=8, tokens=4096)
_TE = {"transformer_engine": True, "steps": 104}
# Long enough for what changes now and then; each of its graphs is verified again on one pack in fifty.
_LONG: dict[str, Any] = {"model": model_options(256, layers=4, tokens=1024), "steps": 1000, "verify": 50}
JOBS = {
    **{name: Job(model=case.model, main_case=case, steps=104) for name, case in CASES.items()},
    "Transformer Engine, 12 layers of hidden 1024": Job(
        model=model_options(1024, layers=12, tokens=4096), **_TE
    ),
    "Transformer Engine, 4 layers of hidden 4096": Job(
        model=model_options(4096, layers=4, tokens=2048), longest=512, **_TE
    ),
    "TP=2 with SP": Job(model=_SMALL, ranks=2, transformer=_SHARED),
    "TP=2 with SP, Transformer Engine": Job(
        model=_SMALL, ranks=2, transformer=_SHARED, transformer_engine=True
    ),
    **{
        name: Job(model=_SMALL, ranks=2, ddp=ddp, num_seqs=12)
        for name, ddp in {
            "DP=2": {},
            "DP=2, overlap_grad_reduce": _BUCKETS,
            "DP=2, distributed optimizer": {"use_distributed_optimizer": True},
            "DP=2, overlap_param_gather": _GATHER,
            "DP=2, align_param_gather": {**_GATHER, "align_param_gather": True},
        }.items()
    },
    "1,000 steps, our attention": Job(**_LONG),
    "1,000 steps, Transformer Engine": Job(transformer_engine=True, longest=256, **_LONG),
    "1,000 steps, TP=2 with SP": Job(ranks=2, transformer=_SHARED, **_LONG),
    "1,000 steps, DP=2, overlap_param_gather": Job(ranks=2, ddp=_GATHER, **_LONG),
}
# Short: what is looked at is how it ends.
EXIT = Job(model=model_options(256, layers=2, tokens=512), ranks=2, transformer=_SHARED, steps=8)

# Runtime and driver calls that wait for the device.
WAITING = [*(f"{it}Synchronize" for it in ("Stream", "Device", "Event", "Ctx")), "cudaMalloc", "cudaFree"]


def replay_costs(trainer: Trainer) -> dict[str, int]:
    """Allocations and synchronisations of captured layers alone, forward and backward."""
    replays = Replays(trainer)
    trainer.model.zero_grad_buffer()

    def replay() -> None:
        replays.replayed().backward(replays.grad)

    replay()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with profile(activities=ACTIVITIES) as trace:
        for _ in range(REPLAYED_MICRO_BATCHES):
            replay()
    waiting = [event.name for event in trace.events() if any(name in event.name for name in WAITING)]
    return {
        "replays": REPLAYED_MICRO_BATCHES * 2 * len(replays.bank.sites),
        "allocations": torch.cuda.memory_stats()["allocation.all.allocated"] - before,
        "synchronisations": len(waiting) - 1,  # the profiler itself waits once, when it stops
    }


def compare(job: Job) -> dict[str, Any]:
    """On each rank: trains eager and graphed from the same weights and compares every bit."""
    case, tokens = job.case, job.model.max_tokens
    install_for(tokens, *case.max_packed_seqs, max_seqlen=case.longest or tokens, verify=job.verify)
    spec = te_layer_spec() if job.transformer_engine else None
    config = {**job.transformer, **({"apply_rope_fusion": True} if job.transformer_engine else {})}
    eager, graphed = (Trainer(job.model, config=config, ddp=job.ddp, spec=spec) for _ in range(2))
    agreement = compare_steps(eager, graphed, job.packs(distributed.get_rank()))
    answer = dataclasses.asdict(agreement) | {"report": megagraph.reports()[-1]}
    return answer if job.main_case is None else answer | replay_costs(graphed)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.multi_gpu] * (job.ranks > 1)) for name, job in JOBS.items()],
)
def test_bits(name: str, worlds: Worlds, measured: list[Figure]) -> None:
    job = JOBS[name]
    if job.transformer_engine and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    ranks = worlds.of(job.ranks).run(
        compare, tensor_parallel=job.tensor_parallel, timeout_seconds=TIMEOUT_SECONDS, job=job
    )
    reports = [rank["report"] for rank in ranks]
    differences = [text for rank in ranks for text in rank["differences"]]
    replays, calls = (sum(report[key] for report in reports) for key in ("replays", "calls"))
    alarms = sum(report["eager"].get(reason, 0) for report in reports for reason in ALARMS)

    def tell(what: str, value: float, unit: str, **further: Any) -> None:
        measured.append(Figure(name=f"{name}: {what}", value=value, unit=unit, **further))

    differ = f"losses and gradients that differ from eager's in {job.steps} steps"
    tell(differ, len(differences), "tensors", bar=0)
    tell("share of layer calls replayed", replays / calls, "1")
    tell("layer calls that ran eager in a false alarm", alarms, "calls", bar=0)
    if job.main_case is not None:
        over = sum(n for why, n in reports[0]["eager"].items() if why.startswith(("TOO_", "SEQUENCE_")))
        packs = over // reports[0]["layers"]
        tell("packs over the capacity, run eager", packs, "packs", bar=3, better="higher")
        for what, unit in {"allocations": "allocations", "synchronisations": "calls"}.items():
            tell(f"{what} in {ranks[0]['replays']} replays", ranks[0][what], unit, bar=0)
        assert ranks[0]["allocations"] == ranks[0]["synchronisations"] == 0
    assert differences == [] and alarms == 0
    assert replays > calls / 2 and not any(report["failures"] for report in reports)


@pytest.mark.multi_gpu
def test_processes_with_nccl_in_their_graphs_end_well(measured: list[Figure]) -> None:
    codes = []
    for _ in range(NUM_EXITS):
        world = World(2)
        world.run(compare, tensor_parallel=2, job=EXIT)
        codes.append(world.close())
    well = codes.count([0, 0])
    name = f"runs with NCCL in their graphs that end well, of {NUM_EXITS}"
    measured.append(Figure(name=name, value=well, unit="runs", bar=NUM_EXITS, better="higher"))
    assert well == NUM_EXITS, codes
