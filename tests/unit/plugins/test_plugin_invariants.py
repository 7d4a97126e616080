"""``rlmath test plugin``: rlmath's own parts and the examples hold all invariants, and a wrong part
of each kind is caught by the name of the one that it violates."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlmath.algorithms.advantages import ADVANTAGES, AdvantageTraits
from rlmath.algorithms.aggregation import AGGREGATIONS, AggregationTraits, Whole
from rlmath.algorithms.correction import CORRECTIONS, Weighted
from rlmath.algorithms.curriculum import CURRICULA, PassRates
from rlmath.algorithms.filters import GROUP_FILTERS, FilterTraits
from rlmath.algorithms.kl import KL_ESTIMATORS
from rlmath.algorithms.losses import LOSSES, LossTraits, policy_loss
from rlmath.commands.plugin_test.cli import KINDS, check_plugin
from rlmath.errors import UserError
from rlmath.monitor.trackers import TRACKERS
from rlmath.plugins import loading
from rlmath.rewards import get_reward
from rlmath.training.checks.base import STEP_CHECKS
from rlmath.training.checks.catalog import step_checks
from rlmath.utils.setting import Options

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "plugins"
OWN = [
    pytest.param(kind, name, id=f"{kind.title}-{name}")
    for kind in KINDS
    for name in kind.registry.names()
    # A value model's, which is called with other arguments; what has to be given a range or is
    # chosen for each step; and clients that are not installed.
    if name not in ("gae", "mean_range", "auto", "mlflow", "swanlab", "trackio", "wandb")
]


@pytest.mark.parametrize(("kind", "name"), OWN)
def test_own_parts_hold_the_invariants(kind, name):
    assert [one for one in kind.check(name) if not one.holds] == []


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Registrations of a test are gone after it."""
    for name in ("_imported", "_everywhere", "_failed"):
        monkeypatch.setattr(loading, name, {})
    for registry in (*(kind.registry for kind in KINDS), STEP_CHECKS):
        monkeypatch.setattr(registry, "_known", dict(registry._known))
    yield


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_hold_the_invariants_and_are_short(file, tmp_path, capsys):
    assert len(file.read_text().splitlines()) < 40
    assert check_plugin(str(file), tmp_path, on_ranks=False) == 0
    printed = capsys.readouterr().out
    assert "ok" in printed and "FAILED" not in printed


def test_the_reward_of_a_file():
    reward = get_reward(str(EXAMPLES / "reward.py"))
    assert reward(["it is $4$.", "5", ""], prompts=["2+2="] * 3, answers=[["4"]] * 3) == [1, 0, 0]
    assert reward.drain_metrics() == {"words": pytest.approx(4 / 3)}


def test_the_step_check_of_a_file_is_called_after_the_others():
    loading.use(str(EXAMPLES / "step_check.py"))
    echo = step_checks()._checks[-1]
    assert type(echo).__name__ == "Echo"
    said = []
    problem = SimpleNamespace(id="p7", prompt="1+1=")
    samples = [SimpleNamespace(sample=SimpleNamespace(text=text)) for text in ("2", "1+1=2")]
    now = SimpleNamespace(
        step=3,
        monitor=SimpleNamespace(warn=said.append),
        groups=[SimpleNamespace(problem=problem, samples=samples)],
    )
    assert echo.before_update(now) == {"checks/echoes": 1.0}
    assert said == ["step 3: 1 responses repeat their prompt, the first of p7"]


# Wrong losses, by the invariant that each violates.


def sign_flipped(inputs, options):
    return inputs.token_advantages() * inputs.log_ratio().exp(), {}


def reads_masked(inputs, options):
    """The mean over all tokens lets masked ones in."""
    ratio = (inputs.log_probs - inputs.old_log_probs).clamp(-20, 20).exp()
    return -inputs.token_advantages() * ratio / ratio.detach().mean(), {}


def masked_gradient(inputs, options):
    """Masked by multiplication: NaN times 0 is NaN."""
    return -inputs.token_advantages() * (inputs.log_probs - inputs.old_log_probs).exp(), {}


def overflows(inputs, options):
    return -inputs.token_advantages() * inputs.raw_log_ratio().exp(), {}


def of_the_batch(inputs, options):
    advantages = inputs.token_advantages()
    return -advantages / advantages.abs().max().clamp(min=1e-9) * inputs.log_ratio().exp(), {}


def detached_ratio(inputs, options):
    return -inputs.token_advantages() * inputs.log_ratio().exp().detach() * inputs.log_probs, {}


def noisy(inputs, options):
    noise = 1 + 1e-6 * torch.rand_like(inputs.log_probs)
    return -inputs.token_advantages() * noise * inputs.log_ratio().exp(), {}


def in_place(inputs, options):
    inputs.old_log_probs.sub_(0.125)
    return -inputs.token_advantages() * inputs.log_ratio().exp(), {}


