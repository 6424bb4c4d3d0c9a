# SPDX-License-Identifier: Apache-2.0
"""The C++ core. Also registers torch.ops.megagraph."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from typing_extensions import Never, Self

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
    @property
    def num_nodes(self) -> int: ...

class Slot(metaclass=_pybind11_type):
    """Storage for one in-flight micro-batch; csrc/bank/replay/slot_ring.h has the nesting rule."""

    def __init__(self, index: int, num_sites: int) -> None: ...
    def lease(self, variant: int, training: bool) -> bool: ...
    def end_micro_batch(self) -> None: ...
    def enter(self, first: int, last: int | None = None) -> bool: ...
    def leave(self, first: int, last: int | None = None) -> bool: ...
    def drop(self, first: int, last: int | None = None) -> None: ...
    def node_done(self, first: int, last: int | None = None) -> None: ...
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

    Args:
        kind: how staging fills it (csrc/bank/staging/staging.h).
        example: its content during warm-up and capture, [entries].
        source: index into what a micro-batch hands over; -1 for none: a mask then has the pack's end alone,
            and any other buffer is constant.
        fill: int32 that fills the entries past the source's; -1 repeats the source's last one.
        shared: one buffer for all slots, the example itself (a counter).
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
    def buffer(self) -> Tensor:
        """A slot's buffer, filled with the example."""

class Boundaries(metaclass=_pybind11_type):
    """The static tensors on the edges of one site's graphs; csrc/bank/replay/site.h."""

    def __init__(self) -> None: ...
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    grad_outputs: Sequence[Tensor | None]
    grad_inputs: Sequence[Tensor | None]
    params: Sequence[Tensor]
    param_grads: Sequence[Tensor]

class SiteGraph(metaclass=_pybind11_type):
    """What one site captured for one variant and slot; csrc/bank/replay/site.h."""

    def __init__(
        self,
        *,
        forward: Executable,
        backward: Executable | None,
        boundaries: Boundaries,
        accumulated: Sequence[Tensor],
        is_entry: bool,
        is_chained: bool,
        is_transient: Sequence[bool],
    ) -> None: ...
    @property
    def boundaries(self) -> Boundaries: ...
    @property
    def accumulated(self) -> list[Tensor]: ...
    reads: Sequence[Tensor]
    saves_input: bool
    saves_outputs: Sequence[bool]
    def set_range(self, name: str) -> None:
        """Names its replays for profilers."""

class PoolHold(metaclass=_pybind11_type):
    """CUDA builds only."""

    def __init__(self, device_index: int, pool: tuple[int, int]) -> None: ...
    @property
    def pool(self) -> tuple[int, int]: ...

