"""The names read from the source are those that the registries hold."""

from rlmath.config.names import aggregations_of_losses, registered_names, reward_names


def test_names_agree_with_the_registries() -> None:
    from rlmath.algorithms.advantages import ADVANTAGES
    from rlmath.algorithms.aggregation import AGGREGATIONS
    from rlmath.algorithms.kl import KL_ESTIMATORS
    from rlmath.algorithms.losses import LOSSES

    names = registered_names()
    assert names["algorithm.advantage"] == ADVANTAGES.names()
    assert names["algorithm.loss"] == LOSSES.names()
    assert names["algorithm.aggregation"] == AGGREGATIONS.names()
    assert names["algorithm.kl_estimator"] == KL_ESTIMATORS.names()
    assert "grpo" in names["algorithm.advantage"]
    assert "ppo_clip" in names["algorithm.loss"]


def test_aggregations_of_losses_agree_with_what_the_losses_declare() -> None:
    from rlmath.algorithms.aggregation import AGGREGATIONS
    from rlmath.algorithms.losses import LOSSES
    from rlmath.algorithms.losses.base import AGGREGATIONS_OF_LOSSES

    assert aggregations_of_losses() == AGGREGATIONS_OF_LOSSES
    # Losses whose papers take a mean over sequences.
    assert set(AGGREGATIONS_OF_LOSSES) == {"gspo", "gspo_token", "gmpo", "sapo"}
    for loss, kinds in AGGREGATIONS_OF_LOSSES.items():
        assert loss in LOSSES.names() and set(kinds) <= set(AGGREGATIONS.names())
        assert kinds[0] == "seq_mean_token_mean"


def test_reward_names_agree_with_the_registry() -> None:
    from rlmath.rewards.registry import available_rewards

    assert reward_names() == available_rewards()
    assert "math" in reward_names()
