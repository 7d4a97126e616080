"""Lines about links between ranks."""

import pytest

from rlmath.actor.communicators import Communicators, Link, describe
from rlmath.device import CPU, Platform

CUDA = Platform("cuda", "nccl", "local")


@pytest.mark.parametrize(
    ("between", "gb_per_s", "cause"),
    [
        (False, 300.0, None),
        (False, 18.0, "NVLink"),
        (True, 40.0, None),
        (True, 3.1, "InfiniBand"),
    ],
)
def test_describe_warns_of_the_slowest_link_with_its_cause(between, gb_per_s, cause):
    fast = Link(between, 16, 400.0, "node-1", CUDA.link_probe)
    slow = Link(between, 16, gb_per_s, "node-7", CUDA.link_probe)
    lines = describe([Communicators(None, (fast,)), Communicators(None, (slow,))])
    assert f"{gb_per_s:g} GB/s" in lines[0], lines
    assert "256 MiB over 16 ranks" in lines[0]
    warnings = [line for line in lines if line.startswith("warning")]
    assert len(warnings) == (cause is not None)
    if cause is not None:
        assert cause in warnings[0]
        assert between or "node-7" in warnings[0]


def test_describe_tells_the_most_that_communicators_take_of_a_gpu():
    lines = describe([Communicators(2**30), Communicators(3 * 2**30), Communicators()])
    assert len(lines) == 1
    assert "3.0 GiB" in lines[0]


def test_describe_is_silent_about_a_single_cpu_rank():
    assert describe([Communicators()]) == []
    assert CPU.link_probe.num_bytes < CUDA.link_probe.num_bytes
