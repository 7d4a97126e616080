"""From graded samples to the figures of a benchmark, and what is written of them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rlmath.config.benchmarks import benchmarks_of, longest_response_tokens
from rlmath.config.load import load
from rlmath.config.settings import by_key
from rlmath.evaluation.held_out import HeldOut
from rlmath.evaluation.journal import Journal
from rlmath.evaluation.metrics import benchmark_metrics, tag_metrics
from rlmath.evaluation.results import table, write_results
from rlmath.evaluation.source import about, tool_settings
from rlmath.evaluation.votes import Votes, count_votes
from rlmath.types import GradedSample, Group, Problem
from tests.support.samples import make_sample


def graded_sample(index, answer, status):
    sample = make_sample("f:1", index, [1, 2], text="text", seed=7)
    sample = replace(sample, log_probs=np.zeros(0, np.float32))  # Journals keep none.
    correct = {"correct": True, "wrong": False, "no_answer": False}.get(status)
    return GradedSample(sample, None, correct, status, answer)


def group(*samples):
    problem = Problem("f:1", "?", (1,), ("2",))
    return Group(problem, tuple(graded_sample(i, a, s) for i, (a, s) in enumerate(samples)))


MIXED = group(
    ("2", "correct"),
    ("\\frac{4}{2}", "correct"),
    ("\\frac12", "wrong"),
    ("0.5", "wrong"),
    ("1/2", "wrong"),
    ("7", "wrong"),
    (None, "no_answer"),
    ("x^2", "timeout"),
)


def test_equal_wrong_answers_vote_together():
    assert count_votes(MIXED.samples) == Votes(correct=2, wrong=(3, 1), silent=2)


def test_benchmark_metrics():
    metrics = benchmark_metrics([MIXED])
    assert metrics["accuracy"] == 0.25
    assert metrics["maj_at_8"] == 0.0
    assert metrics["pass_at_8"] == 1.0
    assert metrics["no_answer_share"] == metrics["timeout_share"] == 0.125
    assert metrics["response_length"] == 2 and "reward" not in metrics


def test_benchmark_without_answers_reports_the_reward():
    (one,) = group((None, "ungraded")).samples
    samples = tuple(replace(one, reward=reward) for reward in (1.0, 0.5, None))
    assert benchmark_metrics([replace(MIXED, samples=samples)])["reward"] == 0.75


def test_tags_are_means_over_benchmarks():
    one = {"accuracy": 0.2, "accuracy_standard_error": 0.03, "pass_at_8": 0.5}
    other = {"accuracy": 0.6, "accuracy_standard_error": 0.04}
    tags = tag_metrics({"a": one, "b": other})
    assert tags["eval/accuracy"] == pytest.approx(0.4)
    assert tags["eval/accuracy_standard_error"] == pytest.approx(0.025)
    assert tags["eval/a/pass_at_8"] == 0.5
    assert "eval/pass_at_8" not in tags
    assert set(tag_metrics({"held_out": one})) == {f"eval/{name}" for name in one}


def test_a_journal_resumes_where_it_was_cut_off(tmp_path):
    path = tmp_path / "j.jsonl"
    samples = [graded_sample(i, None, "wrong").sample for i in range(3)]
    with Journal(path, {"of": 1}) as journal:
        assert list(journal.keep(samples[:2])) == samples[:2]
    with path.open("ab") as file:
        file.write(b'{"problem_id": "f:1", "ind')
    with Journal(path, {"of": 1}) as journal:
        assert list(journal.samples.values()) == samples[:2]
        failed = replace(samples[2], index=9, failure="the sandbox is gone")
        assert list(journal.keep([*samples[2:], failed])) == [*samples[2:], failed]
    with Journal(path, {"of": 1}) as journal:
        assert list(journal.samples.values()) == samples
    with Journal(path, {"of": 2}) as journal:
        assert journal.samples == {}
    assert path.read_bytes().count(b"\n") == 1


def test_results_are_written(tmp_path):
    entry = {"problems": 1, "settings": {"samples": 8}, "metrics": benchmark_metrics([MIXED])}
    write_results(tmp_path, "a model", {"mine": entry})
    assert (tmp_path / "results.png").stat().st_size > 5000
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["benchmarks"]["mine"]["metrics"]["accuracy"] == 0.25
    assert written["benchmarks"]["mine"]["metrics"]["accuracy_standard_error"] is None
    assert "| 25.0 |" in " ".join(table({"mine": entry}).split())


def test_another_evaluation_is_known_by_its_problems_and_rewards(tmp_path):
    """Data sets of a hub have no file to read; a reward's file may change under its name."""
    model, reward = tmp_path / "m", tmp_path / "mine.py"
    model.mkdir()
    (model / "config.json").write_text("{}")
    reward.write_text("def mine(completions): ...")
    config = load(
        [
            f"model.path={model}",
            f"runner.run_dir={tmp_path}",
            "data.eval_paths=[hub:org/set:main:test]",
            f"reward.items=[{{name: math}}, {{name: '{reward}:mine'}}]",
        ]
    )
    (benchmark,) = benchmarks_of(config)

    def about_answer(answer="2"):
        problem = Problem("f:1", "?", (1,), (answer,), columns={"n": 1})
        return about(config, HeldOut(benchmark, (problem,)))

    first = about_answer()
    assert about_answer() == first == json.loads(json.dumps(first))
    assert about_answer("3") != first
    reward.write_text("def mine(completions): return []")
    assert about_answer() != first


