# SPDX-License-Identifier: Apache-2.0
"""Captures one variant of a bank into one slot: the capture plan.

Note [Capture plan]
All forwards are captured in execution order, then all backwards in reverse, each with what finishes it, and
every tensor that crosses a graph's edge is kept until the last one is done. So the slot's pool hands out its
blocks like a stack, which is what the nesting rule (csrc/bank/replay/slot_ring.h) relies on; capturing
forward and backward together, layer by layer, corrupts a shared pool. A site's output tensor *is* the next
site's input, and the gradient of that input *is* the output's gradient: no copies in between.

Where something eager lies between two sites, it is passed over: each site takes hidden states of the
variant's shape. What crosses such a gap is written right before the pass that reads it. So the gradients on
both sides of it go back to the pool as soon as their pass is captured, and so do outputs that are transient.

Meanwhile our gradient accumulators stand in place of torch's (csrc/bank/capture/main_grad_node.h, Note
[Accumulator swap]). What of its input and outputs a backward pass reads is noted in the warm-up: nobody would
notice that a graph's were written meanwhile, as autograd does by the tensors that eager saves.

What one of the ranks that share communicators cannot capture, none does. No process group is known here:
whoever makes a bank hands over `max_over_ranks`.
"""

from __future__ import annotations  # a CPU-only build has no SlotMemory

import contextlib
import functools
import gc
import pathlib
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megagraph import _C
from megagraph.bank.backends import SCRATCH, Backend
from megagraph.bank.restore import leaves_no_trace, main_grad_of, written_by
from megagraph.bank.rng import HostStreams, RngSources, Snapshot, TrackerSource, no_tracker, rewinds_of
from megagraph.bank.sites import CapturedVariant, CaptureError, SiteSpec, as_tuple
from megagraph.reasons import EagerReason

__all__ = [
    *("GAVE_UP", "BankOptions", "CapturePlan", "GroupGaveUp", "MaxOverRanks"),
    *("finish_backward", "gradient_edge", "swap_of"),
]


# From this rank's values to the largest of each over the group. Every rank calls it equally often.
MaxOverRanks = Callable[[Sequence[int]], list[int]]


# What a rank says, where others say whether a part has failed, that has given the whole up.
GAVE_UP = 2


class GroupGaveUp(RuntimeError):
    """Another rank of the group has given the whole capture, or verification, up."""

    def __init__(self) -> None:
        super().__init__("another rank of the group gave this up")


_FORWARD, _BACKWARD, _REST = range(3)  # the passes of a site
_NAMES = "forward", "backward", "rest of the backward"
_STEP = 512  # bytes, in which torch's allocator counts
_OURS = str(pathlib.Path(__file__).parent.parent), contextlib.__file__


@dataclass(frozen=True, kw_only=True)
class BankOptions:
    """What graphs are captured under."""

    # Where graphs contain collectives, so that no rank may fall back alone. Called with a micro-batch's
    # number, a variant, a site (-1 for all) and why, where a rank must run eager inside of a step what others
    # may replay: raises unless all have to. Must not lead back to the bank.
    run_eager_alike: Callable[[int, int, int, str], None] | None = None
    # Asks the ranks whose graphs hold the same collectives, after each part of a capture: a site that one of
    # them cannot capture stays eager on all of them.
    max_over_ranks: MaxOverRanks = list
    tracker: TrackerSource = no_tracker  # of named random streams that the model draws from
    # Entered around everything that runs in a capture, and around replays of the host backend.
    guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    # Names of attributes that calls may change: graphs do not, and the caller answers for that.
    left_out: Collection[str] = ()
    # Where two slots share memory: the part of it, by slot and site, for what a forward keeps. If they also
    # share what is given back, a pass of the one comes only once everybody who was handed something by the
    # other's is done, on any stream. csrc/bank/replay/slot_ring.h, Note [Facing slots].
    facing: Sequence[Sequence[int]] = ()
    share_given_back: bool = False
    poison: bool = False  # fill boundaries of a freed slot with NaN (always on the CPU): who reads them shows
    annotate: bool = False  # name each replay for profilers, as a range of torch's and as an NVTX range

    def somewhere(self, here: bool) -> bool:
        """Whether it is so of any rank's part, which all have just tried; raises where one has given up."""
        (worst,) = self.max_over_ranks([int(here)])
        if worst == GAVE_UP:
            raise GroupGaveUp
        return bool(worst)


