# SPDX-License-Identifier: Apache-2.0
"""Sites that get no graph. A capture that fails is undone: it names where, and training goes on with the same
bits. Hooks and shared parameters, which a graph would bypass or double, are found and named."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from bank_pair import WIDTH, Applies, Block, Pair, blocks, give_main_grads, new_bank, rng_states, variant
from same_bits import assert_same_bits
from torch import Tensor, nn

from megagraph import _C
from megagraph.bank.capture import GAVE_UP, GroupGaveUp
from megagraph.bank.sites import SiteSpec, ineligible_sites
from megagraph.cli.rehearsal import warm_up
from megagraph.log import log
from megagraph.reasons import EagerReason

Trouble = Callable[[Tensor], object]


class Troubled(nn.Module):
    """Gets into trouble in its n-th pass (1: the warm-up, 2: the capture), once it is armed."""

    def __init__(self, trouble: Trouble, *, in_backward: bool = False, at_pass: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.trouble, self.in_backward, self.at_pass = trouble, in_backward, at_pass
        self.passes = mock.Mock(left=0)  # no value of the module's own, which no call may change

    def arm(self) -> None:
        self.passes.left = self.at_pass

    def __deepcopy__(self, memo: dict[int, Any]) -> "Troubled":
        copied = Troubled(self.trouble)  # never armed
        copied.scale = copy.deepcopy(self.scale, memo)
        return copied

    def count(self, tensor: Tensor) -> None:
        self.passes.left -= 1
        if self.passes.left == 0:
            self.trouble(tensor)

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.in_backward:
            self.count(hidden)
        elif hidden.requires_grad:
            hidden = hidden.clone()
            hidden.register_hook(self.count)
        return hidden * self.scale


def raises(_: Tensor) -> None:
    raise ValueError("from the layer")


def leaves_a_stream_unjoined(tensor: Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor + 1


# And what is said of it beside the phase.
ON_A_GPU: dict[str, tuple[Trouble, list[str]]] = {
    "item": (lambda tensor: tensor.sum().item(), [f"{__file__}:", "aten::_local_scalar_dense"]),
    "out of memory": (lambda it: it.new_empty(1 << 46), [f"{__file__}:", "OutOfMemoryError"]),
    "unjoined stream": (leaves_a_stream_unjoined, ["failed, last op", "capturing stream has unjoined work"]),
}


def contents(pair: Pair) -> list[Any]:
    """Everything that a capture has to leave as it was."""
    params = [(param, param.grad, getattr(param, "main_grad", None)) for param in pair.params()]
    return [rng_states(pair.device), copy.deepcopy((params, [*nn.ModuleList(pair.layers).buffers()]))]


def pair_with(device: str, troubled: Troubled, *, main_grad: bool = True, num_slots: int = 1) -> Pair:
    """Has trained for some steps already."""
    layers = [Block(), nn.BatchNorm1d(WIDTH), troubled, nn.Sequential(Block(), nn.Dropout(0.0))]
    pair = Pair(device, layers, main_grad=main_grad, num_slots=num_slots)
    for _ in range(2):
        assert pair.step() is EagerReason.WARMING_UP
    return pair


def check_failure(device: str, troubled: Troubled, phase: str, what: list[str], **options: Any) -> None:
    """The site is eager, the others replay, and no bit differs from a run that never captured."""
    pair = pair_with(device, troubled, **options)
    before = contents(pair)
    troubled.arm()
    with mock.patch.object(log, "warning") as warned:
        pair.capture()
    detail = pair.failure(2, EagerReason.CAPTURE_FAILED)
    assert detail.startswith(f"{phase} failed") and all(expected in detail for expected in what)
    (said,) = (call.args[0] % call.args[1:] for call in warned.call_args_list)
    assert said.startswith(f"stays eager (CAPTURE_FAILED): 2.Troubled: {detail}")
    assert pair.bank.state == _C.BankState.SEALED
    assert_same_bits(contents(pair), before, "what the failed capture left")
    assert pair.bank.all_free()
    for _ in range(3):
        assert pair.step() is None
        pair.update_weights()
    assert pair.counts() == {"calls": 20, "WARMING_UP": 8, "CAPTURE_FAILED": 3, "replays": 9}
    pair.capture(variant("more", rows=20))  # a later capture, of more rows, in the same process
    assert pair.step(pair.input(20), "more") is None and pair.step() is None
    other = Pair(device, [Block()]).capture()
    assert other.step() is None and not other.bank.failures


OF_CAPTURE = ["capture of the forward", "capture of the backward"]  # phases


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("at_pass", "phases", "num_slots"),
    [(1, ["warm-up"] * 2, 1), (2, OF_CAPTURE, 1), (3, OF_CAPTURE, 2)],
    ids=["warm-up", "capture", "capture for the second slot"],
)
def test_a_layer_that_raises_stays_eager_and_leaves_no_trace(
    device: str, in_backward: bool, at_pass: int, phases: list[str], num_slots: int, main_grad: bool
) -> None:
    """In all slots, also if it has a graph for the first one."""
    troubled = Troubled(raises, in_backward=in_backward, at_pass=at_pass)
    where = f"{__file__}:{raises.__code__.co_firstlineno + 1} in raises"
    expected, how = [where, "last op ", "ValueError: from the layer"], {"num_slots": num_slots}
    check_failure(device, troubled, phases[in_backward], expected, main_grad=main_grad, **how)


def test_what_autograd_has_saved_goes_with_a_warm_up_that_raises(device: str) -> None:
    """Bug: an output that its own backward reads stayed, with all before it, the model's parameters too."""
    outputs: list[weakref.ref[Tensor]] = []

    def raises_behind_exp(hidden: Tensor, weight: Tensor) -> Tensor:
        out = (hidden * weight).exp()
        outputs.append(weakref.ref(out))
        raise ValueError("from the layer")

    pair = Pair(device, [Block(), Applies(raises_behind_exp, has_weight=True)]).capture()
    gc.collect()
    assert len(outputs) == 1 and outputs[0]() is None and pair.bank.failures


