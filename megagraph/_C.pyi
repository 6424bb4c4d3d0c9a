# SPDX-License-Identifier: Apache-2.0
"""The C++ core. Also registers torch.ops.megagraph."""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, ClassVar, final, overload

import torch
from torch import Tensor
from typing_extensions import Never, Self

from megagraph.reasons import EagerReason

WITH_CUDA: bool
EAGER_REASON_NAMES: list[str]

class _pybind11_type(type): ...

class _Enum(metaclass=_pybind11_type):
    """What pybind11 gives an enum. Compare with `==`: each value that C++ returns is a new object."""

    __members__: ClassVar[dict[str, Self]]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class BankState(_Enum):
    WARM_UP: ClassVar[BankState]
    CAPTURING: ClassVar[BankState]
    SEALED: ClassVar[BankState]
    RELEASED: ClassVar[BankState]

class SegmentKind(_Enum):
    COPY: ClassVar[SegmentKind]
    OFFSETS: ClassVar[SegmentKind]
    MASK: ClassVar[SegmentKind]
    COUNT: ClassVar[SegmentKind]

class LeaseKind(_Enum):
    """What a tensor over a boundary buffer is."""

    OUTPUT: ClassVar[LeaseKind]
    TRANSIENT: ClassVar[LeaseKind]
    GRADIENT: ClassVar[LeaseKind]

class Executable(metaclass=_pybind11_type):
    """A captured pass on its way to its site."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # only the core makes one

class Slot(metaclass=_pybind11_type):
    """Storage for one in-flight micro-batch; csrc/bank/replay/slot_ring.h has the nesting rule."""

    def __init__(self, index: int, num_sites: int) -> None: ...
    def lease(self, variant: int, training: bool) -> bool: ...
    def end_micro_batch(self) -> None: ...
    def enter(self, first: int, last: int | None = None) -> bool: ...
    def leave(self, first: int, last: int | None = None) -> bool: ...
    def drop(self, first: int, last: int | None = None) -> None: ...
    def node_done(self, first: int, last: int | None = None) -> None: ...
    def await_finish(self, site: int) -> None: ...
    def finish(self, site: int) -> None: ...
    def retain_tensor(self, site: int, kind: LeaseKind = ...) -> None: ...
    def release_tensor(self, site: int, kind: LeaseKind = ...) -> None: ...
    @property
    def is_free(self) -> bool: ...
    def await_transients(self, milliseconds: int) -> bool: ...
    def describe_holders(self) -> str: ...

@final
class Site:
    """site(*tensors): the graph's outputs, or NotImplemented if the caller has to run eager."""

    def __call__(self, *inputs: Tensor) -> Tensor: ...
    @property
    def index(self) -> int: ...

class MetadataSpec(metaclass=_pybind11_type):
    """A small buffer that graphs read and that staging refills for each micro-batch.

    `source` is an index into what a micro-batch hands over, -1 for none; `fill` comes past its entries, -1
    repeats the last one; `shared` is of all slots. csrc/bank/staging/metadata.h.
    """

    def __init__(
        self,
        *,
        kind: SegmentKind,
        example: Tensor,
        source: int = -1,
        fill: int = -1,
        shared: bool = False,
    ) -> None: ...
    @property
    def is_staged(self) -> bool: ...
    def buffer(self) -> Tensor: ...
    def content(self, buffer: Tensor, sources: Sequence[Tensor], end_source: int) -> Tensor:
        """What staging would write for a micro-batch, in memory of its own."""

class SiteGraph(metaclass=_pybind11_type):
    """What one site captured for one variant and slot; csrc/bank/replay/site.h."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # CaptureEdges makes it
    @property
    def accumulated(self) -> list[Tensor]: ...
    reads: Sequence[Tensor]
    borrowed: ReadTrace
    saves_input: bool
    saves_outputs: Sequence[bool]
    def set_range(self, name: str) -> None:
        """Names its replays for profilers."""

class PoolHold(metaclass=_pybind11_type):
    """CUDA builds only."""

    def __init__(self, device_index: int, pool: tuple[int, int]) -> None: ...
    @property
    def pool(self) -> tuple[int, int]: ...

class Finish(metaclass=_pybind11_type):
    """Does what the backward of one site has left in one micro-batch; csrc/bank/replay/finish.h."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # a forward makes it
    def __call__(self) -> None: ...

