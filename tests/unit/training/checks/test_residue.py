import pytest

from rlmath.device import CPU
from rlmath.device.residue import Residue
from rlmath.errors import UserError
from rlmath.training.checks.residue import ACTOR, GIB, HOST, OTHERS, OVERLAPPED, LeftoverMemory
from rlmath.training.metrics import memory_by_phase


def ranks(*gib, others=None):
    beside = None if others is None else int(others * GIB)
    return [Residue(int(one * GIB), int(10 * GIB), beside) for one in gib]


def test_the_fullest_rank_is_logged():
    check = LeftoverMemory()
    found = check.compare(ranks(1.0, 1.5), ranks(5.0, others=3.0), False, 1.0)
    assert found == {ACTOR: 1.5, HOST: 10.0, OTHERS: 3.0, OVERLAPPED: 0.0}
    found = LeftoverMemory().compare(ranks(1.0), ranks(1.0), False, 1.0)
    assert found.keys() == {ACTOR, HOST, OVERLAPPED}
    assert LeftoverMemory().compare([], [], False, 1.0) == {}, "nothing is offloaded"


def test_growth_above_the_limit_stops_the_run_with_the_numbers():
    check = LeftoverMemory()
    for gib in (1.0, 1.5, 2.0):
        check.compare(ranks(0.5, gib), [], False, 1.0)
    with pytest.raises(UserError, match=r"2\.25 GiB, which is 1\.25 above the 1\.00 GiB"):
        check.compare(ranks(0.5, 2.25), [], False, 1.0)
    with pytest.raises(UserError, match=r"sleeping engines .* 4\.50 GiB.*growth_gib=1"):
        check.compare(ranks(1.0), ranks(1.0, others=3.0), False, 1.0)
        check.compare(ranks(1.0), ranks(1.0, others=4.5), False, 1.0)


def test_memory_by_phase():
    assert memory_by_phase({"update": 3 * 2**30}) == {"memory/update_peak_gib": 3.0}


def test_the_peak_since_the_last_call():
    """A phase's memory is its own, and the process's highest is not forgotten."""
    CPU.take_peak_bytes()
    taken = bytearray(b"x" * 2**26)
    taken.clear()
    high = CPU.take_peak_bytes()
    low = CPU.take_peak_bytes()
    assert high - low >= 2**25
    assert CPU.peak_memory_gib() * 2**30 >= high
