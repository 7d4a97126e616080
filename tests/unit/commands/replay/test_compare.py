"""A step that was done again against the run's digests, and two updates of one batch."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from rlmath.actor.observer import ObservedUpdate, Products, Pulls
from rlmath.algorithms.filters import TruncatedRule
from rlmath.batching.from_groups import SampleRewards, sampled_sequences
from rlmath.commands.replay import alternative, compare
from rlmath.commands.replay.redo import Both, Redone
from rlmath.config.schema import DType
from rlmath.monitor.digests import StepDigests, details_path
from rlmath.monitor.run_folder import RunFolder
from rlmath.training.digests import digest_gradient, digest_weights
from rlmath.training.kept_batches import KeptStep
from rlmath.training.step_batch import StepBatch
from tests.unit.commands.made_run import Run
from tests.unit.commands.report.run_maker import group

LAYOUT = {"tensor_parallel": 1, "device": "cpu", "threads": 2}


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run").go()


def again(run, step, **changed):
    """The step's digests as a replay makes them."""
    digests = StepDigests()
    monitor = SimpleNamespace(digests=digests, phase=lambda _: _Nothing())
    run.train_on(monitor, step, run.trained_groups(step))
    run.weights = {f"layer.{i}.weight": torch.full((4, 3), float(i + step)) for i in range(3)}
    digest_gradient(digests, changed.get("gradient", run.gradient(step)), run.gradients(step))
    if "weight" in changed:
        run.weights["layer.1.weight"][0, 0] += changed["weight"]
    digest_weights(monitor, run)
    metrics = changed.get("metrics", {})
    return Redone(step, digests, metrics, {**LAYOUT, **changed.get("layout", {})}, LAYOUT)


class _Nothing:
    def __enter__(self): ...
    def __exit__(self, *_): ...


def source(run):
    return SimpleNamespace(run=RunFolder(run.folder))


def verdict(run, redone, dtype=DType.float32):
    found = compare.verdict(source(run), redone, dtype)
    assert list(compare.lines([found])) and json.dumps(compare.as_json([found]))
    return found


def test_the_same_step_is_equal(run):
    found = verdict(run, again(run, 2))
    assert found.is_exact and found.is_right and found.must_be_exact
    assert found.equal == (
        *("groups", "old_log_probs", "advantages"),
        *("gradient", "gradient_tensors", "weights"),
    )
    assert (found.tensors, found.equal_tensors) == (3, 3)
    assert [one.grad_norm for one in found.minibatches or ()] == [2.5, 0.25]


def test_one_changed_number_of_a_weight_is_noticed(run):
    found = verdict(run, again(run, 2, weight=2**-20))
    assert found.differing == ("weights",) and found.equal_tensors == 2
    # In its own layout on CPU that is another update; elsewhere the last bits may differ.
    assert not found.is_right
    assert verdict(run, again(run, 2, weight=2**-20, layout={"tensor_parallel": 2})).is_right
    assert verdict(run, again(run, 2, weight=2**-20, layout={"threads": 1})).is_right


@pytest.mark.parametrize(
    ("name", "factor", "dtype", "close"),
    [
        ("grad_norm", 1 + 5e-6, DType.float32, True),
        ("grad_norm", 1 + 5e-5, DType.float32, False),
        ("grad_norm", 1 + 5e-3, DType.bfloat16, True),
        ("loss", 1 + 5e-5, DType.float32, True),  # 5e-6 of a loss of 0.1
        ("loss", 1 + 5e-4, DType.float32, False),
        ("loss", float("nan"), DType.float32, False),
    ],
)
def test_another_layout_has_a_tolerance(run, name, factor, dtype, close):
    gradient = copy.deepcopy(run.gradient(2))
    gradient[0][name] *= factor
    redone = again(run, 2, gradient=gradient, layout={"tensor_parallel": 2})
    found = verdict(run, redone, dtype)
    assert found.differing == ("gradient",)
    assert found.is_close is close and found.is_right is close


