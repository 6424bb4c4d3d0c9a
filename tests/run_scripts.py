# SPDX-License-Identifier: Apache-2.0
"""What users of the commands write: scripts, a config file, documents."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Says what it sees to the file next to it.
WITNESS = """
import json, sys
from pathlib import Path
from megagraph.megatron.patch.installation import installed_plugin
config = installed_plugin().config if installed_plugin() else None
Path(__file__).with_name("seen.json").write_text(json.dumps({
    "argv": sys.argv, "name": __name__, "main": sys.modules["__main__"].__dict__ is globals(),
    "config": None if config is None else {
        "mode": config.mode, "warmup": config.cuda_graph_warmup_steps, "poison": config.poison,
        "capacities": [[c.tokens, c.num_seqs] for c in config.all_capacities()],
    },
}))
"""

# As a user writes it: knows of megagraph only the attention for packs, which comes with the spec.
TRAINING = """
import sys
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megagraph.demo.trainer import ModelOptions, Trainer, process_groups
from megagraph.demo.documents import Document
from megagraph.demo.packs import stream_packs
from megagraph.demo.cpu import megatron_on_cpu

def train(steps):
    documents = [Document(name=str(n), tokens=torch.arange(n % 20 + 5) % 64) for n in range(60)]
    packs = stream_packs(documents, 64, 6)
    tiny = ModelOptions(layers=2, hidden=32, heads=2, vocab=64, max_tokens=64, bf16=torch.cuda.is_available())
    with megatron_on_cpu(), process_groups():
        trainer = Trainer(tiny)
        for _ in range(steps):
            print("loss", float(trainer.forward_backward([next(packs)])[0]))
            trainer.update()

if __name__ == "__main__":
    train(int(sys.argv[1]))
    exec(sys.argv[2])
"""

MADE = "        trainer = Trainer(tiny)\n"  # a line of it, behind which a test may add others
assert MADE in TRAINING

TOML = """
[megagraph]
cuda_graph_max_packed_seqs = [6]
max_seqlen_per_dp_cp_rank = 64
cuda_graph_warmup_steps = 1
progress = false
"""


def patience() -> float:
    """How many times as long all takes while this machine is busy: limits of time are multiplied by it."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def run_python(*words: str | Path, timeout: float = 300, **how: Any) -> subprocess.CompletedProcess[str]:
    """What a Python of its own has printed, which has ended well."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout * patience(), **how)
    assert done.returncode == 0, done.stderr[-4_000:]
    return done


class Files:
    """Writes them into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def script(self, text: str, name: str = "script.py") -> Path:
        """In a folder of its own."""
        path = self.folder / "scripts" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def toml(self, text: str = TOML, report: Path | None = None) -> Path:
        path = self.folder / "run.toml"
        path.write_text(text + (f'report = "{report}"\n' if report else ""))
        return path

    def jsonl(self, *rows: object) -> Path:
        """Rows as JSON; a row of bytes goes in as it is."""
        path = self.folder / "docs.jsonl"
        lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path


def add_to_packages(folder: Path) -> None:
    """Puts our `.pth` among the packages of each Python that finds the folder, as an installation does."""
    for name in ("auto.py", "auto.pth"):
        shutil.copy(ROOT / "megagraph" / name, folder / f"megagraph_{name}")
    (folder / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(folder)!r})\n")


def environment_with(folder: Path, *last: str | Path) -> dict[str, str]:
    """Variables without ours, and paths to that folder, to megagraph, and to what comes last."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MEGAGRAPH_")}
    paths = [folder, ROOT, *filter(None, [os.environ.get("PYTHONPATH")]), *last]
    return {**clean, "PYTHONPATH": os.pathsep.join(map(str, paths))}