class GraphBank(metaclass=_pybind11_type):
    """All graphs of one chunk of a model; csrc/bank/replay/graph_bank.h."""

    def __init__(
        self,
        device: torch.device,
        num_sites: int,
        *,
        num_slots: int,
        pools: Sequence[Sequence[PoolHold]],
        facing: Sequence[Sequence[int]],
        poison: bool,
        run_eager_alike: Callable[[int, int, int, str], None] | None,
    ) -> None: ...
    @property
    def state(self) -> BankState: ...
    def become(self, state: BankState) -> None: ...
    def count_eager(self, reason: EagerReason, calls: int) -> None: ...
    def counters(self) -> dict[str, int]:
        """`calls`, `replays` and the eager calls of each reason; replays + eager == calls."""

    def set_counters(self, counters: Mapping[str, int]) -> None: ...
    def continue_from(self, former: GraphBank) -> None: ...
    def release(self) -> None: ...
    @property
    def num_sites(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def most_in_flight(self) -> int: ...
    def last_leases(self) -> list[tuple[int, bool, float, float | None]]:
        """Slot, whether for training, when it was leased and freed (None while held), in ms since 1970."""

    @property
    def slot_index(self) -> int: ...
    def site(self, index: int) -> Site: ...
    def span(self) -> Site:
        """Every site in one go, with one autograd node; NotImplemented, uncounted, if that is impossible."""

    def set_site_eager_reason(self, index: int, reason: EagerReason) -> None: ...
    def set_site_calls(self, index: int, calls: int) -> None: ...
    def add_variant(
        self,
        *,
        training: bool,
        end_source: int,
        fewer_rows: bool,
        metadata: Sequence[MetadataSpec],
        buffers: Sequence[Sequence[Tensor]],
    ) -> int: ...
    def set_graph(self, site: int, variant: int, slot: int, graph: SiteGraph) -> None: ...
    def raw_graph_execs(self, variant: int, slot: int) -> tuple[list[int], list[int]]:
        """The `cudaGraphExec_t`s of the captured sites, forwards and backwards, in order of index."""

    def num_document_grids(self, variant: int, slot: int) -> int:
        """How many kernels of a slot's graphs have their grids set by staging; csrc/ops/document_grids.h."""

    def drop_variant(self, variant: int) -> None: ...
    def set_listener(
        self,
        wants: Callable[[], bool],
        done: Callable[[int, int], None],
        finished: Callable[[int], None],
        noticed: Sequence[int],
    ) -> None:
        """Reports finished backward passes, from whatever thread runs them: `GradientListener` says how."""

    def set_in_step(self, is_in_step: bool) -> None: ...
    def reason_before_step(self, *, training: bool, look_at_grads: bool) -> EagerReason | None:
        """Why a step that begins now would run eager for what somebody has told torch."""

    def run_eager_alike(self, variant: int, site: int, reason: EagerReason) -> None:
        """Before something runs eager inside of a step: raises unless all ranks run it so."""

    def begin(self, variant: int, sources: Sequence[Tensor], look_at_grads: bool) -> EagerReason | None: ...
    def end(self) -> None: ...
    def take_finish(self) -> Finish | None:
        """What will finish the backward of the site that replayed last in a running micro-batch, or None."""

    def watch_backward(self, output: Tensor, of_sites: Sequence[Sequence[Tensor]]) -> None: ...
    def shared_gradients(self) -> str:
        """What gave parameters several gradients in a backward, in words; csrc/bank/shared_gradients.h."""

    def take_unfinished(self) -> str:
        """In words: backwards that were never finished, as begin() would say, or are not yet; or nothing."""

    def all_free(self) -> bool: ...
    def have_borrowed_moved(self) -> bool:
        """Whether somebody has moved or dropped a tensor that graphs read and no module of theirs has."""

    def holders(self) -> str:
        """Who holds slots, in words; empty where every slot is free."""

    def changed_setting(self, variant: int) -> str: ...

class AccumulatorSwap(metaclass=_pybind11_type):
    """Gradient accumulators of ours; csrc/bank/capture/main_grad_node.h.

    Inside of its context they stand in place of the parameters' own.
    """

    def __init__(
        self, targets: Sequence[tuple[Tensor, Tensor | None, Callable[[], bool] | None]]
    ) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, error: object, *further: object) -> None: ...
    def take_kept_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Targets without main_grad whose gradient has arrived, with it; forgets these."""

    def take_left_grads(self) -> None:
        """Adds what lies in `.grad` of targets with main_grad to that, as if a backward had brought it."""

    @property
    def reached(self) -> list[Tensor]:
        """Targets with main_grad, in the order in which a backward pass first reached them."""

    @property
    def has_parts(self) -> bool:
        """Whether a target without main_grad got its gradient in more than one delivery."""

class ReadTrace(metaclass=_pybind11_type):
    """Tensors of nobody's that calls read; csrc/bank/capture/read_trace.h."""

    def __init__(self, device: torch.device) -> None: ...
    def watching(self, given: Tensor, params: Sequence[Tensor]) -> ReadTrace:
        """Watches the ops of a call that is given a tensor, inside of the context that it returns.

        What the call has written of its parameters is put back at the end.
        """

    def __enter__(self) -> ReadTrace: ...
    def __exit__(self, *error: object) -> None: ...
    def trainable(self, known: Sequence[Tensor]) -> Tensor | None:
        """The first that requires a gradient, among those that the call has read so far, but `known`."""

    def written(self) -> Tensor | None:
        """The first of its parameters that the call has written so far."""

    @staticmethod
    def unseen(call: Callable[..., Any], *args: Any) -> Any:
        """Calls something whose ops nobody is told: it reads what no graph does."""

    def keep(self, known: Sequence[Tensor]) -> None:
        """After the calls: holds the memory of what was read, lies elsewhere than `known`, and is there."""

    def __len__(self) -> int:
        """How many tensors are kept."""

    def has_moved(self) -> bool:
        """Whether some of what is kept was dropped by its owner, or lies elsewhere by now."""