def flags_of_the_data(inputs, options):
    ratio = inputs.log_ratio().exp()
    far = ratio > 2
    return -inputs.token_advantages() * ratio, {"far": far} if far.any() else {}


def one_number(inputs, options):
    return (-inputs.token_advantages() * inputs.log_ratio().exp()).mean(), {}


WRONG_LOSSES = {
    "policy gradient at ratio 1": sign_flipped,
    "masked tokens are not read": reads_masked,
    "finite at log-ratios of +-100": overflows,
    "equal over micro-batches": of_the_batch,
    "gradient": detached_ratio,
    "deterministic": noisy,
    "inputs are left alone": in_place,
    "metrics do not depend on the data": flags_of_the_data,
    "result has one number per token": one_number,
}


def violations(kind, name):
    (chosen,) = (one for one in KINDS if one.title == kind)
    return {one.invariant: one.text for one in chosen.check(name) if not one.holds}


@pytest.mark.parametrize("invariant", WRONG_LOSSES)
def test_a_wrong_loss_is_caught_by_name(invariant):
    policy_loss("wrong", Options)(WRONG_LOSSES[invariant])
    found = violations("loss", "wrong")
    assert invariant in found
    if invariant != "metrics do not depend on the data":
        assert any(character.isdigit() for character in found[invariant]), found


def test_a_gradient_that_masks_by_multiplication_is_caught():
    policy_loss("wrong", Options)(masked_gradient)
    assert "nan planted" in violations("loss", "wrong")["masked tokens are not read"]


def test_a_declared_stop_of_the_gradient_is_no_mistake():
    policy_loss("right", Options, LossTraits(stops_gradient=True))(detached_ratio)
    assert violations("loss", "right") == {}


WRONG_ADVANTAGES = {
    "result has one number per sample": lambda r, g: r.nan_to_num(0.0)[:, None],
    "unscored samples take no part": lambda r, g: r.nan_to_num(0.0) - 0.3,
    "order of samples makes no difference": (
        lambda r, g: torch.linspace(0, 1, len(r), dtype=r.dtype) * r.nan_to_num(0.0)
    ),
    "a higher reward has no lower advantage": lambda r, g: -r.nan_to_num(0.0),
    "deterministic": lambda r, g: r.nan_to_num(0.0) * torch.rand(1, dtype=r.dtype),
    "inputs are left alone": lambda r, g: r.nan_to_num_(0.0),
    "within_groups: other groups make no difference": (
        lambda r, g: torch.where(r.isnan(), 0.0, r - r.nanmean())
    ),
    "compares: equal rewards of a group have advantage 0": lambda r, g: r.nan_to_num(0.0),
}


@pytest.mark.parametrize("invariant", WRONG_ADVANTAGES)
def test_a_wrong_advantage_is_caught_by_name(invariant):
    def wrong(rewards, group_ids, options, *, token_counts=None):
        return WRONG_ADVANTAGES[invariant](rewards, group_ids)

    ADVANTAGES.register("wrong", traits=AdvantageTraits(within_groups=True))(wrong)
    assert invariant in violations("advantage", "wrong")


WRONG_AGGREGATIONS = {
    "weights are numbers from 0": lambda counts: 1.0 / counts,
    "sequences without tokens make no difference": (
        lambda counts: torch.full_like(counts, 1.0 / len(counts))
    ),
    "order of sequences makes no difference": (
        lambda counts: torch.linspace(1, 2, len(counts)).double() / (counts > 0).sum()
    ),
    "whole: parts of a minibatch add up": (
        lambda counts: (1.0 / counts.sum().clamp(min=1)).expand(counts.shape)
    ),
    "deterministic": lambda counts: torch.rand(len(counts)).double() / (counts > 0).sum(),
}


@pytest.mark.parametrize("invariant", WRONG_AGGREGATIONS)
def test_a_wrong_aggregation_is_caught_by_name(invariant):
    def wrong(counts, groups, length, options):
        return WRONG_AGGREGATIONS[invariant](counts)

    AGGREGATIONS.register("wrong", traits=AggregationTraits(Whole.sequences))(wrong)
    assert invariant in violations("aggregation", "wrong")


WRONG_ESTIMATORS = {
    "0 where policy and reference agree": lambda p, r, o, options: p - r + 0.1,
    "gradient": lambda p, r, o, options: 0.5 * (p - r) * (p - r).detach(),
    "finite at differences of +-100": lambda p, r, o, options: (r - p).exp() - 1 - (r - p),
    "each token for itself": lambda p, r, o, options: (p - r) - (p - r).mean(),
    "deterministic": lambda p, r, o, options: (p - r) * torch.rand(1, dtype=p.dtype),
}


@pytest.mark.parametrize("invariant", WRONG_ESTIMATORS)
def test_a_wrong_kl_estimator_is_caught_by_name(invariant):
    KL_ESTIMATORS.register("wrong")(WRONG_ESTIMATORS[invariant])
    assert invariant in violations("KL estimator", "wrong")


