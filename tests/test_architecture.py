# SPDX-License-Identifier: Apache-2.0
"""The house stands: includes point down, files stay short, each carries its license and says what it is."""

import ast
import re
from pathlib import Path
from unittest import mock

import pytest
from test_ci_scripts import FOLDER, load

ROOT = Path(__file__).resolve().parent.parent
SPDX = {"#": "# SPDX-License-Identifier: Apache-2.0", "//": "// SPDX-License-Identifier: Apache-2.0"}
COMMENTS = {".py": "#", ".pyi": "#", ".h": "//", ".cpp": "//", ".cu": "//", ".cuh": "//"}
MAX_LINES = 600

# csrc/torch/version.h, Note [The seam to torch]: headers that torch changes as it likes, and for extensions.
SEAM = "csrc/torch/"
PRIVATE_HEADERS = (
    *("ATen/Context.h", "ATen/autocast_mode.h", "ATen/core/CachingHostAllocator.h"),
    *("ATen/cuda/CUDAContext.h", "ATen/cuda/CUDAGeneratorImpl.h", "ATen/cuda/CUDAGraph.h"),
    *("c10/core/StorageImpl.h", "c10/core/TensorImpl.h", "c10/cuda/CUDACachingAllocator.h"),
    *("c10/cuda/CUDAGraphsC10Utils.h", "torch/version.h"),
)
PUBLIC_HEADERS = (
    *("torch/csrc/autograd/autograd_not_implemented_fallback.h", "torch/csrc/autograd/custom_function.h"),
    *("torch/csrc/python_headers.h", "torch/csrc/utils/pybind.h"),
)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def source_files(*folders: str) -> list[Path]:
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return [path for path in paths if path.suffix in COMMENTS and path.name != "_build_info.py"]


def test_source_files_are_short_carry_their_license_and_begin_with_what_they_are_for() -> None:
    begins = {".py": '"""', ".pyi": '"""', ".h": "// ", ".cuh": "// "}
    long, without, silent = {}, [], []
    for path in [ROOT / "setup.py", *source_files("csrc", "megagraph", "tests", "benchmarks")]:
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines[0] != SPDX[COMMENTS[path.suffix]]:
            without.append(named(path))
        if named(path).startswith(("csrc", "megagraph")):
            if len(lines) > MAX_LINES and path.suffix != ".pyi":  # which says whatever the core binds
                long[named(path)] = len(lines)
            if not lines[1].startswith(begins.get(path.suffix, "")):
                silent.append(named(path))
    assert long == {} and without == [] and silent == []