@pytest.mark.gpu
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("trouble", "what"), ON_A_GPU.values(), ids=ON_A_GPU)
def test_what_a_graph_cannot_hold_is_undone(trouble: Trouble, in_backward: bool, what: list[str]) -> None:
    check_failure("cuda", Troubled(trouble, in_backward=in_backward), OF_CAPTURE[in_backward], what)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("trouble", [raises, *(trouble for trouble, _ in ON_A_GPU.values())])
@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_the_memory_of_a_failed_capture_returns(trouble: Trouble, in_backward: bool) -> None:
    def attempt() -> None:
        troubled = Troubled(trouble, in_backward=in_backward)
        pair = Pair("cuda", [Block(), troubled])
        troubled.arm()
        pair.capture()
        assert len(pair.bank.failures) == 1
        pair.bank.release()

    def held() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    attempt()  # loads kernels, makes workspaces
    before = held()
    for _ in range(3):
        attempt()
    assert held() == before


def test_an_earlier_variant_survives_the_failure_of_a_later_one(device: str) -> None:
    troubled = Troubled(raises)
    pair = pair_with(device, troubled).capture()
    troubled.arm()
    pair.capture(variant("more", rows=4))
    assert len(pair.bank.failures) == 1
    for _ in range(3):
        assert pair.step() is None
        assert pair.step(pair.input(4), "more") is None
    assert pair.eager_calls() == {"WARMING_UP": 8, "CAPTURE_FAILED": 3}


