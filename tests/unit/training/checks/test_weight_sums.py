import dataclasses
from types import SimpleNamespace

import pytest
import torch

from rlmath.algorithms.aggregation import AGGREGATIONS, sequence_weights
from rlmath.batching.minibatches import minibatches
from rlmath.config.load import load
from rlmath.training.checks.weight_sums import SUMS, expected_sums, wrong_sums

COUNTS = torch.tensor([3, 0, 7, 5, 2, 9, 4, 1])
GROUPS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
SEQUENCES = SimpleNamespace(loss_token_counts=COUNTS, group_ids=GROUPS)


def settings(kind):
    config = load(["experiment=quickstart", "algorithm.minibatches_per_step=2"])
    algorithm = dataclasses.replace(config.algorithm, aggregation=kind)
    return dataclasses.replace(config, algorithm=algorithm)


def report(kind, factor=1.0):
    """Reports of the ranks on each minibatch."""
    found = []
    for members in minibatches(GROUPS.tolist(), 2, 11):
        counts = COUNTS[members]
        weights = sequence_weights(kind, counts, GROUPS[members], 64).float().double() * factor
        found.append(
            {
                "token_count": float(counts.sum()),
                "loss_weight": float((weights * counts).sum()),
                "loss_weight_squares": float((weights.square() * counts).sum()),
            }
        )
    return found


def test_every_aggregation_has_a_formula():
    assert set(SUMS) == set(AGGREGATIONS.names())


def test_plugin_aggregation_has_no_expected_weight_sum():
    expected = expected_sums(settings("mine.py:sqrt_length"), SEQUENCES, 11)
    assert expected == [] and wrong_sums(expected, report("token_mean", 3.0)) == []


@pytest.mark.parametrize("kind", SUMS)
def test_right_weights_pass_and_others_do_not(kind):
    expected = expected_sums(settings(kind), SEQUENCES, 11)
    assert wrong_sums(expected, report(kind)) == []
    (first, _) = wrong_sums(expected, report(kind, 0.5))
    assert "minibatch 0" in first and f"gives {expected[0].total:.7g}" in first
    for other in SUMS:
        if other != kind:
            assert wrong_sums(expected, report(other)), f"{other} is taken for {kind}"


def test_a_lost_mask_shows_in_the_tokens():
    expected = expected_sums(settings("token_mean"), SEQUENCES, 11)
    lost = [one | {"token_count": one["token_count"] + 6} for one in report("token_mean")]
    (first, _) = wrong_sums(expected, lost)
    assert f"lengths and masks give {expected[0].tokens}" in first
    not_a_number = [one | {"loss_weight": float("nan")} for one in report("token_mean")]
    assert len(wrong_sums(expected, not_a_number)) == 2


def test_a_minibatch_without_a_token_has_no_weight():
    nothing = SimpleNamespace(loss_token_counts=torch.zeros(8), group_ids=GROUPS)
    for one in expected_sums(settings("prompt_mean"), nothing, 11):
        assert (one.tokens, one.total, one.squares) == (0, 0.0, 0.0)
