"""Names that the settings choose among are known without importing torch."""

import subprocess
import sys

import pytest

from rlmath.algorithms.aggregation import AGGREGATIONS
from rlmath.algorithms.losses import LOSSES

PROGRAM = """
import sys
from rlmath.cli import main
names = ["algorithm.loss=x", "algorithm.advantage=y"]
code = main(["train", "model.path=m", "runner.run_dir=r", *names])
print(code, [name for name in ("torch", "vllm", "megatron", "ray") if name in sys.modules])
"""


@pytest.mark.process
def test_a_wrong_name_is_reported_without_importing_torch():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "2 []"
    assert "algorithm.loss=x" in done.stderr and "ppo_clip" in done.stderr
    assert "algorithm.advantage=y" in done.stderr and "grpo" in done.stderr


def test_aggregations_of_losses_are_aggregations():
    # Losses whose papers take a mean over sequences.
    of_means = LOSSES.having(lambda one: one.aggregations)
    assert of_means == ["gmpo", "gspo", "gspo_token", "sapo"]
    for loss in of_means:
        kinds = LOSSES.traits(loss).aggregations
        assert set(kinds) <= set(AGGREGATIONS.names())
        assert kinds[0] == "seq_mean_token_mean"
