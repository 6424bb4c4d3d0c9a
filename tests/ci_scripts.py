# SPDX-License-Identifier: Apache-2.0
"""The scripts of `.ci` as modules; a source distribution has none of them."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / ".ci"

__all__ = ["FOLDER", "load"]


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
