# SPDX-License-Identifier: Apache-2.0
"""What every test runs under: which megatron-core, one thread, what is skipped. `MEGAGRAPH_TEST_CORE` names a
folder with an unpacked megatron-core wheel that is tested in place of the installed release."""

import gc
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

# Shapes are small: more threads would only wait for one another.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS, read at its start
sys.path.append(str(Path(__file__).resolve().parent.parent))  # benchmarks are not installed

TEST_CORE = os.environ.get("MEGAGRAPH_TEST_CORE")
if TEST_CORE:
    folder = str(Path(TEST_CORE).resolve())
    if not Path(folder, "megatron", "core").is_dir():
        raise RuntimeError(f"MEGAGRAPH_TEST_CORE: expected a folder with megatron/core, got {TEST_CORE}")
    sys.path.insert(0, folder)
    # For the processes that tests start.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

# The same examples in each run, however slow the machine. `--hypothesis-profile=random` draws others.
settings.register_profile("repeated", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("repeated")


def megatron_core_version() -> str | None:
    """The version of the megatron-core that tests import, or None where there is none."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        return None
    return metadata.version("megatron-core")


def import_core() -> None:
    """Megatron-core, and mamba-ssm where it is, which picks its kernels' configurations then. Both warn."""
    os.environ.setdefault("MAMBA_DETERMINISTIC", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core.models.gpt")
        if importlib.util.find_spec("mamba_ssm") is not None:
            importlib.import_module("megatron.core.ssm.mamba_mixer")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill fresh memory with NaN (integers with their maximum), so that a row nobody writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Reference counts alone end what lives, and nobody is called meanwhile."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def rope_utils() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without Transformer Engine its import warns
        return importlib.import_module("megatron.core.models.common.embeddings.rope_utils")


@pytest.fixture
def fused_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Megatron's fused RoPE of multi-latent attention, whose kernels work on one head at a time. Sums over
    heads go by the number that their autotuner picks. And with two the gradient of queries has a data race:
    warps rotate a head that they share in place."""
    module = pytest.importorskip("megatron.core.fusions.fused_mla_yarn_rope_apply")
    if not module.HAVE_TRITON:
        pytest.skip("Megatron's fused RoPE of multi-latent attention needs Triton")
    for name in ("fwd_q", "bwd_q", "fwd_kv", "bwd_kv"):
        kernel = getattr(module, f"rotary_{name}_kernel")
        one_head = [config for config in kernel.configs if config.kwargs["BLOCK_H"] == 1]
        monkeypatch.setattr(kernel, "configs", one_head)
        monkeypatch.setattr(kernel, "cache", {})
    yield module
    torch.cuda.empty_cache()  # of a GPU that processes share


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also run the tests that take minutes")
    parser.addoption(
        "--first-parameters",
        action="store_true",
        help="run every test with the first of its parameters only, but those that are marked `both`",
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and megatron_core_version() is not None:
        import_core()


def pytest_report_header(config: pytest.Config) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"torch {torch.__version__}, megatron-core {megatron_core_version()}, {device}"


def pytest_collection_finish() -> None:
    """Collections leave out what was imported, and come less often: few objects of a step are in cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


# What megatron-core says of its own options, in folders whose tests make models; ours are errors still.
_CORE_WARNINGS = ("ignore::UserWarning:megatron", "ignore::DeprecationWarning:megatron")
_MAKE_MODELS = frozenset({"cli", "megatron"})
# Files that take the longest come first, so that nobody waits for one of them in the end.
_LONGEST = ("ends", "dynamic_context", "overlap_alone", "model_bits", "soak", "delayed_weights", "chunks")
_LONGEST += ("jit_fuser", "install")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    missing = {
        "gpu": "needs a CUDA device" if num_gpus < 1 else None,
        "multi_gpu": f"needs 2 CUDA devices, found {num_gpus}" if num_gpus < 2 else None,
        "megatron": "needs megatron-core" if megatron_core_version() is None else None,
        "soak": "runs with --soak" if not config.getoption("--soak") else None,
    }
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in _LONGEST)
    for item in items:
        if item.path.parent.name in _MAKE_MODELS:
            for core_warning in _CORE_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(core_warning))
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    if config.getoption("--first-parameters"):
        _keep_first_parameters(config, items)


def _keep_first_parameters(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each function the first item that does not skip, and what is marked `both`."""
    functions: dict[object, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    kept: set[pytest.Item] = set()
    for its_items in functions.values():
        kept.add(min(its_items, key=lambda item: item.get_closest_marker("skip") is not None))
        kept.update(item for item in its_items if item.get_closest_marker("both"))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
