# SPDX-License-Identifier: Apache-2.0
"""Reaches into what the plugin captured: the one place of the benchmarks that knows its insides.

A bare loop launches executable graphs from C: what no plugin can be faster than.
"""

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.measuring.clocks import Call
from benchmarks.subjects.packs import a_pack, hidden_states
from megagraph.bank.bank import Bank
from megagraph.demo.trainer import Trainer, packed_seq_params
from megagraph.megatron import seams
from megagraph.megatron.patch.installation import installed_plugin
from megagraph.packs.ops import RotaryTables, rope_thd

_SOURCE = """
typedef int (*Launch)(void *, void *);
int launch_all(Launch launch, void **execs, int count, void *stream) {
  for (int i = 0; i < count; ++i) {
    int code = launch(execs[i], stream);
    if (code != 0) return code;
  }
  return 0;
}
"""


class Ends(torch.autograd.Function):
    """Rows whose gradient ends here, in each of many passes: that of a leaf would be cloned, and added."""

    forward = staticmethod(lambda _ctx, rows: rows.detach())
    backward = staticmethod(lambda ctx, *grad_outputs: None)


@functools.cache
def _compiled() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(_SOURCE, encoding="ascii")
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))


def bare_loop(execs: Sequence[int]) -> Call:
    """Launches the same graphs, `cudaGraphExec_t` handles whose owner keeps them, on the current stream."""
    if not all(execs):
        raise ValueError("expected the handles of CUDA graphs, got null: these are the host backend's")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    handles = (ctypes.c_void_p * len(execs))(*execs)
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")  # torch's
    launch, loop = ctypes.cast(runtime.cudaGraphLaunch, ctypes.c_void_p), _compiled().launch_all

    def launched() -> None:
        code = loop(launch, handles, len(handles), stream)
        if code != 0:
            raise RuntimeError(f"cudaGraphLaunch failed with CUDA error {code}")

    return launched


def graphs_of(trainer: Trainer) -> Any:
    """The plugin's graphs of a trainer's model."""
    plugin = installed_plugin()
    assert plugin is not None
    return plugin.graphs_of_model(trainer.chunk)


def bare_loops(bank: Bank, key: Any, slot: int = 0) -> tuple[Call, Call]:
    """Launch the forwards, and the backwards, that were captured for a variant into a slot."""
    forward, backward = bank.raw_graph_execs(bank.variants[key], slot)
    return bare_loop(forward), bare_loop(backward)


def bare_step(trainer: Trainer, micro_batches: int) -> Call:
    """Launches forwards and backwards of one after another. Raises `RuntimeError` where none was captured."""
    bank = graphs_of(trainer).captures.bank
    (variant,) = bank.variants.values()  # one capacity, training only
    forward, backward = bank.raw_graph_execs(variant, 0)
    if not forward or not backward:
        raise RuntimeError("no graphs were captured")
    return bare_loop([*forward, *reversed(backward)] * micro_batches)


class Replays:
    """The layers of a trainer that were captured for training, without the model around them."""

    def __init__(self, trainer: Trainer) -> None:
        self._graphs = graphs_of(trainer)
        self.bank: Bank = self._graphs.captures.bank
        self.key: Any = next(key for key in self.bank.variants if key.grad)
        self._tokens: int = self.key.capacity.tokens
        leaf = hidden_states(self._tokens, trainer.options.hidden)
        self.hidden: Tensor = Ends.apply(leaf)  # type: ignore[no-untyped-call]
        self.grad = torch.randn_like(leaf) * 1e-3
        pack = a_pack(self._tokens)
        self._params = packed_seq_params(pack.cu_seqlens.to(trainer.device), pack.max_seqlen)

    def decided(self) -> Any:
        """A micro-batch: a pack of the largest capacity, read and decided on as a model's forward does."""
        return self._graphs.dispatcher.enter(self._params, self._tokens, None, True, True, True)

    def begun(self, batch: Any) -> Any:
        """Begins a micro-batch as its block's forward does. Raises `RuntimeError` where it cannot replay."""
        if self._graphs.begin(batch, self.hidden, None, None) is None:
            raise RuntimeError(f"a micro-batch ran eager: {batch.reason.name}")
        return batch

    def end(self, batch: Any) -> None:
        """Ends what was begun."""
        self._graphs.dispatcher.end(batch)

    def replayed(self) -> Any:
        """What all layers make of a micro-batch, [tokens, 1, hidden]."""
        batch = self.begun(self.decided())
        out = self.bank.replay_all(self.hidden)
        self.end(batch)
        return out


def our_rope() -> AbstractContextManager[Any]:
    """Our RoPE of packs in unpatched attention: Megatron's reads offsets on the host."""
    seam, tables = seams.ATTENTION_ROPE, RotaryTables()

    def rotate(
        t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor, mscale: float = 1.0, **unused: Any
    ) -> Tensor:
        return rope_thd([t], *tables.tables(freqs, t.dtype, mscale), cu_seqlens)[0]

    return mock.patch.object(seam.owner(), seam.name, rotate)