def _line_of(error: BaseException) -> str:
    """Where the error came up, in code outside torch if there is any; empty if this package raised it."""
    frames = [it for it in traceback.extract_tb(error.__traceback__) if not it.filename.startswith(_OURS)]
    torch_package = str(pathlib.Path(torch.__file__).parent)
    outside = [frame for frame in frames if not frame.filename.startswith(torch_package)]
    return "".join(f" at {it.filename}:{it.lineno} in {it.name}" for it in (outside or frames)[-1:])


def _already_added(param: Tensor) -> Callable[[], bool] | None:
    """Asks, at the gradient's turn, whether a layer with fused accumulation has added it itself."""
    if main_grad_of(param) is None or not hasattr(param, "grad_added_to_main_grad"):
        return None
    return lambda: bool(param.grad_added_to_main_grad) and not getattr(param, "zero_out_wgrad", False)


def swap_of(site: SiteSpec, training: bool) -> _C.AccumulatorSwap:
    """Accumulators of ours for the parameters of a site."""
    params = [param for _name, param in site.trainable()] if training else []
    return _C.AccumulatorSwap([(param, main_grad_of(param), _already_added(param)) for param in params])


def _in_words(tensor: Tensor) -> str:
    """Whose attribute a tensor is, if any module has it, and what it looks like."""
    modules = (it for it in gc.get_objects() if issubclass(type(it), nn.Module))
    named = ((module, *item) for module in modules for item in vars(module).get("_parameters", {}).items())
    names = [f"{name} of a {type(module).__name__}" for module, name, param in named if param is tensor]
    return f"{names[0] if names else 'a tensor'} ({tensor.dtype}, {tuple(tensor.shape)})"


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def _saved_places() -> Iterator[dict[int, int]]:
    """Notes where tensors lie that autograd saves inside, and how many bytes there are."""
    places: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            places[_place(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output that is handed back to its own node would keep all before it

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield places


class CapturePlan:
    """Warms up, or captures into one slot, one variant of a bank. Leaves no trace of either.

    `sites` are those that do not stay eager, by index, in execution order. `gaps` are the bank's.
    """

    _trace: _C.OpTrace  # while work runs

    def __init__(
        self,
        backend: Backend,
        rng: RngSources,
        options: BankOptions,
        gaps: Set[int],
        sites: Mapping[int, SiteSpec],
        variant: CapturedVariant,
        slot: int,
    ) -> None:
        self._backend, self._rng, self._options = backend, rng, options
        self._gaps, self._sites = gaps, sites
        # Not the variant: executables of the host backend, which C++ holds, keep this plan for their bodies.
        self._saves, self._reads, self._kept_bytes = variant.saves, variant.reads, variant.kept_bytes
        self._notes = variant.notes[slot]
        spec, self._arguments = variant.spec, variant.given[slot]
        self._training, self._shape, self._dtype = spec.training, (spec.rows, *spec.row_shape), spec.dtype
        self._end = None if spec.end_buffer is None else variant.buffers[slot][spec.end_buffer]
        self._edges = _C.CaptureEdges(
            transient={index: site.transient for index, site in sites.items()},
            gaps=gaps,
            shape=self._shape,
            dtype=spec.dtype,
            device=backend.device,
        )
        # Of each site between its forward and its backward: its leaf, and where its backward begins, for each
        # output that has a gradient.
        self._open: dict[int, tuple[Tensor, Sequence[GradientEdge | None]]] = {}

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        """On the backend's stream, with ops watched and random streams put back."""
        snapshot = self._rng.snapshot()
        self._trace = _C.OpTrace()
        try:
            with self._backend.recording():
                yield
        finally:
            del self._trace
            self._rng.restore(snapshot)

    @contextlib.contextmanager
    def _named(self, index: int, phase: str) -> Iterator[None]:
        """Turns what goes wrong inside, here or on another rank, into a CaptureError that says where."""
        try:
            yield
        except GroupGaveUp:
            raise
        except CaptureError as error:
            if error.reason is not EagerReason.GROUP_DISAGREED:  # the others have told this rank
                self._options.somewhere(True)
            raise
        except Exception as error:
            self._options.somewhere(True)
            where = f"{phase} failed{_line_of(error)}, last op {self._trace.last_op or 'none'}"
            detail = f"{where}: {type(error).__name__}: {error}"
            raise self._error(index, EagerReason.CAPTURE_FAILED, detail) from error
        self._await_peers(index, phase)

    def _error(self, index: int, reason: EagerReason, detail: str) -> CaptureError:
        return CaptureError(site=self._sites[index].name, index=index, reason=reason, detail=detail)

    def _await_peers(self, index: int, phase: str) -> None:
        """Goes on where every rank of the group can."""
        if self._options.somewhere(False):
            detail = f"{phase} failed on another rank of the group"
            raise self._error(index, EagerReason.GROUP_DISAGREED, detail)

    def warm_up(self) -> None:
        """Runs every site once, forward and backward, on memory of its own; the variant learns of it.

        Libraries make their handles and choose their kernels here, where it is allowed. A `CaptureError`
        names the site, the op and the line.
        """
        for of_sites in (self._saves, self._reads, self._kept_bytes):
            of_sites.clear()  # of an attempt before
        with self._traced():
            device = self._backend.device
            x = torch.empty(self._shape, dtype=self._dtype, device=device)
            x.uniform_(-1, 1, generator=torch.Generator(device).manual_seed(0))
            for index in self._sites:
                first, *_further = self._warm_up_site(index, x)
                if index not in self._gaps:
                    x = first

    def _warm_up_site(self, index: int, x: Tensor) -> list[Tensor]:
        before, host = self._rng.snapshot(), HostStreams()
        attributes = _C.PlainAttributes([*self._sites[index].named_modules()], self._options.left_out)
        with self._named(index, "warm-up"), contextlib.ExitStack() as undo:
            undo.callback(lambda: (attributes.put_back(), host.put_back()))
            self._await_peers(index, "warm-up")  # a rank that got no further enters no collective
            with (
                leaves_no_trace([self._sites[index]], work_runs=True),
                rewinds_of(self._backend.device) as rewinds,
                self._options.guard(),
            ):
                outputs = self._run_once(index, x)
            if self._rng.drew_unsafely(before):
                detail = "draws random numbers from a stream that no graph can advance"
                raise self._error(index, EagerReason.RNG_NOT_GRAPH_SAFE, detail)
            if rewinds.has_drawn():
                detail = "draws random numbers from a stream that was set back, as what recomputes does"
                raise self._error(index, EagerReason.RNG_NOT_GRAPH_SAFE, detail)
            first = [output.detach() for output in outputs]
            self._compare_next(index, x, before, host, first, attributes.put_back(leaves_values=True))
            undo.pop_all()
        return first

    def _compare_next(
        self,
        index: int,
        x: Tensor,
        before: Snapshot,
        host: HostStreams,
        first: Sequence[Tensor],
        changed: str | None,
    ) -> None:
        """Makes sure that eager draws as often: Megatron may recompute unless it is told of a capture.

        And that the site draws nothing from the host's streams; once another thread may have done so. Where
        an attribute has `changed`, that no call goes by its value: csrc/watch/plain_attributes.h, Note
        [Plain attributes].
        """
        after, has_drawn_on_host = self._rng.snapshot(), host.put_back()
        is_other = changed is not None or has_drawn_on_host or self._rng.has_moved(before, after)
        if not self._options.somewhere(is_other):
            return
        self._rng.restore(before)
        in_capture = self._saves[index]
        with leaves_no_trace([self._sites[index]], work_runs=True, left_out=self._options.left_out):
            outputs = self._run_once(index, x)
        self._saves[index] = in_capture
        if changed is not None and not all(map(_C.have_same_bits, first, outputs)):
            raise ValueError(f"{changed}, and the next call made other outputs")
        if self._rng.has_moved(after, self._rng.snapshot()):
            detail = "draws other random numbers in eager than in a capture, as what recomputes does"
            raise self._error(index, EagerReason.RNG_NOT_GRAPH_SAFE, detail)
        if host.put_back() and has_drawn_on_host:
            detail = "draws from Python's or numpy's generator, which a graph asks only once"
            raise self._error(index, EagerReason.RNG_NOT_GRAPH_SAFE, detail)

    def _run_once(self, index: int, x: Tensor) -> tuple[Tensor, ...]:
        site, training = self._sites[index], self._training
        swap, given = swap_of(site, training), x.detach().requires_grad_(training)
        reads = self._reads.setdefault(index, _C.ReadTrace(self._backend.device))
        with reads.watching(given, site.parameters()), swap, torch.set_grad_enabled(training):
            with _saved_places() as saved:
                outputs = as_tuple(site.call(given, **self._arguments))
            self._saves[index] = _place(given) in saved, [_place(output) in saved for output in outputs]
            self._kept_bytes[index] = self._bytes_of(site, saved, given, outputs)
            self._refuse_parameters(index)
            # A rank that failed by now takes no part in the backward's collectives.
            self._await_peers(index, "warm-up of the forward")
            if training:
                differentiable = [output for output in outputs if output.requires_grad]
                torch.autograd.backward(differentiable, [*map(torch.ones_like, differentiable)])
                finish_backward(site, swap, self._options)
                self._refuse_parameters(index)
                late = [name for name, param in site.trainable() if param.grad is not None]
                if late:
                    raise ValueError(f"expected main_grad of {late[0]}, whose gradient comes late, got none")
        if swap.has_parts:  # eager has (g + a) + b in .grad, a graph's sum makes it g + (a + b)
            detail = "a parameter without main_grad gets its gradient in parts, which eager adds one by one"
            raise self._error(index, EagerReason.SHARED_PARAMETER, detail)
        if index not in self._gaps:
            if len(outputs) != 1:
                raise ValueError(f"expected one output, as nothing takes several, got {len(outputs)}")
            if outputs[0].shape[:1] != x.shape[:1]:
                raise ValueError(f"expected an output of {x.shape[0]} rows, got {tuple(outputs[0].shape)}")
        return outputs

    def _bytes_of(
        self, site: SiteSpec, saved: Mapping[int, int], given: Tensor, outputs: Sequence[Tensor]
    ) -> int:
        """What a graph's pool would keep for the backward, and the outputs, in the allocator's steps."""
        kept = {**saved, **{_place(output): output.untyped_storage().nbytes() for output in outputs}}
        others = [given, *site.parameters(), *written_by(site).values(), *_C.tensors_in(self._arguments)]
        for other in others:
            kept.pop(_place(other), None)
        return sum(-(-size // _STEP) * _STEP for size in kept.values())

    def _refuse_parameters(self, index: int) -> None:
        """Refuses a parameter that the site writes, or that none of its modules has.

        Such a one is behind a closure or in a list. Its gradient would be left in the pool. The site that has
        it, if one does, goes first: eager adds up what both give before it is added to what was there.
        """
        own = [param for _name, param in self._sites[index].trainable()]
        if (written := self._reads[index].written()) is not None:
            name = next(name for name, param in self._sites[index].named_parameters() if param is written)
            raise ValueError(f"writes its parameter {name}, as each run of a capture would once more")
        borrowed = self._reads[index].trainable(own) if self._training else None
        if borrowed is None:
            return
        for other, site in self._sites.items():
            if any(borrowed is param for _name, param in site.trainable()):
                detail = f"a parameter is used by {self._sites[index].name} too, none of whose modules has it"
                raise self._error(other, EagerReason.SHARED_PARAMETER, detail)
        detail = f"reaches {_in_words(borrowed)}, a parameter that none of its modules has"
        raise self._error(index, EagerReason.SHARED_PARAMETER, detail)

    def capture(
        self, memory: _C.SlotMemory | None, pool: int, kept_in: Sequence[int], given_back: int
    ) -> dict[int, _C.SiteGraph]:
        """Captures as Note [Capture plan] says, after the warm-up, into a pool, but forwards into `kept_in`.

        `memory` is what each pass allocates, learned or to be learned; None where slots share nothing.
        `kept_in` are pools by site; from the pool `given_back` comes what passes hand over to something
        eager, or are handed.
        After a `CaptureError`, which names the site, the op and the line, everything has been undone.
        """
        sites, runs = [*self._sites.values()], self._backend.runs_while_recording
        with self._traced(), leaves_no_trace(sites, work_runs=runs, left_out=self._options.left_out):
            return self._record(memory, pool, kept_in, given_back)

    def _record(
        self, memory: _C.SlotMemory | None, pool: int, kept_in: Sequence[int], given_back: int
    ) -> dict[int, _C.SiteGraph]:
        if memory is not None and memory.is_known:
            for at, num_bytes in memory.needs(pool, given_back, kept_in, SCRATCH).items():
                self._backend.reserve(at, num_bytes)
        edges = self._edges
        swaps = {index: swap_of(site, self._training) for index, site in self._sites.items()}
        passes = [(it, _FORWARD, kept_in[it], self._forward, edges.give_back_outputs) for it in self._sites]
        for index in reversed([*self._sites] if self._training else []):
            passes.append((index, _BACKWARD, pool, self._backward, edges.give_back_gradients))
            if self._sites[index].finish is not None:
                passes.append((index, _REST, pool, self._finish, lambda site: None))
        captured: dict[tuple[int, int], _C.Executable] = {}
        for index, phase, at, run, give_back in passes:
            body, done = functools.partial(run, index, swaps[index]), functools.partial(give_back, index)
            with self._named(index, f"capture of the {_NAMES[phase]}"):
                of_pass = None if memory is None else memory.of(index, phase)
                pools = (at, given_back, kept_in[index])
                captured[index, phase] = self._backend.record(pools, body, of_pass, done)
                self._notes[index] = self._backend.note(pool)
        edges.disown()
        return {
            index: edges.graph(
                index,
                forward=captured[index, _FORWARD],
                backward=captured.get((index, _BACKWARD)),
                finish=captured.get((index, _REST)),
                accumulated=swaps[index].reached,
            )
            for index in self._sites
        }

    def _forward(self, index: int, swap: _C.AccumulatorSwap) -> None:
        site, edges, training = self._sites[index], self._edges, self._training
        x = edges.input(index).detach().requires_grad_(training)
        with swap, self._options.guard(), torch.set_grad_enabled(training):
            outputs = as_tuple(site.call(x, **self._arguments))
        edges.keep_outputs(index, outputs)
        if training:
            self._open[index] = x, [*map(gradient_edge, outputs)]

    def _backward(self, index: int, swap: _C.AccumulatorSwap) -> None:
        edges, (x, begins) = self._edges, self._open.pop(index)
        grads = edges.output_grads(index, [begin is not None for begin in begins])
        pairs = zip(begins, grads, strict=True)
        given = [(begin, grad) for begin, grad in pairs if begin is not None and grad is not None]
        if not given:
            raise ValueError("expected an output that needs a gradient, got none")
        with swap, self._options.guard():
            torch.autograd.backward([begin for begin, _ in given], [grad for _, grad in given])
        if x.grad is None:
            raise ValueError("expected a gradient of the hidden states, got none")
        grad = edges.keep_input_grad(index, x.grad)
        if self._end is not None and edges.is_entry(index):
            torch.ops.megagraph.zero_tail_([grad], self._end)
        edges.keep_param_grads(index, swap.take_kept_grads())

    def _finish(self, index: int, swap: _C.AccumulatorSwap) -> None:
        with swap:
            finish_backward(self._sites[index], swap, self._options)


def finish_backward(site: SiteSpec, swap: _C.AccumulatorSwap, options: BankOptions) -> None:
    """Does what a site's backward has left to be done later, if anything, in the context of its swap.

    Hosts may have hooks on that: they are told of a capture.
    """
    if site.finish is not None:
        with options.guard():
            site.finish(site.module)
        swap.take_left_grads()


def gradient_edge(output: Tensor) -> GradientEdge | None:
    """Where the backward of an output begins; holds none of its memory."""
    return get_gradient_edge(output) if output.requires_grad else None
