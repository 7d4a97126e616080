"""From graded samples to the figures of a benchmark, and what is written of them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlmath.checks.benchmarks import benchmark_problems
from rlmath.commands.settings import known_settings
from rlmath.config.benchmarks import BENCHMARKS, benchmarks_of, longest_response_tokens
from rlmath.config.load import load, save
from rlmath.config.settings import by_key
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.errors import ConfigError, UserError
from rlmath.evaluation.held_out import HeldOut, load_held_out, rows_of
from rlmath.evaluation.journal import Journal
from rlmath.evaluation.metrics import benchmark_metrics, tag_metrics
from rlmath.evaluation.results import table, write_results
from rlmath.evaluation.source import about, tool_settings
from rlmath.evaluation.votes import Votes, count_votes
from rlmath.types import GradedSample, Group, Problem
from tests.support.samples import make_sample
from tests.unit.plugins.test_plugin_loading import EXAMPLES, GIVEN, own_plugins  # noqa: F401


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


ITEM = f"name: '{EXAMPLES}/benchmark.py:products'"


def test_rows_and_settings_are_those_of_the_plugin(
    own_plugins,  # noqa: F811
    capsys,
):
    items = f"eval.benchmarks=[{{{ITEM}, max_problems: 5, temperature: 0.2}}]"
    config = load([*GIVEN, items, "data.prompt_template='Q: {prompt}'", "reward.fallback=number"])
    assert not list(benchmark_problems(config, "evaluate"))
    (one,) = benchmarks_of(config)
    assert (one.name, one.samples, one.temperature, one.top_p) == ("products", 4, 0.2, 0.95)
    assert one.max_response_tokens == 64 and "of a plug-in, largest 9; 4 samples" in one.describe()
    (held_out,) = load_held_out(config, LightTokenizer("tiny"))
    assert [problem.id for problem in held_out.problems][:2] == ["products:2x2", "products:2x3"]
    assert held_out.problems[1].prompt == "Q: 2*3=" and held_out.problems[1].answers == ("6",)
    assert "products: 5 of 64 rows kept" in capsys.readouterr().out
    assert len(config.plugin_hashes) == 1
    assert one.options == {"largest": 9}
    other = load([*GIVEN, items, "eval.published_settings=false", "eval.samples=3"])
    assert benchmarks_of(other)[0].samples == 3


def test_invalid_benchmarks_are_named(own_plugins):  # noqa: F811
    config = load([*GIVEN, "eval.benchmarks=[{name: prodcts}]"])
    BENCHMARKS.register("products")(lambda options: [{"problem": "1*1="}, 3])
    (message,) = benchmark_problems(config, "evaluate")
    assert "did you mean products" in message
    config = load([*GIVEN, f"eval.benchmarks=[{{name: '{EXAMPLES}/loss.py:soft_clip'}}]"])
    (message,) = benchmark_problems(config, "evaluate")
    assert "soft_clip is not registered for eval.benchmarks[].name" in message
    config = load([*GIVEN, "eval.benchmarks=[{name: products}]"])
    with pytest.raises(UserError, match="products: row 2 is a int, not a mapping"):
        list(rows_of(benchmarks_of(config)[0]))


def test_options_of_a_benchmark_are_typed(own_plugins, tmp_path):  # noqa: F811
    def load_options(options, item=ITEM):
        return load([*GIVEN, f"eval.benchmarks=[{{{item}, options: {{{options}}}}}]"])

    few = load_options("largest: 3")
    assert len(list(rows_of(benchmarks_of(few)[0]))) == 4
    # They stand in the saved settings, with those that were not given.
    save(few, tmp_path / "config.yaml")
    (saved,) = OmegaConf.load(tmp_path / "config.yaml").eval.benchmarks
    assert saved.options == {"largest": 3}
    for options, item, part in (
        ("largest: 1", ITEM, "largest = 1: has to be at least 2"),
        (
            "largest: x",
            ITEM,
            r"benchmarks\[0\].options.largest=x: wrong type; expected whole number",
        ),
        ("larger: 3", ITEM, "has no such option; it has largest"),
        ("largest: 3", "name: aime24", "aime24 is no benchmark of a plug-in"),
    ):
        with pytest.raises(ConfigError, match=part):
            load_options(options, item)
    told = {setting.key: of for setting, of in known_settings()}
    assert told["eval.benchmarks[].options.largest"] == "with eval.benchmarks[].name=products"
