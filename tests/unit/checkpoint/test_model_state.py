import pytest

from rlmath.checkpoint.model_state import is_extra_state, sharded_weights


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("decoder.layers.0.self_attention.linear_qkv._extra_state", True),
        ("decoder.layers.0.mlp.experts.linear_fc1._extra_state", True),
        ("decoder.layers.0.mlp.experts.linear_fc1._extra_state1", True),
        ("decoder.layers.0.mlp.experts.linear_fc1._extra_state127", True),
        ("_extra_state", True),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight1", False),
        ("decoder.layers.0.mlp.extra_state", False),
        ("a_extra_state.weight", False),
    ],
)
def test_extra_state_is_known_by_its_name(name, extra):
    assert is_extra_state(name) is extra


def test_a_stage_is_described_without_it():
    class Stage:
        def sharded_state_dict(self, prefix, metadata):
            names = ("weight0", "weight1", "_extra_state", "_extra_state1")
            return {f"{prefix}experts.{name}": name for name in names}

    found = sharded_weights(Stage(), "reference.")
    assert found == {"reference.experts.weight0": "weight0", "reference.experts.weight1": "weight1"}