def of_masked(ratios):
    """Ratios of 0 are those of masked tokens, and count."""
    return Weighted(ratios.tokens.exp() / ratios.tokens.exp().mean())


WRONG_CORRECTIONS = {
    "weights are numbers from 0": lambda ratios: Weighted(ratios.tokens),
    "1 where engine and trainer agree": lambda ratios: Weighted(0.5 * ratios.tokens.exp()),
    "finite at log-ratios of +-100": lambda ratios: Weighted(ratios.tokens.float().exp().double()),
    "each sequence for itself": of_masked,
    "deterministic": lambda ratios: Weighted(ratios.tokens.exp() * torch.rand(1).double()),
}


@pytest.mark.parametrize("invariant", WRONG_CORRECTIONS)
def test_a_wrong_correction_is_caught_by_name(invariant):
    def wrong(ratios, bounds, options):
        return WRONG_CORRECTIONS[invariant](ratios)

    CORRECTIONS.register("wrong")(wrong)
    assert invariant in violations("mismatch correction", "wrong")


class Stateful:
    def __init__(self):
        self.calls = 0

    def __call__(self, scores, options):
        self.calls += 1
        return self.calls % 2 == 0


WRONG_FILTERS = {
    "result is true or false": lambda scores, options: sum(scores.rewards),
    "deterministic": Stateful(),
    "order of samples makes no difference": lambda scores, options: scores.rewards[0] > 0.1,
    "compares: a group of one is dropped": lambda scores, options: True,
}


@pytest.mark.parametrize("invariant", WRONG_FILTERS)
def test_a_wrong_group_filter_is_caught_by_name(invariant):
    GROUP_FILTERS.register("wrong", traits=FilterTraits(compares=True))(WRONG_FILTERS[invariant])
    assert invariant in violations("group filter", "wrong")


class Forever(PassRates):
    """Never tries a problem again."""

    def is_on_cooldown(self, problem_id, step):
        return self.rate(problem_id) is not None


class Amnesiac(PassRates):
    def load_state(self, state):
        """Nothing."""


class Empty(PassRates):
    def is_on_cooldown(self, problem_id, step):
        return self.rate(problem_id) is None


class Random(PassRates):
    def is_on_cooldown(self, problem_id, step):
        return self.rate(problem_id) is not None and random.random() < 0.5


WRONG_CURRICULA = {
    "a skipped problem comes again": Forever,
    "its state continues as it would have": Amnesiac,
    "a problem that was never tried is not skipped": Empty,
    "deterministic": Random,
}


@pytest.mark.parametrize("invariant", WRONG_CURRICULA)
def test_a_wrong_curriculum_is_caught_by_name(invariant):
    CURRICULA.register("wrong")(lambda settings, _: WRONG_CURRICULA[invariant](settings))
    assert invariant in violations("curriculum", "wrong")


class Fragile:
    def __init__(self, run):
        self.file = (run.folder / "numbers").open("w")

    def settings(self, text, values, compared_by):
        """Nothing."""

    def step(self, step, time_s, values, texts):
        self.file.write("".join(f"{int(one)}\n" for one in values.values()))
        self.file.write(str(max(values.values())))

    def close(self):
        self.file.close()


def test_a_wrong_tracker_is_caught_by_name():
    TRACKERS.register("wrong")(Fragile)
    found = violations("tracker", "wrong")
    assert "cannot convert float" in found["takes settings, metrics that are not finite, and texts"]
    assert "a step without metrics is no error" in found

    class Forgetful(Fragile):
        def step(self, step, time_s, values, texts):
            self.file.write("step\n" * (9 - step))

    TRACKERS.register("forgetful")(Forgetful)
    assert list(violations("tracker", "forgetful")) == ["a resumed run keeps what was written"]


def test_the_command_says_which_part_and_invariant(tmp_path, capsys):
    file = tmp_path / "wrong.py"
    file.write_text(
        "from rlmath.algorithms.losses import policy_loss\n"
        "from rlmath.utils.setting import Options\n"
        "@policy_loss('backwards', Options)\n"
        "def backwards(inputs, options):\n"
        "    return inputs.token_advantages() * inputs.log_ratio().exp(), {}\n"
    )
    assert check_plugin(str(file), tmp_path, on_ranks=False) == 1
    printed = capsys.readouterr().out
    assert "FAILED  loss backwards: policy gradient at ratio 1" in printed
    assert "ok      loss backwards: gradient" in printed
    empty = tmp_path / "empty.py"
    empty.write_text("")
    with pytest.raises(UserError, match="registers none of loss, advantage"):
        check_plugin(str(empty), tmp_path)
    with pytest.raises(UserError, match="no such file"):
        check_plugin(str(tmp_path / "gone.py"), tmp_path)


def test_losses_are_still_there():
    assert "wrong" not in LOSSES.names()