def test_nothing_reaches_further_than_one_dot_past_a_collaborator() -> None:
    """`self.a.b` at most: what lies behind that is the collaborator's own business."""
    far = []
    for path in (ROOT / "megagraph" / "megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and re.match(r"self(\.\w+){3}", ast.unparse(node)):
                far.append(f"{named(path)}:{node.lineno}: {ast.unparse(node)}")
    assert far == []


def test_tensors_of_ours_lie_where_we_say() -> None:
    """And not on a host's default device. Bug: the first verification mixed two, which ended the capture."""
    of_users = ("megagraph/demo", "megagraph/modules", "megagraph/megatron/grouped_experts.py")
    makers = r"torch\.(arange|empty|full|ones|rand|randint|randn|tensor|zeros)"
    anywhere = []
    for path in (ROOT / "megagraph").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_made = isinstance(node, ast.Call) and re.fullmatch(makers, ast.unparse(node.func))
            if is_made and not named(path).startswith(of_users) and "device=" not in ast.unparse(node):
                anywhere.append(f"{named(path)}:{node.lineno}")
    assert anywhere == []


def includes(path: Path, leaves_out: str = r"(?!)") -> list[str]:
    text = re.sub(leaves_out, "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r'^#include [<"]([^>"]+)[>"]', text, re.MULTILINE)


def headers_of_ours(path: Path) -> set[str]:
    return {name for name in includes(path) if name.startswith("csrc/")}


def test_headers_include_one_another_in_one_direction_only() -> None:
    sources = source_files("csrc")
    headers = {named(path): headers_of_ours(path) for path in sources if path.suffix in (".h", ".cuh")}
    while leaves := {path for path, needed in headers.items() if not needed & headers.keys()}:
        headers = {path: needed for path, needed in headers.items() if path not in leaves}
    assert headers == {}


# What each folder of the core may include, beside itself.
MAY_INCLUDE = {
    "csrc/decide": (),
    "csrc/torch": (),
    "csrc/ops": ("csrc/torch",),
    "csrc/bank": ("csrc/decide", "csrc/torch", "csrc/ops"),
    "csrc/watch": ("csrc/decide", "csrc/torch"),
    "csrc/python": ("csrc/decide", "csrc/torch", "csrc/ops", "csrc/bank", "csrc/watch"),
}


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_the_core_includes_downwards_only(folder: str) -> None:
    allowed = tuple(f"{name}/" for name in (folder, *MAY_INCLUDE[folder]))
    upward = {
        f"{named(path)} -> {needed}"
        for path in source_files(folder)
        for needed in headers_of_ours(path)
        if not needed.startswith(allowed)
    }
    assert upward == set()


def test_a_core_without_cuda_includes_none_of_its_headers() -> None:
    """A torch without CUDA lacks them, and so does a machine with no toolkit."""
    cuda_sources = (ROOT / "setup.py").read_text(encoding="utf-8").partition("CUDA_SOURCES = [")[2]
    of_cuda = set(re.findall(r'"(csrc/[^"{]+)"', cuda_sources.partition("]\n\n")[0]))
    reached = {named(it) for it in source_files("csrc") if it.suffix == ".cpp"} - of_cuda
    found, todo = set(), [*reached]
    while todo:
        name = todo.pop()
        uses = {*includes(ROOT / name, r"#ifdef MEGAGRAPH_WITH_CUDA\n.*?#(else|endif)")}
        found |= {f"{name} -> {it}" for it in uses if re.search(r"\bcuda", it) and not it.startswith("csrc/")}
        new = {it for it in uses if it.startswith("csrc/")} - reached
        reached |= new
        todo += new
    assert of_cuda and found == set()


def test_only_the_seam_knows_torch_s_private_headers_and_its_release() -> None:
    """Whatever changes between releases of torch lies in one folder."""
    outside, inside = {}, set()
    for path in source_files("csrc"):
        name = named(path)
        of_torch = {it for it in includes(path) if it.startswith("torch/csrc/")}.difference(PUBLIC_HEADERS)
        private = sorted(of_torch.union(PRIVATE_HEADERS) & {*includes(path)})
        if name.startswith(SEAM):
            inside.update(private)
        elif private or re.search(r"\bTORCH_VERSION|MEGAGRAPH_TORCH_SINCE", path.read_text(encoding="utf-8")):
            outside[name] = private
    assert outside == {}
    assert inside


def test_every_place_names_the_same_releases_of_torch() -> None:
    """The build, the metadata, the matrix and the README promise one range."""

    def found(pattern: str, file: str) -> tuple[str, ...]:
        match = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"))
        assert match, f"{file} has no {pattern}"
        return match.groups()

    minors = found(r"MINORS \?= (.+)", "Makefile")[0].split()
    oldest, newest = minors[0], minors[-1]
    assert found(r"MIN_TORCH = \((\d+), (\d+)\)", "setup.py") == tuple(oldest.split("."))
    assert found(r"NEWEST_TESTED_TORCH = \((\d+), (\d+)\)", "setup.py") == tuple(newest.split("."))
    assert found(r"torch ([\d.]+) to ([\d.]+) ", "README.md") == (oldest, newest)
    built = found(r"wheel: \[(.+)\]", ".github/workflows/wheels.yml")[0].replace('"', "").split(", ")
    others = found(r"WHEELS \?= \S+ ((?:\S+:2\.11 )+)", "Makefile")[0].split()
    assert built == [*(f"3.12:{minor}" for minor in minors), *others]


needs_scripts = pytest.mark.skipif(not FOLDER.exists(), reason="is no part of the source distribution")


@needs_scripts
def test_every_figure_is_within_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("sys.argv", [".ci/sizes"]):
        code = load("sizes").main()
    assert code == 0, capsys.readouterr().out


@needs_scripts
def test_every_fault_of_the_list_fits_the_tree() -> None:
    """Each quotes its file, and names a test that there is."""
    script = load("mutants")
    faults = script.read(script.LIST.read_text(encoding="utf-8"))
    assert len(faults) == len(set(faults)) > 0
    for fault in faults:
        file, _, name = fault.test.partition("::")
        function = name.partition("[")[0]
        tests = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(", tests, re.MULTILINE), fault
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert script.applied(fault, text) != text, fault