class CapturingThread(metaclass=_pybind11_type):
    """csrc/python/bind_capture.cpp."""

    def __init__(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...
    def __bool__(self) -> bool: ...

class CaptureEdges(metaclass=_pybind11_type):
    """The static tensors between the sites of a plan; csrc/bank/capture/capture_edges.h."""

    def __init__(
        self,
        *,
        transient: Mapping[int, Set[int]],
        gaps: Set[int],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None: ...
    def is_entry(self, site: int) -> bool: ...
    def input(self, site: int) -> Tensor: ...
    def keep_outputs(self, site: int, outputs: Sequence[Tensor]) -> None: ...
    def output_grads(self, site: int, has_grad: Sequence[bool]) -> list[Tensor | None]: ...
    def keep_input_grad(self, site: int, grad: Tensor) -> Tensor: ...
    def keep_param_grads(self, site: int, arrived: Sequence[tuple[Tensor, Tensor]]) -> None: ...
    def give_back_outputs(self, site: int) -> None: ...
    def give_back_gradients(self, site: int) -> None: ...
    def disown(self) -> None: ...
    def graph(
        self,
        site: int,
        *,
        forward: Executable,
        backward: Executable | None,
        finish: Executable | None,
        accumulated: Sequence[Tensor],
    ) -> SiteGraph: ...

def free_if_unread(made: Tensor, taken: Tensor) -> bool:
    """Frees memory that tensors keep for their history alone; csrc/torch/storages.h."""

def tensors_in(arguments: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor of a call's arguments, also those inside containers and plain objects."""

def computed_argument(
    arguments: Mapping[str, Any], others: Mapping[str, Any], buffers: Sequence[Tensor]
) -> str | None:
    """Where the first one is that was computed from the content of a buffer.

    Each of the rest lies in a buffer or is the same in `others`, made while these held something else.
    """

class OpTrace(metaclass=_pybind11_type):
    """Remembers which op started last, while it lives."""

    @property
    def last_op(self) -> str: ...

class PoolNote(metaclass=_pybind11_type):
    """Which blocks of a pool are taken. CUDA builds only."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # only the core makes one

class PoolLoan(metaclass=_pybind11_type):
    """Note [Lent memory] in csrc/torch/pool_loan.h. CUDA builds only."""

    def __init__(self, device_index: int, pool: tuple[int, int], note: PoolNote) -> None: ...
    @property
    def is_open(self) -> bool: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def close(self) -> None: ...

class PassMemory(metaclass=_pybind11_type):
    """CUDA builds only: what a pass allocates, once it was captured, and what of it is gone at its end."""

class SlotMemory(metaclass=_pybind11_type):
    """CUDA builds only: what all passes of a slot allocate."""

    @property
    def is_known(self) -> bool: ...
    def of(self, site: int, number: int) -> PassMemory:
        """Of a site's forward, its backward, or what finishes that."""

    def needs(self, own: int, lent: int, kept_in: Sequence[int], scratch: int) -> dict[int, int]:
        """Bytes of each pool, by number; of `kept_in` by site."""

def reserve(device_index: int, pool: tuple[int, int], num_bytes: int) -> None:
    """CUDA builds only: has a pool hold one free block of so many bytes for the current stream, at least."""

def capture_work(
    pools: Sequence[tuple[int, int]],  # its own, the one that is lent, the one in which it frees
    generators: Sequence[torch.Generator],
    scratch: PoolHold | None,
    memory: PassMemory | None,
    body: Callable[[], None],
    give_back: Callable[[], None],
) -> Executable:
    """CUDA builds only: csrc/bank/capture/cuda_capture.h."""

class Capacity(metaclass=_pybind11_type):
    """What one captured variant can hold.

    Args:
        tokens: physical tokens of one rank's share of the pack.
        num_seqs: documents, zero-length ones included.
        max_seqlen: tokens of the longest document, padding included, of all ranks that share it together.

    Raises:
        ValueError: for what is no integer, or less than 1.
    """

    def __init__(self, *, tokens: int, num_seqs: int, max_seqlen: int) -> None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def num_seqs(self) -> int: ...
    @property
    def max_seqlen(self) -> int: ...
    def shared_by(self, cp_size: int) -> Capacity:
        """Of packs that ranks share: a document that may fill one rank's tokens may fill theirs."""

    def replace(self, **others: int) -> Capacity: ...
    def as_dict(self) -> dict[str, int]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __lt__(self, other: Capacity, /) -> bool: ...
    def __hash__(self) -> int: ...

class PackShape(metaclass=_pybind11_type):
    """What a pack needs, read without touching the device; csrc/decide/dispatch.h."""

    def __init__(self, tokens: int, num_seqs: int, max_seqlen: int, cp_size: int = 1) -> None: ...
    @staticmethod
    def of(params: Any, tokens: int, extra_seqs: int, cp_size: int = 1) -> PackShape | None:
        """Of a pack to which a tail adds documents; None if it describes no packed sequences."""

    @property
    def tokens(self) -> int: ...
    @property
    def num_seqs(self) -> int: ...
    @property
    def max_seqlen(self) -> int: ...
    @property
    def cp_size(self) -> int: ...
    def exceeds(self, capacity: Capacity) -> EagerReason | None:
        """The first of tokens, documents and length that `capacity` does not hold; None if it fits."""

    def replace(self, **others: int) -> PackShape: ...
    def as_dict(self) -> dict[str, int]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __lt__(self, other: PackShape, /) -> bool: ...
    def __hash__(self) -> int: ...

def needs_of(observed: Mapping[PackShape, int], extra_seqs: int = 0, expected_tokens: int = 0) -> list[int]:
    """What packs need, as csrc/decide/dispatch.h has it: tokens, usual documents, most documents."""

def capacities_for(needs: Sequence[int], extra_seqs: int = 0, cp_size: int = 1) -> list[Capacity]: ...
def best_capacities(
    packs: Mapping[PackShape, int], *, room: tuple[int, int], multiple: int, captures: int
) -> list[tuple[list[Capacity], int]]:
    """At most 1, 2, ... `captures` capacities that pad packs, counted by shape, with the fewest tokens.

    With these tokens, over all packs. csrc/decide/best_capacities.h says how documents count. `room`: tokens
    and documents that the largest one has at least; `multiple`: of tokens.
    """

class StageSchedule(metaclass=_pybind11_type):
    """What Megatron's schedules make of one stage of a pipeline (csrc/decide/stage_schedule.h).

    Raises `ValueError` if no schedule takes these, or such a number of micro-batches.
    """

    def __init__(
        self,
        *,
        stages: int = 1,
        stage: int = 0,
        chunks: int = 1,
        group_size: int | None = None,
        has_expert_overlap: bool = False,
    ) -> None: ...
    @property
    def stages(self) -> int: ...
    @property
    def stage(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def has_expert_overlap(self) -> bool: ...
    def is_legal(self, count: int) -> bool: ...
    def passes(self, count: int, *, forward_only: bool = False) -> list[tuple[bool, int, int]]:
        """Whether each is a forward, of which chunk and micro-batch, both counted from 0."""

    def in_flight(self, count: int) -> list[int]: ...
    @property
    def most_in_flight(self) -> list[int]: ...

class PackForm(metaclass=_pybind11_type):
    """What of a pack changes a graph beside its shape: which fields it carries; csrc/decide/variant_key.h."""

    def __init__(
        self, has_padded: bool, is_aliased: bool, pad_between_seqs: bool | None, has_seq_idx: bool = False
    ) -> None: ...
    @staticmethod
    def of(params: Any) -> PackForm | None:
        """None if queries and keys have offsets, or a longest document, of their own."""

    @property
    def has_padded(self) -> bool: ...
    @property
    def is_aliased(self) -> bool: ...
    @property
    def pad_between_seqs(self) -> bool | None: ...
    @property
    def has_seq_idx(self) -> bool: ...
    def replace(self, **others: bool | None) -> PackForm: ...
    def as_dict(self) -> dict[str, bool | None]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __lt__(self, other: PackForm, /) -> bool: ...
    def __hash__(self) -> int: ...

class VariantKey(metaclass=_pybind11_type):
    """The name of a variant: what graphs were captured for; csrc/decide/variant_key.h."""

    def __init__(
        self,
        capacity: Capacity | None,
        form: PackForm,
        grad: bool,
        state: int = 0,
        has_mask: bool = False,
        cp_size: int = 1,
        by_token: bool = False,
    ) -> None: ...
    @property
    def capacity(self) -> Capacity | None: ...
    @property
    def form(self) -> PackForm: ...
    @property
    def grad(self) -> bool: ...
    @property
    def state(self) -> int: ...
    @property
    def has_mask(self) -> bool: ...
    @property
    def cp_size(self) -> int: ...
    @property
    def by_token(self) -> bool: ...
    @property
    def kind(self) -> VariantKey:
        """Without its capacity: what is captured together."""

    @property
    def family(self) -> VariantKey:
        """What kinds have in common that differ in their state alone."""

    def replace(self, **others: Any) -> VariantKey: ...
    def as_dict(self) -> dict[str, Any]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __lt__(self, other: VariantKey, /) -> bool: ...
    def __hash__(self) -> int: ...

class ScheduledPack(metaclass=_pybind11_type):
    """One pack, and who runs it: `cp_size` ranks from `first_rank` on, a multiple of that."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # only the core makes one
    @property
    def cp_size(self) -> int: ...
    @property
    def first_rank(self) -> int: ...
    @property
    def documents(self) -> list[int]:
        """By index, ascending."""

class PackSchedule(metaclass=_pybind11_type):
    """What all ranks run in one step."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # only the core makes one
    @property
    def micro_batches(self) -> list[list[ScheduledPack]]:
        """The packs of each, by their first rank.

        Every rank is in exactly one of them, and no pack is empty. A rank's sizes never grow from one
        micro-batch to the next.
        """

    @property
    def costs(self) -> list[float]:
        """Of each rank, all its packs together, in tokens."""

    def of_rank(self, rank: int) -> list[ScheduledPack]:
        """The packs of one rank, one for each micro-batch."""

class ScheduleLimits(metaclass=_pybind11_type):
    """What a schedule has to keep to, and by what it weighs documents.

    A document of L tokens on c ranks has ``rows = L / c`` on each, rounded up as `alignment` says, and costs
    it ``rows + L**2 / (c * attention_parity) + exchange * rows * (c - 1)``.

    Args:
        ranks: data-parallel times context-parallel ranks, a multiple of the largest of `cp_sizes`.
        cp_sizes: how many ranks may share a pack: ascending powers of two. A group of c ranks begins at a
            multiple of c.
        max_seqlen_per_dp_cp_rank: rows of one rank in one micro-batch, at most.
        max_packed_seqs: documents of one pack, at most; those that the convention of the tail adds do not
            count.
        alignment: rows of a document on one rank are a multiple of it, and of twice as many where ranks
            share it (zigzag).
        attention_parity: the length, in tokens, at which a document's attention costs as much as everything
            else in a layer; with dense layers of width h about 12 * h.
        exchange: what it costs to fetch a token's keys and values, as a part of everything else for a token.
        micro_batch_multiple: the number of micro-batches is a multiple of it, as interleaved pipelines want.

    Raises:
        ValueError: if one of them is out of its range, or its methods are asked of no size of `cp_sizes`.
    """

    def __init__(
        self,
        *,
        ranks: int,
        cp_sizes: Sequence[int],
        max_seqlen_per_dp_cp_rank: int,
        max_packed_seqs: int,
        alignment: int = 1,
        attention_parity: int = 49152,
        exchange: float = 0.05,
        micro_batch_multiple: int = 1,
    ) -> None: ...
    @property
    def ranks(self) -> int: ...
    @property
    def cp_sizes(self) -> tuple[int, ...]: ...
    @property
    def max_seqlen_per_dp_cp_rank(self) -> int: ...
    @property
    def max_packed_seqs(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    @property
    def attention_parity(self) -> int: ...
    @property
    def exchange(self) -> float: ...
    @property
    def micro_batch_multiple(self) -> int: ...
    def rows(self, length: int, cp_size: int) -> int:
        """Rows of a document of `length` tokens on each of `cp_size` ranks that share it."""

    def capacity(self, cp_size: int, *, extra_seqs: int = 0) -> Capacity:
        """What holds every pack of `cp_size` ranks; the tail's convention adds `extra_seqs` documents."""

    def replace(self, **others: Any) -> ScheduleLimits: ...
    def as_dict(self) -> dict[str, Any]: ...

def schedule_packs(lengths: Sequence[int], limits: ScheduleLimits) -> PackSchedule:
    """Deals documents out to ranks and micro-batches; every one runs exactly once.

    Takes the fewest micro-batches it finds, and makes the largest sum of costs of a rank small. Ranks that
    call it with equal arguments, the lengths of all documents of the step, get equal schedules.

    Raises:
        ValueError: if a document is too long for the largest group, there are fewer documents than packs that
            have to be filled, or no schedule was found.
    """

def share(tensor: Tensor, rows: int, size: int, place: int) -> Tensor:
    """The rows [rows, ...] of a document [L, ...] that a rank holds; zeros past the document's end.

    The rank is in some `place` of a group of `size`. If that is not 1, each has an even number of rows.

    Raises:
        ValueError: if the document is longer than all their rows, or the place is none of the group's.
    """

class PackDealing(metaclass=_pybind11_type):
    """csrc/python/pack_dealing.h."""

    def __init__(
        self, schedule: PackSchedule, limits: ScheduleLimits, lengths: Sequence[Sequence[int]], rank: int
    ) -> None: ...
    def outgoing(
        self, documents: Sequence[Sequence[Tensor]], types: Sequence[torch.dtype], device: torch.device
    ) -> Tensor: ...
    @property
    def sent_rows(self) -> list[int]: ...
    @property
    def taken_rows(self) -> list[int]: ...
    def packs(self, taken: Tensor, types: Sequence[torch.dtype]) -> list[list[Tensor]]: ...

class States(metaclass=_pybind11_type):
    """csrc/decide/states.h."""

    def __init__(self, size: int, *, run_alike: bool = True) -> None: ...
    def local_state(self, rank: int, fingerprint: int, settings: int) -> list[int]: ...
    def agree(self, largest: Sequence[int]) -> bool: ...
    @property
    def current(self) -> int: ...
    @property
    def is_new(self) -> bool: ...
    def is_met(self, fingerprint: int, settings: int) -> bool: ...
    def has_many(self) -> bool: ...
    def forget_oldest(self, keep: Set[int]) -> set[int]: ...
    def add_name(self, fingerprint: int) -> None: ...
    def rename(self, fingerprint: int) -> None: ...
    def of_call(self, fingerprint: int) -> int: ...
    def under(self, settings: int) -> int: ...
    def ask_for_place(self, captured: Set[int], most: int) -> bool: ...
    def make_room(self, captured: Set[int], most: int) -> set[int]: ...
    def eager_reason(self, number: int, captured: Sequence[int]) -> EagerReason: ...

class DueVariants(metaclass=_pybind11_type):
    """csrc/decide/due_variants.h."""

    def __init__(self, warm_up_steps: int) -> None: ...
    def note(self, kind: VariantKey) -> None: ...
    def end_step(self) -> set[VariantKey]: ...
    def due_in(self, state: int, grad_enabled: bool) -> set[VariantKey]: ...
    def mark_captured(self, kinds: Set[VariantKey]) -> None: ...
    def forget_graphs(self, *, only_training: bool = False) -> None: ...
    def forget_states(self, states: Set[int]) -> None: ...
    @property
    def is_warm(self) -> bool: ...
    @property
    def warmed_up(self) -> set[VariantKey]: ...
    @property
    def due(self) -> set[VariantKey]: ...
    @property
    def captured(self) -> set[VariantKey]: ...
    def states_with_graphs(self) -> set[int]: ...

def has_forwards(  # csrc/python/module_calls.h
    model: torch.nn.Module, of_model: Callable[[], Any], of_block: Callable[[], Any]
) -> bool: ...
def has_layers(model: torch.nn.Module) -> bool: ...
def by_name(
    names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]: ...
def is_skipped() -> bool: ...  # csrc/torch/skipping.h
def set_skipped(is_skipped: bool) -> bool: ...
def mark_canonical(params: Any, *, by_token: bool = False) -> None: ...  # csrc/python/canonical_packs.h
def is_canonical(offsets: Tensor) -> bool: ...
def is_by_token(offsets: Tensor) -> bool: ...
def without_ranks(params: Any) -> Any: ...
def with_tail_as_document(params: Any, rows: int) -> Any: ...

class ShownRanks(metaclass=_pybind11_type):
    """csrc/python/rank_places.h."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # RankPlaces makes it
    def put_back(self) -> None: ...

class RankPlaces(metaclass=_pybind11_type):
    """csrc/python/rank_places.h."""

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        collections: Sequence[str],
        metrics: Callable[[], Mapping[str, dict[str, Any]]],
        *,
        weighs_losses: bool,
    ) -> None: ...
    def show(self, group: Any, size: int, times: float, *, leaves_metrics: bool) -> ShownRanks: ...

def as_pack(params: Any, ids: Any, hidden_states: Any) -> Any: ...

class VariantLayout(metaclass=_pybind11_type):
    """csrc/python/variant_layout.h."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # CanonicalPacks makes it
    @property
    def metadata(self) -> list[tuple[str, MetadataSpec]]: ...
    @property
    def is_whole(self) -> bool: ...
    @property
    def end_source(self) -> int: ...
    @property
    def end_buffer(self) -> str | None: ...

class CanonicalPacks(metaclass=_pybind11_type):
    """csrc/python/canonical_packs.h."""

    def __init__(self, key: VariantKey, extra_seqs: int) -> None: ...
    def layout(
        self,
        *,
        rows: int,
        valid_tokens: Tensor,
        freqs: Tensor | tuple[Tensor, ...] | None,
        masks_tail: bool,
    ) -> VariantLayout: ...
    def make(
        self, params_type: Any, actual: Tensor, padded: Tensor | None = None, seq_idx: Tensor | None = None
    ) -> Any: ...

class Constants(metaclass=_pybind11_type):
    """csrc/python/constants.h."""

    def __init__(self, given: Mapping[str, Any]) -> None: ...
    @property
    def values(self) -> dict[str, Any]: ...
    def set(self, name: str, value: Any) -> None: ...
    def are(self, arguments: Mapping[str, Any]) -> bool: ...
    def hold(self, arguments: Mapping[str, Any]) -> bool: ...
    def is_equal(self, name: str, value: Any) -> bool: ...

def are_equal(one: Any, other: Any) -> bool: ...

class MicroBatch(metaclass=_pybind11_type):
    """csrc/python/micro_batch.h."""

    reason: EagerReason | None
    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # only a dispatcher makes one
    @property
    def is_ready(self) -> bool: ...
    @property
    def key(self) -> VariantKey: ...
    @property
    def capacity(self) -> Capacity | None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def params(self) -> Any: ...
    @property
    def sources(self) -> list[Tensor]: ...
    @property
    def mask(self) -> Tensor | None: ...
    @property
    def entry_padding(self) -> int: ...
    @property
    def is_as_given(self) -> bool: ...
    def as_given(self, reason: EagerReason) -> bool: ...
    def run_as_given(self, *, is_own_table: bool) -> None: ...
    def is_own(self, table: Any, hidden_states: Any) -> bool: ...
    def given_params(self, *, is_own_table: bool) -> Any: ...
    def canonical_params(self) -> Any: ...
    def constant_params(self) -> Any: ...
    def enter(self, given: dict[str, Any], row_lists: tuple[str, ...]) -> None: ...
    def take_freqs(self, table: Any) -> bool: ...
    def layer_arguments(self) -> dict[str, Any]: ...
    def pad(self, hidden_states: Tensor) -> Tensor: ...
    def cut(self, hidden_states: Tensor) -> Tensor: ...
    def first_rows(self, hidden_states: Tensor) -> Tensor: ...

class Dispatcher(metaclass=_pybind11_type):
    """csrc/python/dispatcher.h, Note [Dispatch]."""

    def __init__(
        self,
        *,
        extra_seqs: int = 0,
        depends_on_longest: bool = False,
        needs_equal_rows: bool = False,
        masks_tail: bool = False,
        pads_at_entry: bool = False,
        is_own_table: Callable[[Any, Any, Any], bool] | None = None,
        is_by_token: bool = False,
        may_be_by_token: bool = False,
        cuts_tables: bool = False,
        is_eager: bool = False,
        cp_size: int = 1,
        ranks: int = 1,
        run_alike: bool = True,
        warm_up_steps: int = 1,
    ) -> None: ...
    def set_capacities(
        self, by_cp_size: Mapping[int, Sequence[Capacity]], of_evaluations: bool = False
    ) -> None: ...
    @property
    def has_capacities(self) -> bool:
        """False while they are to be learned."""

    @property
    def by_cp_size(self) -> dict[int, list[Capacity]]:
        """Capacities by the ranks that share packs, smallest first."""

    def set_groups(self, by_cp_size: dict[int, Any]) -> None: ...
    def use(
        self,
        bank: GraphBank,
        variants: Mapping[VariantKey, int],
        eager_variants: Mapping[VariantKey, EagerReason],
        watch: ModuleWatch,
    ) -> None: ...
    def look_for_freqs(self, table: Any, params: Any, tokens: int) -> bool | None: ...
    @property
    def is_by_token(self) -> bool: ...
    @property
    def freqs(self) -> Tensor | tuple[Tensor, ...] | None: ...
    def refuse(self, reason: EagerReason | None) -> None: ...
    def keep_eager(self, reason: EagerReason | None, gradients_reason: EagerReason | None) -> None: ...
    def set_suspended(self, is_suspended: bool) -> None: ...
    @property
    def observed(self) -> dict[PackShape, int]: ...
    def count_packs(self) -> None: ...
    def expect(self, seq_length: int, *, trains: bool) -> bool: ...
    def has_trained(self) -> bool: ...
    def has_seen_enough(self) -> bool: ...
    def needs(self) -> list[int]: ...
    @property
    def states(self) -> States: ...
    @property
    def due(self) -> DueVariants: ...
    def is_unchanged(self) -> bool: ...
    @property
    def params_type(self) -> type[Any] | None: ...
    @property
    def host_names(self) -> set[str]: ...
    @property
    def read_names(self) -> set[str]: ...
    @property
    def has_new_arguments(self) -> bool: ...
    def eager_reason(self, params: Any, tokens: int, is_settled: bool) -> EagerReason | None: ...
    def enter(
        self,
        params: Any,
        tokens: int,
        mask: Any,
        is_mask_shared: bool,
        are_megatrons: bool,
        is_settled: bool,
    ) -> EagerReason | MicroBatch: ...
    def require_rows(self, tokens: int, reason: EagerReason) -> None: ...
    def take(self, batch: MicroBatch, hidden_states: Any, table: Any, mask: Any) -> bool: ...
    def run_as_given(self, batch: MicroBatch, hidden_states: Any, table: Any) -> None: ...
    def turn_eager(
        self, constants: Constants, batch: MicroBatch, hidden_states: Any, table: Any, mask: Tensor | None
    ) -> None: ...
    def begin(self, batch: MicroBatch) -> int | None: ...
    def expect_state(self, batch: MicroBatch) -> None: ...
    def end(self, batch: MicroBatch) -> None: ...
    def count_eager(self, reason: EagerReason) -> None: ...
    @property
    def most_needed(self) -> Capacity | None: ...
    @property
    def replayed_tokens(self) -> int: ...
    def counts(self) -> dict[int, dict[str, int]]: ...

class ModuleWatch(metaclass=_pybind11_type):
    """csrc/watch/module_watch.h, Note [Module watch]."""

    def __init__(
        self,
        find_modules: Callable[[], list[tuple[torch.nn.Module, bool, bool]]],
        find_state: Callable[[], list[Tensor]],
    ) -> None: ...
    def follow(self) -> bool: ...
    def follow_anew(self) -> None: ...
    def expect_hooks(self) -> None: ...
    def expect_memory(self, *, grad: bool) -> None: ...
    def forget_gradients(self) -> None: ...
    def is_as_expected(self) -> bool: ...
    def difference(self, of_hooks: Callable[[], EagerReason | None]) -> EagerReason | None: ...
    def set_state(self, state: StateWatch) -> None: ...
    def state(self, whole: bool) -> int: ...
    def has_memory(self, *, grad: bool) -> bool: ...
    @property
    def is_watching(self) -> bool: ...
    @property
    def are_gradients_away(self) -> bool: ...
    @property
    def have_only_gradients_moved(self) -> bool: ...
    @property
    def have_other_grads(self) -> bool: ...

class StateWatch(metaclass=_pybind11_type):
    """csrc/watch/state_watch.h, Note [State]. Takes weak references to modules."""

    def __init__(
        self,
        modules: list[weakref.ref[torch.nn.Module]],
        block: weakref.ref[torch.nn.Module],
        left_out: Iterable[str],
        is_expected_hook: Callable[[Callable[..., Any]], bool],
        device: torch.device = ...,
    ) -> None: ...
    def set_keys(self, keys: list[Callable[[], Any]]) -> None: ...
    def now(self, whole: bool) -> int: ...
    def items(self) -> list[tuple[int, str, int, str]]: ...

def has_bits(tensor: Tensor) -> bool: ...
def have_same_bits(one: Tensor, other: Tensor) -> bool: ...

class Difference(metaclass=_pybind11_type):
    """A tensor of a site that its graph and its module make differently; csrc/bank/verify/comparison.h."""

    def __init__(self, *args: Never, **kwargs: Never) -> None: ...  # a Comparison makes it
    @property
    def index(self) -> int:
        """Of the site."""

    @property
    def tensor(self) -> str:
        """What differs, in words."""

    @property
    def off(self) -> float:
        """By how much the graph misses the module, at most."""

    @property
    def spread(self) -> float:
        """How far runs of the module are apart, at most, where it does."""

    @property
    def place(self) -> tuple[int, int, str]:
        """Of which slot and site, which tensor."""

    def may_be_chance(self, times: int) -> bool: ...

class Comparison(metaclass=_pybind11_type):
    """What a graph has made, beside runs of its module; csrc/bank/verify/comparison.h."""

    def __init__(self, graph: Mapping[str, Tensor], module: Mapping[str, Tensor]) -> None: ...
    def add(self, module: Mapping[str, Tensor]) -> None: ...
    def is_open(self) -> bool:
        """Whether a further run of the module may excuse the graph."""

    def lies_within(self) -> bool:
        """Whether runs of the module differ in some tensor as the graph does."""

    def differences(self, slot: int, index: int) -> list[Difference]: ...

class KeptState(metaclass=_pybind11_type):
    """What calls of sites, by index, write beside gradients; csrc/bank/verify/kept_state.h.

    Of that, what can be written in place; `further` is put back at the end only. Of what is `placed` the
    content is not looked at.
    """

    def __init__(
        self,
        of_sites: Sequence[Mapping[str, Tensor]],
        further: Sequence[Tensor] = (),
        placed: Mapping[str, Tensor] = {},
    ) -> None: ...
    def found(self, site: int) -> dict[str, Tensor]:
        """What is there of a site, by what it is in words; in no memory of its own."""

    def now(self, site: int) -> dict[str, Tensor]:
        """What is there of a site: copies of what differs from before, and else what was there then."""

    @overload
    def put(self, site: int) -> None: ...
    @overload
    def put(self, site: int, contents: Mapping[str, Tensor]) -> None: ...
    def put_all_back(self) -> str:
        """Returns the first of what had other memory or another form by now, in words; empty for nothing."""

def plain_tensors(modules: Sequence[tuple[str, torch.nn.Module]]) -> dict[str, Tensor]:
    """What modules, by name, keep in plain attributes, each once; not their parameters and buffers."""

class PlainAttributes(metaclass=_pybind11_type):
    """What the attributes of some modules, by what they are called, hold; csrc/watch/plain_attributes.h."""

    def __init__(
        self, modules: Sequence[tuple[str, torch.nn.Module]], left_out: Collection[str] = ()
    ) -> None: ...
    def put_back(self, *, leaves_values: bool = False) -> str | None:
        """Gives every attribute what it had; says what has happened to the first one that is not left out.

        `leaves_values`: but for those that are not left out either and hold no tensors.
        """

def make_host_executable(body: Callable[[], None]) -> Executable: ...
def count_accumulator_hooks(param: Tensor) -> int: ...
def foreign_hook(module: torch.nn.Module | None, is_expected_hook: Callable[[Any], bool]) -> Any:
    """The first hook of a module, or of all modules for None, that nobody answers for; else None."""

def numeric_settings(device: torch.device) -> int: ...
def take_note(device_index: int, pool: tuple[int, int]) -> PoolNote: ...
def held_bytes(pool: tuple[int, int]) -> int: ...
def taken_bytes(pool: tuple[int, int]) -> int: ...
def capture_stream(device_index: int) -> int: ...
