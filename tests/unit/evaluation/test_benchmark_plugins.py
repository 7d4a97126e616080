import pytest
from omegaconf import OmegaConf

from rlmath.checks.benchmarks import benchmark_problems
from rlmath.commands.settings import known_settings
from rlmath.config.benchmarks import BENCHMARKS, benchmarks_of
from rlmath.config.load import load, save
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.errors import ConfigError, UserError
from rlmath.evaluation.held_out import load_held_out, rows_of
from tests.unit.plugins.test_plugin_loading import EXAMPLES, GIVEN, own_plugins  # noqa: F401

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
