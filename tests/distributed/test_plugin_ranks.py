"""``rlmath test plugin`` on real ranks catches a loss that depends on the layout, by name."""

import pytest

from rlmath.commands.plugin_test.ranks import check_ranks, update_with
from rlmath.plugins import loading
from tests.unit.plugins.test_plugin_loading import own_plugins  # noqa: F401

LAYOUT_DEPENDENT = """
from rlmath.algorithms.losses import policy_loss
from rlmath.utils.setting import Options

@policy_loss("of_the_cut", Options)
def of_the_cut(inputs, options):
    ratio = inputs.log_ratio().exp()
    return -inputs.token_advantages() * ratio / inputs.mask.sum().clamp(min=1), {}
"""


@pytest.fixture
def wrong(own_plugins, tmp_path):  # noqa: F811
    file = tmp_path / "wrong.py"
    file.write_text(LAYOUT_DEPENDENT)
    loading.use(str(file))
    yield "of_the_cut"


def test_a_loss_of_the_cut_is_caught_over_layouts(wrong, tmp_path):
    updates = {name: update_with(loss=name) for name in ("ppo_clip", wrong)}
    found = {(name, one.invariant): one for name, one in check_ranks(updates, tmp_path)}
    assert len(found) == 6
    assert all(one.holds for (name, _), one in found.items() if name == "ppo_clip"), found
    text = found[wrong, "equal over layouts and micro-batches"].text
    assert "tensor 2 x data 2" in text and "of minibatch 0 is" in text
    assert found[wrong, "an update repeats to the last bit"].holds
