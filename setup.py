# SPDX-License-Identifier: Apache-2.0
"""Builds megagraph._C, the C++/CUDA core.

With a CUDA compiler and a CUDA build of torch the extension holds the kernels; else it is a CPU-only build,
which runs the host backend. MEGAGRAPH_CUDA=0 builds without kernels in any case, MEGAGRAPH_CUDA=1 not without
them. TORCH_CUDA_ARCH_LIST is honoured. With MEGAGRAPH_WERROR=1 a compiler warning is an error, as in CI.

A wheel needs the torch that it was built for, and its version says which: 0.1.0+torch2.11.0.cpu. A source
distribution takes every torch that is tested.
"""

import itertools
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import warnings

import setuptools
from setuptools.command.build_py import build_py

if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"megagraph is built by setuptools 77 or newer, found {setuptools.__version__}: "
        "run `pip install 'setuptools>=77,<82'`"
    )
try:
    import torch
    from torch.utils import cpp_extension
except ImportError:
    raise SystemExit(
        "megagraph is built for the torch that it runs with, and sees none: pip hides your torch while it "
        "builds: add --no-build-isolation; if torch is not installed, install it first"
    ) from None

VERSION = "0.1.0"
ROOT = pathlib.Path(__file__).resolve().parent
MIN_TORCH = (2, 11)
NEWEST_TESTED_TORCH = (2, 15)
DEFAULT_ARCHS = ("9.0", "10.0")
FILES_A_UNIT = 11  # at most: more take longer to compile again after an edit

OPS_WITH_KERNELS = [
    *("pad_cu_seqlens", "thd_partition_indices", "thd_context", "zero_tail", "rope_thd", "rope_mla"),
]
OPS = ["rope_mla_tensors", "varlen_attention", "varlen_attention_cpu"]
BANK = [
    "capture/capture_edges",
    "capture/main_grad_node",
    "capture/op_trace",
    "capture/read_trace",
    "capture/side_branch",
    "replay/finish",
    "replay/graph_bank",
    "replay/launch",
    "replay/leased_storage",
    "replay/replay_node",
    "replay/replay_span",
    "replay/site",
    "replay/slot_ring",
    "shared_gradients",
    "staging/grid_tables",
    "staging/metadata",
    "staging/staging",
    "verify/comparison",
    "verify/kept_state",
    "verify/runs",
]
SEAM = ["accumulators", "numerics", "storages"]
PYTHON = [
    "argument_values",
    "bind_capture",
    "bind_dispatch",
    "bind_packs",
    "bind_replay",
    "bind_verify",
    "bind_watch",
    "canonical_packs",
    "constants",
    "dispatcher",
    "micro_batch",
    "module_calls",
    "module",
    "pack_dealing",
    "pack_reader",
    "rank_places",
    "site_object",
    "variant_layout",
]
WATCH = [
    *("dict_events", "module_watch", "plain_attributes", "serials"),
    *("state_items", "state_watch", "values"),
]
DECIDE = [
    "best_capacities",
    "dispatch",
    "due_variants",
    "pack_schedule",
    "placement",
    "stage_schedule",
    "states",
]
SOURCES = [
    *(f"csrc/decide/{name}.cpp" for name in DECIDE),
    *(f"csrc/torch/{name}.cpp" for name in SEAM),
    *(f"csrc/ops/{name}.cpp" for name in ["schemas", *OPS_WITH_KERNELS, *OPS]),
    *(f"csrc/bank/{name}.cpp" for name in BANK),
    *(f"csrc/watch/{name}.cpp" for name in WATCH),
    *(f"csrc/python/{name}.cpp" for name in PYTHON),
]
CUDA_SOURCES = [
    # Without ATen's headers, which are most of nvcc's time. torch's build names objects by the stem of their
    # source, so that a kernel's differs from that of the .cpp beside it.
    *(f"csrc/ops/{name}_kernel.cu" for name in OPS_WITH_KERNELS),
    "csrc/bank/staging/staging_kernel.cu",
    "csrc/ops/document_grids.cpp",
    "csrc/bank/capture/cuda_capture.cpp",
    "csrc/torch/cuda_graph.cpp",
    "csrc/torch/graph_pool.cpp",
    "csrc/torch/pass_memory.cpp",
]


