# SPDX-License-Identifier: Apache-2.0
"""The C++ core. Also registers torch.ops.megagraph."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from typing_extensions import Never, Self

from megagraph.decide.reasons import EagerReason

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
    def count_eager(self, reason: EagerReason, calls: int) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def continue_from(self, former: GraphBank) -> None: ...
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
    def slot_index(self) -> int: ...
    def site(self, index: int) -> Site: ...
    def replay_all(self) -> Site:
        """Every site in one go, with one autograd node; NotImplemented, uncounted, if that is impossible."""

    def set_site_eager_reason(self, index: int, reason: EagerReason) -> None: ...
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
    def begin(self, variant: int, sources: Sequence[Tensor], look_at_grads: bool) -> EagerReason | None: ...
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
    """What a pack needs, read without touching the device.

    Args:
        tokens: physical tokens of this rank's share.
        num_seqs: entries of `cu_seqlens` less one.
        max_seqlen: the longest document the pack declares.
        cp_size: context-parallel ranks that share the pack.
    """

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
    """What of a pack changes the graph beside its shape: which fields it carries.

    Args:
        has_padded: carries padded offsets beside the actual ones.
        is_aliased: its padded offsets are the actual ones, the same object, by which Transformer Engine
            knows that there is no padding between documents.
        pad_between_seqs: Megatron's field of that name; None if it is absent or unset.
        has_seq_idx: carries `seq_idx`, int32 [1, T]: the document of each row, one more for the tail.
    """

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
    """The name of a variant: what graphs were captured for.

    Args:
        capacity: None of a micro-batch that may be padded to any.
        form: which fields packs carry.
        grad: gradients are recorded.
        state: the number of the state that the layers are in.
        has_mask: layers are given a padding mask of the user's.
        cp_size: ranks that share the pack.
    """

    def __init__(
        self,
        capacity: Capacity | None,
        form: PackForm,
        grad: bool,
        state: int = 0,
        has_mask: bool = False,
        cp_size: int = 1,
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

class States(metaclass=_pybind11_type):
    """csrc/decide/states.h."""

    def __init__(self, size: int, *, run_alike: bool = True) -> None: ...
    def local_state(self, rank: int, fingerprint: int, settings: int) -> list[int]: ...
    def agree(self, largest: Sequence[int]) -> bool: ...
    @property
    def current(self) -> int: ...
    @property
    def is_new(self) -> bool: ...
    def has_many(self) -> bool: ...
    def forget_oldest(self, keep: Set[int]) -> set[int]: ...
    def add_name(self, fingerprint: int) -> None: ...
    def of_call(self, fingerprint: int) -> int: ...
    def under(self, settings: int) -> int: ...
    def oldest_first(self) -> list[int]: ...
    def eager_reason(self, number: int, captured: Sequence[int]) -> EagerReason: ...

class DueVariants(metaclass=_pybind11_type):
    """csrc/decide/due_variants.h."""

    def __init__(self, warm_up_steps: int) -> None: ...
    def note(self, kind: VariantKey) -> None: ...
    def end_step(self) -> set[VariantKey]: ...
    def due_in(self, state: int) -> set[VariantKey]: ...
    def mark_captured(self, kinds: Set[VariantKey]) -> None: ...
    def forget_graphs(self, *, only_training: bool = False) -> None: ...
    def forget_states(self, states: Set[int]) -> None: ...
    @property
    def warmed_up(self) -> set[VariantKey]: ...
    @property
    def due(self) -> set[VariantKey]: ...
    @property
    def captured(self) -> set[VariantKey]: ...
    def states_with_graphs(self) -> set[int]: ...

class Dispatcher(metaclass=_pybind11_type):
    """csrc/python/dispatcher.h, Note [Dispatch]."""

    def __init__(
        self,
        make_variant: Callable[[VariantKey], Any],
        *,
        extra_seqs: int = 0,
        depends_on_longest: bool = False,
        cuts_tables: bool = False,
        needs_equal_rows: bool = False,
        is_eager: bool = False,
        cp_size: int = 1,
        ranks: int = 1,
        run_alike: bool = True,
        warm_up_steps: int = 1,
    ) -> None: ...
    def set_capacities(self, by_cp_size: Mapping[int, Sequence[Capacity]]) -> None: ...
    def set_groups(self, by_cp_size: dict[int, Any]) -> None: ...
    def use(
        self,
        bank: GraphBank,
        variants: Mapping[VariantKey, int],
        eager_variants: Mapping[VariantKey, EagerReason],
        watch: ModuleWatch,
    ) -> None: ...
    def refuse(self, reason: EagerReason) -> None: ...
    def keep_eager(self, reason: EagerReason | None, gradients_reason: EagerReason | None) -> None: ...
    def set_suspended(self, is_suspended: bool) -> None: ...
    @property
    def observed(self) -> set[PackShape]: ...
    @property
    def states(self) -> States: ...
    @property
    def due(self) -> DueVariants: ...
    def eager_reason(self, params: Any, tokens: int) -> EagerReason | None: ...
    def enter(
        self,
        params: Any,
        tokens: int,
        has_mask: bool,
        can_stage: bool,
        is_skipped: bool,
        is_settled: bool,
    ) -> EagerReason | tuple[Any, EagerReason | None, list[Tensor], bool]: ...
    def begin(self, key: VariantKey, sources: Sequence[Tensor]) -> EagerReason | None: ...
    def end(self) -> None: ...
    def explain(self, key: VariantKey, reason: EagerReason) -> EagerReason: ...
    def count(self, key: VariantKey, reason: EagerReason | None) -> None: ...
    def counts(self) -> dict[int, dict[str, int]]: ...

class ModuleWatch(metaclass=_pybind11_type):
    """csrc/watch/module_watch.h, Note [Module watch]."""

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