def test_a_capture_ends_with_the_question_to_which_a_rank_answers_that_it_gave_up() -> None:
    """Bug: asked whether a site runs twice, a rank took that for a yes, and asked on: nobody answered."""
    said: list[list[int]] = []
    at: int | None = None

    def told(values: Sequence[int]) -> list[int]:
        said.append([*values])
        return [GAVE_UP] * len(values) if len(said) - 1 == at else [*values]

    layers = blocks(2)
    bank = new_bank(layers, "cpu", max_over_ranks=told)
    bank.capture([variant()])
    num_asked = len(said)
    assert num_asked > 2 * 4  # of each site in its warm-up and its passes
    for place in range(num_asked):
        said, at = [], place
        with pytest.raises(GroupGaveUp):
            bank.capture([variant()])
        assert len(said) == place + 1
    said, at = [], None
    bank.capture([variant()])
    assert bank.eager_sites == {} and bank.num_graphs == 4


def test_an_interrupt_ends_the_capture_and_can_be_tried_again(device: str) -> None:
    troubled = Troubled(mock.Mock(side_effect=KeyboardInterrupt))
    pair = pair_with(device, troubled)
    before = contents(pair)
    troubled.arm()
    with pytest.raises(KeyboardInterrupt):
        pair.capture()
    assert pair.bank.state == _C.BankState.SEALED and not pair.bank.failures
    assert_same_bits(contents(pair), before, "what the capture left")
    assert pair.step() is EagerReason.WARMING_UP
    pair.capture()
    assert pair.step() is None


def test_progress_is_told_and_may_raise(device: str) -> None:
    pair = Pair(device, [Block()])
    told: list[tuple[int, int, str]] = []

    def progress(done: int, total: int, what: str) -> None:
        told.append((done, total, what))
        if what == "variant small":
            raise RuntimeError("of the callback")

    large, small = variant("large", rows=9), variant("small", rows=2)
    with pytest.raises(RuntimeError, match=r"^of the callback$"):
        pair.bank.capture([small, large], progress)
    assert pair.bank.state == _C.BankState.SEALED
    assert told == [(0, 2, "variant large"), (1, 2, "variant small")]
    assert pair.step(pair.input(9), "large") is None
    assert pair.step(pair.input(2), "small") is EagerReason.WARMING_UP
    pair.bank.capture([variant("tiny", rows=1)], progress)
    assert told[2:] == [(0, 1, "variant tiny"), (1, 1, "done")]
    assert pair.step(pair.input(1), "tiny") is None


def test_a_layer_of_another_shape_or_dtype_is_named(device: str) -> None:
    said = {nn.Flatten(0): "expected an output of 6 rows, got (48,)", nn.Embedding(3, 8): "warm-up failed at"}
    for layer, expected in said.items():
        assert expected in Pair(device, [Block(), layer]).capture().failure(1, EagerReason.CAPTURE_FAILED)


def test_a_rehearsal_finds_what_a_warm_up_would_counts_what_is_kept_and_leaves_no_trace(device: str) -> None:
    troubled = Troubled(raises)
    pair = pair_with(device, troubled, num_slots=2)
    before, state = contents(pair), pair.bank.state
    troubled.arm()
    warm_up(pair.bank, [variant(), variant("longer", rows=20)])
    (failure,) = pair.bank.failures
    assert str(failure).startswith("2.Troubled: ") and failure.reason is EagerReason.CAPTURE_FAILED
    assert pair.bank.state == state and pair.bank.captured == {} and pair.bank.all_free()
    assert_same_bits(contents(pair), before, "what the rehearsal left")

    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    bank = Pair(device, layers, num_slots=2).bank
    kept, beside = warm_up(bank, [variant("short", rows=32), variant("long", rows=64)])
    # Of each layer its output alone, in 4 bytes a number: it saves no other tensor of its own.
    assert kept == 2 * 3 * 64 * WIDTH * 4 and (beside > 0) == (device != "cpu")


# -- hooks and shared parameters -------------------------------------------------------------------


def found(modules: Sequence[nn.Module], **options: Any) -> Any:
    return ineligible_sites([SiteSpec(name="a site", module=module) for module in modules], **options)


