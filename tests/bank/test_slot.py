# SPDX-License-Identifier: Apache-2.0
"""Leases: who holds a slot, in what words, and when it is free."""

import random

import pytest

from megagraph import _C


def leased(num_sites: int = 4, *, training: bool = True) -> _C.Slot:
    slot = _C.Slot(0, num_sites)
    assert slot.lease(0, training)
    return slot


def play(slot: _C.Slot, script: str) -> None:
    """Words, each with a site or a range of them, or `end`, of the micro-batch.

    `F` forward, `B` backward begins, `D` it is done, `X` its node is dropped, `+` and `-` a tensor over its
    output, or with `g` at the end over its gradient, with `t` over what only an eager part reads. What begins
    with `!` is refused and changes nothing; `free` and `held` say whether somebody holds the slot.
    """
    passes = {"F": slot.enter, "B": slot.leave}
    others = {"D": slot.node_done, "X": slot.drop, "+": slot.retain_tensor, "-": slot.release_tensor}
    for word in script.split():
        if word in ("free", "held"):
            assert slot.is_free == (word == "free"), script
            continue
        if word == "end":
            slot.end_micro_batch()
            continue
        name = word.lstrip("!")
        sites = [int(site) for site in name[1:].rstrip("gt").split("..")]
        kind = {"g": (_C.LeaseKind.GRADIENT,), "t": (_C.LeaseKind.TRANSIENT,)}.get(name[-1], ())
        before = slot.describe_holders()
        if name[0] in passes:
            assert passes[name[0]](*sites) == (word == name), f"{word} of {script}"
        else:
            others[name[0]](*sites, *kind)
        assert word == name or slot.describe_holders() == before


TRAINING = {
    "a lease lasts until the last is done": "F0 F1 end held B1 held D1 held B0 held D0 free",
    "the backward may end before the micro-batch": "F0 B0 D0 held end free",
    "a dropped site leaves the others their turn": "F0 F1 F2 X1 !B1 !F1 B2 D2 F1 X1 X0 end free",
    "a tensor over a boundary holds the slot": "F0 +0 +0 B0 D0 end -0 held -0 free",
    "a refused pass changes nothing": "F1 !F1 !F0 !B0 !B2 B1",
    "a forward waits for the outputs of later sites": "+3 !F1 -3 F1",
    "and for their gradients": "+3g !F1 -3g F1",
    "and for what an eager part before it reads": "F0 +0t !F1 -0t F1",
    "a run of sites enters and leaves as one": "F0..2 end held !F2..3 !B0..1 B0..2 held D0..2 free",
    "a run follows a site, dropped as one": "F0 F1..3 !B0 X1..3 B0 F1..3 D0 X1..3 end free",
}
WITHOUT_BACKWARD = {
    "a site is live while its output may be read": "F1 +1 !F0 !F1 F2 +2 -1 !F1 -2 F0",
    "of a run only the last output is held": "F0..2 +2 !F0..2 -2 F0..2",
}


@pytest.mark.parametrize("name", [*TRAINING, *WITHOUT_BACKWARD])
def test_leases(name: str) -> None:
    play(leased(training=name in TRAINING), (TRAINING | WITHOUT_BACKWARD)[name])


def test_a_backward_waits_for_what_an_eager_part_reads() -> None:
    slot = leased()
    play(slot, "F0 +0t")
    assert not slot.await_transients(0)
    play(slot, "-0t")
    assert slot.await_transients(0)


def test_a_slot_has_one_lease_at_a_time_which_starts_with_no_site_live() -> None:
    slot = leased(training=False)
    assert not slot.lease(0, True)
    play(slot, "F3 held end free")  # and then the forward failed: there is no tensor to count
    with pytest.raises(RuntimeError):
        slot.end_micro_batch()
    assert slot.is_free and slot.lease(0, True)
    play(slot, "F0 held")


def test_holders_are_named_by_kind_and_site() -> None:
    slot = leased()
    assert slot.describe_holders() == "a micro-batch that has not ended"
    play(slot, "F0 F3 +3 +3 end")
    assert slot.describe_holders() == (
        "1 pending backward of site 0, 1 pending backward of site 3, 2 tensors of site 3"
    )
    play(slot, "-3 X0")
    assert slot.describe_holders() == "1 pending backward of site 3, 1 tensor of site 3"


def test_holders_are_counted_exactly_in_any_order() -> None:
    rng = random.Random(0)
    for _ in range(300):
        slot, ends = leased(5), ["end"]
        for index in sorted(rng.sample(range(5), rng.randint(1, 5))):
            tensors = rng.randint(0, 3)
            play(slot, f"F{index} " + f"+{index} " * tensors)
            ends += [f"X{index}", *[f"-{index}"] * tensors]
        rng.shuffle(ends)
        play(slot, "held " + " held ".join(ends) + " free")