def cuda_archs(nvcc: str) -> str:
    """The default architectures that this compiler knows, as TORCH_CUDA_ARCH_LIST spells them."""
    known = subprocess.run(
        [nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True
    ).stdout.split()
    archs = [arch for arch in DEFAULT_ARCHS if f"compute_{arch.replace('.', '')}" in known]
    if not archs:
        raise SystemExit(f"{nvcc} knows none of {', '.join(DEFAULT_ARCHS)}: set TORCH_CUDA_ARCH_LIST")
    return ";".join(archs)


def find_nvcc() -> str | None:
    """The CUDA compiler to build with, or None for a CPU-only build."""
    wanted = os.environ.get("MEGAGRAPH_CUDA") or "auto"
    if wanted not in ("0", "1", "auto"):
        raise SystemExit(f"MEGAGRAPH_CUDA: expected 0, 1 or auto, got {wanted!r}")
    home = cpp_extension.CUDA_HOME
    nvcc = None if home is None else pathlib.Path(home, "bin", "nvcc")
    if wanted == "0":
        return None
    if torch.version.cuda is not None and nvcc is not None and nvcc.exists():
        return str(nvcc)
    if wanted == "1":
        why = "torch is built without CUDA" if torch.version.cuda is None else f"no {nvcc or 'nvcc'} is there"
        raise SystemExit(f"MEGAGRAPH_CUDA=1 asks for kernels, and {why}: set CUDA_HOME, or MEGAGRAPH_CUDA=0")
    return None


def extension(nvcc: str | None) -> "cpp_extension.CppExtension":
    common = {
        "include_dirs": [str(ROOT)],
        # Torch's own has it, on which the layout of some of its types goes; CFLAGS would take Python's away.
        "define_macros": [("NDEBUG", None), *([("MEGAGRAPH_WITH_CUDA", "1")] if nvcc else [])],
    }
    # No contraction to fused multiply-add: csrc/ops/rope_rotation.h, Note [RoPE bits].
    cxx = [
        "-O2",
        "-g0",  # Python's own flags ask for debug information: 45 MB in every wheel
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Wno-interference-size",
        "-fvisibility=hidden",
    ]
    nvcc_flags = ["-O3", "-fmad=false", "-rdc=true"]
    if os.environ.get("MEGAGRAPH_WERROR") == "1":
        cxx.append("-Werror")
        nvcc_flags += ["-Werror", "all-warnings"]
    if nvcc is None:
        return cpp_extension.CppExtension("megagraph._C", SOURCES, extra_compile_args={"cxx": cxx}, **common)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", cuda_archs(nvcc))
    return cpp_extension.CUDAExtension(
        "megagraph._C",
        SOURCES + CUDA_SOURCES,
        # A kernel that sets other kernels' grids calls CUDA's device runtime, which has to be linked.
        extra_compile_args={
            "cxx": cxx,
            "nvcc": nvcc_flags,
            "nvcc_dlink": [
                "-dlink",
                *(f"-L{path}" for path in cpp_extension.library_paths("cuda")),
                "-lcudadevrt",
            ],
        },
        libraries=["cudadevrt"],
        **common,
    )


def units(sources: list[str], folder: pathlib.Path) -> list[str]:
    """What is compiled: files of a part in one go, as each alone would read torch's headers again."""
    compiled = [source for source in sources if not source.endswith(".cpp")]
    parts = itertools.groupby(sorted(set(sources) - set(compiled)), key=lambda it: it.split("/")[1])
    for part, group in parts:
        files = list(group)
        count = -(-len(files) // FILES_A_UNIT)
        for number in range(count):  # bindings stand side by side and take longest: each unit gets its share
            unit = folder / f"{part}_{number}.cpp"
            text = "".join(f'#include "{file}"\n' for file in files[number::count])
            if not unit.exists() or unit.read_text() != text:
                unit.parent.mkdir(parents=True, exist_ok=True)
                unit.write_text(text)
            compiled.append(str(unit))
    return compiled


class BuildExtension(cpp_extension.BuildExtension):
    """Compiles units with ninja and records what the core was built against."""

    def build_extensions(self) -> None:
        compiler = shlex.split(cpp_extension.get_cxx_compiler())[0]
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"megagraph needs a C++17 compiler, and {compiler} is not there: install g++ or set CXX"
            )
        for built in self.extensions:
            built.sources = units(built.sources, pathlib.Path(self.build_temp, "units"))
        super().build_extensions()

    def run(self) -> None:
        super().run()
        folder = ROOT / "megagraph" if self.inplace else pathlib.Path(self.build_lib, "megagraph")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_build_info.py").write_text(
            "# Written by setup.py.\n"
            f"VERSION = {self.distribution.get_version()!r}\n"
            f"TORCH_VERSION = {torch.__version__!r}\n"
            f"CUDA_VERSION = {torch.version.cuda if NVCC else None!r}\n"
        )


class BuildPy(build_py):
    """Adds what an interpreter reads at its start, beside the package: megagraph/auto.py says why."""

    def run(self) -> None:
        super().run()
        for suffix in () if self.editable_mode else (".py", ".pth"):
            source, built = ROOT / "megagraph" / "auto", pathlib.Path(self.build_lib) / "megagraph_auto"
            self.copy_file(str(source.with_suffix(suffix)), str(built.with_suffix(suffix)))


def minor(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if found < MIN_TORCH:
    raise SystemExit(f"megagraph needs torch {minor(MIN_TORCH)} or newer, found {torch.__version__}")
if found > NEWEST_TESTED_TORCH:
    warnings.warn(
        f"megagraph is tested with torch {minor(MIN_TORCH)} to {minor(NEWEST_TESTED_TORCH)}, and uses parts "
        f"of torch that are private; found {torch.__version__}: run the tests before you rely on it",
        stacklevel=1,
    )

NVCC = find_nvcc()
if "sdist" in sys.argv:
    version = VERSION
    needed = f"torch>={minor(MIN_TORCH)},<{minor((NEWEST_TESTED_TORCH[0], NEWEST_TESTED_TORCH[1] + 1))}"
else:
    # Another patch release may lay objects out in another way: the core would not load.
    release = torch.__version__.split("+")[0]
    cuda = f"cu{torch.version.cuda.replace('.', '')}" if NVCC else "cpu"
    version, needed = f"{VERSION}+torch{release}.{cuda}", f"torch=={release}"
setuptools.setup(
    version=version,
    install_requires=[needed, "rich>=13", "tomli>=2; python_version < '3.11'"],
    ext_modules=[extension(NVCC)],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True), "build_py": BuildPy},
)
