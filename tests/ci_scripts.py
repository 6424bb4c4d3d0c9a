# SPDX-License-Identifier: Apache-2.0
"""The scripts of `.ci` as modules; a source distribution has none of them."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / ".ci"


def load(name: str) -> ModuleType:
    """A fresh module of that script, which has not run; it leaves no bytecode beside it."""
    loader = SourceFileLoader(f"ci_{name}", str(FOLDER / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    sys.path.insert(0, str(FOLDER))
    try:
        loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
        sys.dont_write_bytecode = before
    return module


def load_runner(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """One that runs pytest, which begins and is looked at more quickly."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    module = load(name)
    monkeypatch.setattr(sys.modules["lanes"], "LOOK_SECONDS", 0.02)
    return module
