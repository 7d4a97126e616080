"""``rlmath test plugin`` on real ranks catches parts that depend on the layout, by name."""

import pytest

from rlmath.commands.plugin_test import ranks
from rlmath.commands.plugin_test.ranks import check_ranks, update_with
from rlmath.plugins import loading
from tests.unit.plugins.test_plugin_loading import own_plugins  # noqa: F401

LAYOUT_DEPENDENT = """
from rlmath.algorithms.advantages import ADVANTAGES
from rlmath.algorithms.correction import CORRECTIONS, Weighted
from rlmath.algorithms.losses import policy_loss
from rlmath.utils.setting import Options

@policy_loss("of_the_cut", Options)
def of_the_cut(inputs, options):
    ratio = inputs.log_ratio().exp()
    return -inputs.token_advantages() * ratio / inputs.mask.sum().clamp(min=1), {}

@CORRECTIONS.register("of_the_share")
def of_the_share(ratios, bounds, options):
    weights = ratios.tokens.exp()
    return Weighted(weights / weights.mean())

@ADVANTAGES.register("of_the_order")
def of_the_order(rewards, group_ids, options, *, token_counts=None):
    return rewards - rewards.roll(1)
"""
RIGHT = {
    "reinforce_pp": {"advantage": "reinforce_pp"},
    "seq_truncate": {"correction": "seq_truncate"},
}
WRONG = {
    "of_the_cut": {"loss": "of_the_cut"},
    "of_the_share": {"correction": "of_the_share"},
    "of_the_order": {"advantage": "of_the_order"},
}
LAYOUT, ORDER = "equal over layouts and micro-batches", "equal over the order of a minibatch"


@pytest.fixture
def wrong(own_plugins, tmp_path):  # noqa: F811
    file = tmp_path / "wrong.py"
    file.write_text(LAYOUT_DEPENDENT)
    loading.use(str(file))


# Ranks of each layout take most of the time to start.
@pytest.mark.parametrize("layouts", [1, pytest.param(2, marks=pytest.mark.long)])
def test_parts_of_the_layout_are_caught(wrong, tmp_path, monkeypatch, layouts):
    monkeypatch.setattr(ranks, "LAYOUTS", dict(list(ranks.LAYOUTS.items())[:layouts]))
    updates = {name: update_with(**parts) for name, parts in (RIGHT | WRONG).items()}
    found = {(name, one.invariant): one for name, one in check_ranks(updates, tmp_path)}
    assert len(found) == 15
    assert all(one.holds for (name, _), one in found.items() if name in RIGHT), found
    for name in ("of_the_cut", "of_the_share"):
        text = found[name, LAYOUT].text
        assert "tensor 2 x data 2" in text and "of minibatch 0 is" in text
    # The driver calls estimators, with the whole step: layouts do not change that, the order does.
    assert found["of_the_order", LAYOUT].holds
    assert "of minibatch 0 is" in found["of_the_order", ORDER].text
    assert found["of_the_cut", "an update repeats to the last bit"].holds