def test_without_the_step_s_file_the_means_are_compared(run):
    details_path(run.folder, 2).unlink()
    other = {"layout": {"tensor_parallel": 2}, "weight": 1.0}
    assert verdict(run, again(run, 2)).is_right  # By digests alone.
    unknown = verdict(run, again(run, 2, **other))
    assert unknown.minibatches is None and unknown.tensors is None and not unknown.is_right
    path = run.folder / "metrics.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    for line in lines:
        line |= {"train/loss": 0.15, "train/grad_norm": 1.375}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for norm, close in ((1.375 * (1 + 1e-6), True), (1.376, False)):
        metrics = {"train/loss": 0.15, "train/grad_norm": norm}
        found = verdict(run, again(run, 2, metrics=metrics, **other))
        assert found.is_close is close and len(found.minibatches or ()) == 1


# Two groups of two sequences: 4, 5, 4 and 5 response tokens.
PULLS = torch.arange(18, dtype=torch.float32) / 10


def both(changes):
    """The other update pulls otherwise at some response tokens."""
    groups = [group(f"p{i}", [1.0, -1.0], ["2", "3"], step=1) for i in range(2)]
    made = sampled_sequences(groups, truncated=TruncatedRule.keep, mask_duplicates=False)
    batch = StepBatch(
        made.select(range(4)),
        ("p0/0", "p0/1", "p1/0", "p1/1"),
        made.takes_part,
        SampleRewards.of(groups, {}),
        0,
    )
    other = PULLS.clone()
    for row, change in changes.items():
        other[row] += change

    def reports(pulls, norm):
        """Two ranks, the first of which has the last two sequences."""
        lengths = made.response_lengths
        at = int(lengths[:2].sum())
        parts = (([2, 3], pulls[at:]), ([0, 1], pulls[:at]))
        products = (Products(norm**2, 4.0, 3.0 * norm),)
        return [
            ObservedUpdate(products, None, (Pulls(torch.tensor(p), lengths[p], values),))
            for p, values in parts
        ]

    kept = KeptStep(batch, 0.0, 0.0, LAYOUT)
    metrics = {"train/loss": 0.2, "train/lr": 1.0, "correction/rejected_share": 0.5}
    return Both(kept, reports(PULLS, 0.0), reports(other, 2.0), [{"loss": 0.2}], metrics, True)


class Tokenizer:
    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def compare_changes(changes, monkeypatch):
    monkeypatch.setattr(alternative, "load_tokenizer", lambda _: Tokenizer())
    digests = StepDigests(numbers={"gradient": [{"loss": 0.1}]})
    metrics = {"train/loss": 0.1, "train/lr": 1.0, "train/grad_norm": 2.0}
    redone = Redone(3, digests, metrics, LAYOUT, LAYOUT)
    found = alternative.alternative(redone, both(changes), "model", tokens=2)
    assert json.dumps(found)
    return found, "\n".join(alternative.lines(found, 3))


def test_tokens_that_change_most_are_named(monkeypatch):
    found, text = compare_changes({0: 1.0, 6: 3.0, 9: -2.0, 17: 2.0}, monkeypatch)
    gain, lose = found["gain"], found["lose"]
    assert [(one["sample"], one["position"]) for one in gain] == [("p0/1", 2), ("p1/1", 4)]
    assert [(one["sample"], one["position"]) for one in lose] == [("p1/0", 0)]
    assert gain[0]["own"] == pytest.approx(0.6) and gain[0]["other"] == pytest.approx(3.6)
    # Responses are 0, 1, 2, ...: a token's text is its position.
    assert [gain[0][key] for key in ("before", "text", "after")] == ["0 1", "2", "3 4"]
    assert [lose[0][key] for key in ("before", "text")] == ["", "0"]
    assert found["equal_pulls"] == pytest.approx(14 / 18)
    assert "3/p0/1 token 2" in text


def test_the_same_update_has_no_such_tokens(monkeypatch):
    found, _ = compare_changes({}, monkeypatch)
    assert found["gain"] == found["lose"] == [] and found["equal_pulls"] == 1.0


def test_replay_shows_metrics_and_gradients(monkeypatch):
    found, text = compare_changes({0: 1.0}, monkeypatch)
    norms = {"own_norm": 2.0, "other_norm": 2.0, "cosine": pytest.approx(1.5)}
    assert found["gradients"] == [norms]
    assert found["metrics"] == {
        "train/loss": {"own": 0.1, "other": 0.2},
        "train/grad_norm": {"own": 2.0, "other": None},
        "correction/rejected_share": {"own": None, "other": 0.5},
    }
    assert "none" in text
