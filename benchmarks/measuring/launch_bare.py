# SPDX-License-Identifier: Apache-2.0
"""Launches executable graphs from a loop in C: what no plugin can be faster than."""

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

_SOURCE = """
typedef int (*Launch)(void *, void *);
int launch_all(Launch launch, void **execs, long count, long rounds, void *stream) {
  for (long round = 0; round < rounds; ++round) {
    for (long i = 0; i < count; ++i) {
      int code = launch(execs[i], stream);
      if (code != 0) return code;
    }
  }
  return 0;
}
"""


@functools.cache
def _compiled() -> ctypes.CDLL:
    """The loop. Raises `RuntimeError` where there is no C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(_SOURCE, encoding="ascii")
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or error
            raise RuntimeError(f"cannot compile the loop that launches graphs: {why}") from error
        loaded = ctypes.CDLL(str(library))
    pointer = ctypes.c_void_p
    loaded.launch_all.argtypes = (pointer, ctypes.POINTER(pointer), ctypes.c_long, ctypes.c_long, pointer)
    loaded.launch_all.restype = ctypes.c_int
    return loaded


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded. Raises `RuntimeError` where there is none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libcudart.so" in path:
            return ctypes.CDLL(path)
    raise RuntimeError("torch has loaded no libcudart in this process")


class BareLoop:
    """Launches the same graphs again and again, one after another, on the current stream.

    `execs` are `cudaGraphExec_t` handles; whoever owns the graphs keeps them alive.
    """

    def __init__(self, execs: Sequence[int]) -> None:
        if not all(execs):
            raise ValueError("expected the handles of CUDA graphs, got null: these are the host backend's")
        self._stream = torch.cuda.current_stream().cuda_stream
        self._execs = (ctypes.c_void_p * len(execs))(*execs)
        self._launch = ctypes.cast(_runtime().cudaGraphLaunch, ctypes.c_void_p)
        self._loop = _compiled().launch_all

    def __call__(self, rounds: int = 1) -> None:
        """Enqueues `rounds` times all graphs. Raises `RuntimeError` with CUDA's error code."""
        code = self._loop(self._launch, self._execs, len(self._execs), rounds, self._stream)
        if code != 0:
            raise RuntimeError(f"cudaGraphLaunch failed with CUDA error {code}")
