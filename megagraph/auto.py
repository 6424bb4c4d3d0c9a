# SPDX-License-Identifier: Apache-2.0
"""With MEGAGRAPH_AUTO=1: installs megagraph as soon as a process imports megatron.core, without a launcher.

Imported when an interpreter starts that has the variable, and by verl, which loads what is in `verl.plugins`
and keeps errors to itself. So this says what is wrong, and raises nothing. An installation has a copy beside
the package (megagraph_auto.py, for auto.pth), since that imports no package before megatron.core is imported.
Leaves the commands of `megagraph` to decide for themselves.
"""

import importlib.machinery
import importlib.util
import os
import sys
import threading
from types import ModuleType

__all__: list[str] = []

_CORE = "megatron.core"


def _say(what: str) -> None:
    print(f"megagraph: MEGAGRAPH_AUTO={os.environ['MEGAGRAPH_AUTO']}: {what}", file=sys.stderr)


def _install() -> None:
    if "megagraph.cli" in sys.modules:
        return
    try:
        from megagraph.config import GraphConfig
        from megagraph.megatron.patch.installation import install_with

        install_with(GraphConfig.from_env())  # in mode `off`, too, it is not for the script to install
    except Exception as error:
        _say(f"not installed: {error}")


class _Finder(threading.local):
    """Finds megatron.core as others do, and has its loader install megagraph behind it.

    Stays until that is loaded, since who asks for a spec may only want to know if there is one.
    """

    _is_asking = False  # on this thread

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _CORE or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_install(module: ModuleType) -> None:
            load(module)
            sys.meta_path[:] = [it for it in sys.meta_path if it is not self]
            sys.modules["megatron"].core = module  # type: ignore[attr-defined]  # as the import is about to do
            _install()

        spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


def _begin() -> None:
    switch = os.environ.get("MEGAGRAPH_AUTO", "").lower()
    if switch in ("", "0", "false", "no", "off"):
        return
    if switch not in ("1", "true", "yes", "on"):
        _say("expected true or false")
    elif _CORE in sys.modules:
        _install()
    else:
        sys.meta_path.insert(0, _Finder())


_begin()
