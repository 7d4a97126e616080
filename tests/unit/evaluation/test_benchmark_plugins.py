"""A benchmark of a user's file: its rows and how it is sampled."""

from __future__ import annotations

import pytest

from rlmath.checks.benchmarks import benchmark_problems
from rlmath.config.benchmarks import BENCHMARKS, benchmarks_of
from rlmath.config.load import load
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.errors import UserError
from rlmath.evaluation.held_out import load_held_out, rows_of
from tests.unit.plugins.test_plugin_loading import EXAMPLES, GIVEN, own_plugins  # noqa: F401

ITEM = f"name: '{EXAMPLES}/benchmark.py:products'"


def test_rows_and_settings_are_those_of_the_plugin(
    own_plugins: None,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    items = f"eval.benchmarks=[{{{ITEM}, max_problems: 5, temperature: 0.2}}]"
    config = load([*GIVEN, items, "data.prompt_template='Q: {prompt}'", "reward.fallback=number"])
    assert not list(benchmark_problems(config, "evaluate"))
    (one,) = benchmarks_of(config)
    assert (one.name, one.samples, one.temperature, one.top_p) == ("products", 4, 0.2, 0.95)
    assert one.max_response_tokens == 64 and "of a plug-in; 4 samples" in one.describe()
    (held_out,) = load_held_out(config, LightTokenizer("tiny"))
    assert [problem.id for problem in held_out.problems][:2] == ["products:2x2", "products:2x3"]
    assert held_out.problems[1].prompt == "Q: 2*3=" and held_out.problems[1].answers == ("6",)
    assert "products: 5 of 64 rows kept" in capsys.readouterr().out
    assert len(config.plugin_hashes) == 1
    other = load([*GIVEN, items, "eval.published_settings=false", "eval.samples=3"])
    assert benchmarks_of(other)[0].samples == 3


def test_what_is_no_benchmark_is_named(own_plugins: None) -> None:  # noqa: F811
    config = load([*GIVEN, "eval.benchmarks=[{name: prodcts}]"])
    BENCHMARKS.register("products")(lambda: [{"problem": "1*1="}, 3])  # type: ignore[list-item]
    (message,) = benchmark_problems(config, "evaluate")
    assert "did you mean products" in message
    config = load([*GIVEN, f"eval.benchmarks=[{{name: '{EXAMPLES}/loss.py:soft_clip'}}]"])
    (message,) = benchmark_problems(config, "evaluate")
    assert "soft_clip is not registered for eval.benchmarks[].name" in message
    config = load([*GIVEN, "eval.benchmarks=[{name: products}]"])
    with pytest.raises(UserError, match="products: row 2 is a int, not a mapping"):
        list(rows_of(benchmarks_of(config)[0]))