def test_another_evaluation_is_known_by_each_setting_of_tools(tmp_path):
    config = load(["model=tiny", "runner.run_dir=r", "rollout.tools=[python]"])
    for key, setting in by_key().items():
        rule, name = setting.only_with, key.removeprefix("rollout.")
        if rule is not None and rule.setting == "rollout.tools" and name != key:
            assert name in tool_settings(config) or name == "parallel_calls", key
    # Also one that a plug-in registers.
    file = tmp_path / "mine.py"
    config = replace(config, plugins=[str(file)])
    sources = []
    for text in ("x = 1", "x = 2"):
        file.write_text(text)
        sources.append(tool_settings(config)["sources"])
    assert sources[0] != sources[1]


def test_the_identity_of_an_evaluation_has_no_secrets():
    secret = "rollout.python_provider_settings.api_key=sk-1"
    paths = "data.eval_paths=[hub:org/set:main:test]"
    config = load(["model=tiny", "runner.run_dir=r", "rollout.tools=[python]", secret, paths])
    (benchmark,) = benchmarks_of(config)
    found = json.dumps(about(config, HeldOut(benchmark, ())))
    assert "api_key" in found and "sk-1" not in found


def test_benchmark_sampling_settings():
    overrides = ["model=tiny", "runner.run_dir=r", "eval.samples=3", "eval.top_p=0.5"]
    own = (
        "eval.benchmarks=[{name: aime24, samples: 2}, {name: math500}, {name: own, path: f.jsonl}]"
    )
    config = load([*overrides, own, "eval.data_dir=d"])
    aime, math500, mine = benchmarks_of(config)
    assert (aime.samples, aime.temperature, aime.top_p, aime.paths) == (
        2,
        0.6,
        0.95,
        ("d/aime24.jsonl",),
    )
    assert aime.data.apply_chat_template
    assert "\\boxed{}" in str(aime.data.prompt_template)
    assert (math500.samples, math500.temperature) == (4, 0.7)
    assert (mine.samples, mine.top_p, mine.data.prompt_template) == (3, 0.5, None)
    assert longest_response_tokens(config, trains=False) == 32768
    plain = load([*overrides, own, "eval.published_settings=false"])
    assert [b.samples for b in benchmarks_of(plain)] == [2, 3, 3]
    assert benchmarks_of(plain)[0].data.answer_key == "answer"
