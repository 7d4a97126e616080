"""The benchmark of weight updates, on the tiny model: Megatron ranks to one engine and to two."""

import json

import pytest

from tests.e2e.runs import python


@pytest.mark.long
def test_it_sends_verifies_and_prints_one_line():
    run = python("benchmarks/weight_sync.py", "--tiny", "--rounds", "1", "--bucket-size-mib", "1")
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    result = json.loads(line)
    assert result["ranks"] == "TP2xPP2"
    # Two norms and three biases a layer beside seven matrices; embedding, norm and output.
    checks = result["checks"]
    assert checks["verified_tensors"] == 4 * 12 + 3
    assert checks["with_s"] > checks["without_s"] > 0
    assert checks["checks_cpu_s"] > 0
    for name, engines in (("1_engine", 1), ("2_engines", 2)):
        seconds = result[name]["seconds"]
        assert seconds > 0
        share = engines * result["memcpy_s"] / seconds
        assert abs(result[name]["share_of_memcpy"] - share) < 0.005