def keep(*_: object) -> None:
    """A hook that changes nothing."""


def accumulator_of(param: Tensor) -> Any:
    return param.expand_as(param).grad_fn.next_functions[0][0]


OF_PARAMETER = "gradient hook of parameter up.weight"
ON_ACCUMULATOR = "hook on the gradient accumulator of parameter up.weight"
# What registers a hook, on what of a block, and what is said of it.
KINDS = ("forward", "forward_pre", "full_backward", "full_backward_pre")
HOOKS: list[tuple[str, Callable[[Any], Any], str]] = [
    *((f"register_{kind}_hook", lambda block: block, "hook keep of module Block") for kind in KINDS),
    *((f"register_{kind}_hook", lambda block: block.up, "hook keep of module up") for kind in KINDS),
    ("register_hook", lambda block: block.up.weight, OF_PARAMETER),
    ("register_post_accumulate_grad_hook", lambda block: block.up.weight, OF_PARAMETER),
    ("register_hook", lambda block: accumulator_of(block.up.weight), ON_ACCUMULATOR),
    ("register_prehook", lambda block: accumulator_of(block.up.weight), ON_ACCUMULATOR),
]


@pytest.mark.parametrize(("register", "of", "what"), HOOKS)
def test_a_hook_is_found_and_named(register: str, of: Callable[[Any], Any], what: str) -> None:
    modules = [Block(), Block()]
    it = of(modules[1])
    with getattr(it, register)(keep):
        assert found(modules) == {1: (EagerReason.FOREIGN_HOOK, what)}
    assert found(modules) == {}


def test_the_callers_own_accumulator_hooks_are_counted_out_and_missed() -> None:
    """Bug: hooks on an accumulator counted as one. Without one eager no longer adds, nor may a graph."""
    modules = [Block(), Block()]
    accumulators = give_main_grads(modules)
    assert set(found(modules)) == {0, 1}
    assert set(found(modules, accumulator_hooks=lambda param: 0)) == {0, 1}
    assert found(modules, accumulator_hooks=lambda param: 1) == {}
    with accumulator_of(modules[1].norm.bias).register_hook(keep):
        assert set(found(modules, accumulator_hooks=lambda param: 1)) == {1}
    assert found(modules, accumulator_hooks=lambda param: 1) == {}
    del accumulators
    reason, what = found([Block()], accumulator_hooks=lambda param: 1)[0]
    assert reason is EagerReason.FOREIGN_HOOK and "has lost its hook" in what


def test_what_is_no_obstacle() -> None:
    """Frozen parameters, one that is used twice within one site, and hooks that the caller answers for."""
    twice, module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Block()
    twice[1].weight = twice[0].weight
    assert found([Block().requires_grad_(False), twice, nn.Tanh(), module]) == {}
    for hook, obstacles in ((keep, {}), (lambda *_: None, {0: EagerReason.FOREIGN_HOOK})):
        module.up.register_forward_hook(hook)
        found_beside = found([module], is_expected_hook=lambda hook: hook is keep)
        assert {index: reason for index, (reason, _what) in found_beside.items()} == obstacles


def test_what_is_used_twice_leaves_each_site_eager_whatever_hooks_there_are() -> None:
    """A parameter of two sites, a module that runs twice, and a parameter used outside of the bank."""
    shared = EagerReason.SHARED_PARAMETER, "parameter up.weight is used elsewhere too"
    modules: list[Any] = blocks()
    modules[2].up.weight = modules[0].up.weight
    assert found(modules) == {0: shared, 2: shared}
    assert set(found([modules[1], nn.Tanh(), modules[1]])) == {0, 2}
    modules[1].register_forward_hook(keep)
    tied = nn.Linear(1, 1)
    tied.weight = modules[1].up.weight
    assert found([nn.Tanh(), modules[1]], other_params=tied.parameters()) == {1: shared}
    assert torch.is_grad_enabled()