class GraphBank(metaclass=_pybind11_type):
    """All graphs of one chunk of a model; csrc/bank/replay/graph_bank.h."""

    def __init__(
        self,
        device: torch.device,
        num_sites: int,
        *,
        num_slots: int,
        pools: Sequence[PoolHold],
        poison: bool,
        holds_collectives: bool,
    ) -> None: ...
    @property
    def state(self) -> BankState: ...
    def become(self, state: BankState) -> None: ...
    def count_eager(self, reason: int, calls: int) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def release(self) -> None: ...
    @property
    def num_sites(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def most_in_flight(self) -> int: ...
    def last_leases(self) -> list[tuple[int, bool, int, int]]:
        """Slot, whether for training, when it was leased and freed (0 while held); the oldest first.

        In nanoseconds since 1970. None of a bank with one slot.
        """

    @property
    def num_variants(self) -> int: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def slot_index(self) -> int: ...
    def site(self, index: int) -> Site: ...
    def replay_all(self) -> Site:
        """Every site in one go, with one autograd node; NotImplemented, uncounted, if that is impossible."""

    def set_site_eager_reason(self, index: int, reason: int) -> None: ...
    def set_site_calls(self, index: int, calls: int) -> None:
        """How many calls one of a site counts as; one by default."""

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
        """How many kernels of a slot's graphs have their grids set by staging, to the documents of a pack.

        Attention's on a GPU, csrc/ops/document_grids.h says how; 0 on the host.
        """

    def drop_variant(self, variant: int) -> None: ...
    def set_listener(
        self, wants: Callable[[], bool], done: Callable[[int, int], None], noticed: Sequence[int]
    ) -> None: ...
    def begin(self, variant: int, sources: Sequence[Tensor], look_at_grads: bool) -> int: ...
    def end(self) -> None: ...
    def all_free(self) -> bool: ...
    def describe_holders(self) -> str: ...
    def changed_setting(self, variant: int) -> str: ...

class AccumulatorSwap(metaclass=_pybind11_type):
    """Gradient accumulators of ours in place of the parameters' own; csrc/bank/capture/main_grad_node.h."""

    def __init__(
        self, targets: Sequence[tuple[Tensor, Tensor | None, Callable[[], bool] | None]]
    ) -> None: ...
    def install(self) -> None: ...
    def join(self) -> None: ...
    def restore(self) -> None: ...
    def take_kept_grads(self) -> list[Tensor | None]: ...
    @property
    def has_parts(self) -> bool:
        """Whether a target without main_grad got its gradient in more than one delivery."""

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
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def close(self) -> None: ...

class PassMemory(metaclass=_pybind11_type):
    """CUDA builds only: what a pass allocates, once it was captured, and what of it is gone at its end."""

    @property
    def kept_bytes(self) -> int:
        """Of what is kept, as far as it lies in blocks of its own."""

def reserve(device_index: int, pool: tuple[int, int], num_bytes: int) -> None:
    """CUDA builds only: has a pool hold one free block of so many bytes for the current stream, at least."""

class CudaCapture(metaclass=_pybind11_type):
    """CUDA builds only."""

    def __init__(
        self,
        pool: tuple[int, int],
        generators: Sequence[torch.Generator],
        scratch: PoolHold | None = None,
        memory: PassMemory | None = None,
    ) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> Executable: ...
    def abort(self) -> None: ...

def pack_shape(
    params: Any, tokens: int, extra_seqs: int, cp_size: int
) -> tuple[int, int, int, int] | None: ...
def pack_form(params: Any) -> tuple[bool, bool, bool | None, bool] | None: ...
def schedule_packs(
    lengths: Sequence[int],
    *,
    ranks: int,
    cp_sizes: Sequence[int],
    max_tokens: int,
    max_seqs: int,
    alignment: int,
    attention_parity: int,
    exchange: float,
    multiple: int,
) -> tuple[list[list[tuple[int, int, tuple[int, ...]]]], list[float]]:
    """The packs of each micro-batch (size, first rank, documents), and the cost of each rank."""

class Decider(metaclass=_pybind11_type):
    """csrc/python/decider.h, Note [Deciding]."""

    def __init__(
        self,
        extra_seqs: int,
        depend_on_longest: bool,
        are_cut: bool,
        reasons: list[Any],
        make_key: Callable[..., Any],
    ) -> None: ...
    def set_capacities(self, by_cp_size: Mapping[int, Sequence[Any]]) -> None: ...
    def set_groups(self, by_cp_size: dict[int, Any]) -> None: ...
    def refuse(self, reason: Any) -> None: ...
    def eager_reason(self, params: Any, tokens: int, cp_size: int = 1) -> Any: ...
    def decide(
        self, params: Any, tokens: int, has_mask: bool, state_of_call: Callable[[], int], cp_size: int = 1
    ) -> Any: ...

class ModuleWatch(metaclass=_pybind11_type):
    """csrc/watch/module_watch.h, Note [Module watch]. Reasons are values of EagerReason."""

    def __init__(
        self,
        find_modules: Callable[[], list[tuple[torch.nn.Module, bool]]],
        find_state: Callable[[], list[Tensor]],
        unread: Iterable[str],
    ) -> None: ...
    def follow(self) -> bool: ...
    def expect_hooks(self) -> None: ...
    def expect_memory(self, *, grad: bool) -> None: ...
    def forget_gradients(self) -> None: ...
    def difference(self, of_hooks: Callable[[], int | None]) -> int | None: ...
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
        keys: list[Callable[[], Any]],
    ) -> None: ...
    def now(self, whole: bool) -> int: ...
    def items(self) -> list[tuple[int, str, int, str]]: ...

def make_host_executable(body: Callable[[], None]) -> Executable: ...
def count_accumulator_hooks(param: Tensor) -> int: ...
def numeric_settings(device: torch.device) -> int: ...
def take_note(device_index: int, pool: tuple[int, int]) -> PoolNote: ...
def taken_bytes(pool: tuple[int, int]) -> int: ...
def unowned_alias(tensor: Tensor) -> Tensor: ...
def capture_stream(device_index: int) -> int: ...
