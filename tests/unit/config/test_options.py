from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from omegaconf import OmegaConf

from rlmath.algorithms.aggregation import AGGREGATIONS
from rlmath.algorithms.losses import LOSSES, LossInputs
from rlmath.algorithms.losses.base import policy_loss
from rlmath.algorithms.losses.dppo import Divergence
from rlmath.algorithms.objective import policy_objective
from rlmath.checks.run import names
from rlmath.config.load import load
from rlmath.config.quoting import override, path_override, quoted_path
from rlmath.config.removed import REMOVED, REMOVED_VALUES
from rlmath.config.schema import OverlongPrompt
from rlmath.config.settings import by_key
from rlmath.errors import ConfigError
from rlmath.training.algorithm_settings import advantage_settings
from rlmath.training.plan import plan_step
from rlmath.utils.setting import Options, setting
from tests.support.case_files import on_cases
from toolkits.pages.settings import settings_page

GIVEN = ["model.path=m", "runner.run_dir=r"]


def options(*overrides, config_dir=None):
    return load([*GIVEN, *overrides], config_dir).algorithm.loss_options


def refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        load([*GIVEN, *overrides])
    return str(caught.value)


@dataclass(frozen=True)
class ScaledOptions(Options):
    scale: float = setting(2.0, "Factor of the loss.", above=0)


@pytest.fixture
def new_loss():
    @policy_loss("scaled", ScaledOptions)
    def scale_loss(inputs, given):
        return -given.scale * inputs.token_advantages() * inputs.zero_masked(inputs.log_probs), {}

    yield
    LOSSES.remove("scaled")


def test_a_new_loss_brings_its_option_to_settings_page_and_call(new_loss):
    assert options("algorithm.loss=scaled") == {"scale": 2.0}
    overrides = [*GIVEN, "algorithm.loss=scaled", "algorithm.loss_options.scale=3"]
    objective = plan_step(load(overrides), 1).objective
    assert objective.loss_options == ScaledOptions(3.0)
    one = torch.ones(1)
    inputs = LossInputs(
        log_probs=-one,
        old_log_probs=-one,
        engine_log_probs=-one,
        advantages=one,
        mask=one.bool(),
        weights=one,
        sequence_ids=torch.zeros(1, dtype=torch.int64),
    )
    assert float(policy_objective(inputs, objective).loss) == 3.0
    row = "| `algorithm.loss_options.scale` | number, more than 0 | `2.0` | Factor of the loss. |"
    assert row in settings_page()
    assert "scale = 0.0: has to be more than 0" in refusal(
        *overrides[2:3], "algorithm.loss_options.scale=0"
    )


def test_options_are_complete_and_typed():
    assert options() == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert options("algorithm.loss=dppo", "algorithm.loss_options.divergence=kl") == {
        "divergence": "kl",
        "threshold": None,
        "dual_clip": None,
    }
    assert options("algorithm.loss_options={clip_high: 0.3}")["clip_high"] == 0.3
    config = load([*GIVEN, "algorithm.advantage_options.leave_one_out=true"])
    assert advantage_settings(config, {}).estimator_options.leave_one_out is True


@on_cases("overrides, expected", __file__, "option_refused")
def test_an_option_that_cannot_be_is_an_error(overrides, expected):
    message = refusal(*overrides)
    for part in expected:
        assert part in message


def test_members_of_an_enumeration_are_written_by_name():
    @dataclass(frozen=True)
    class Chosen(Options):
        one: Divergence = setting(Divergence.tv, "A divergence.")
        other: Divergence | None = setting(None, "Another; null: none.")

    for chosen in (Chosen(), Chosen(Divergence.kl, Divergence.tv)):
        assert Chosen.of(chosen.plain()) == chosen


def test_another_loss_on_the_command_line_starts_from_its_defaults(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nalgorithm:\n  loss: cispo\n  loss_options: {clip_high: 4.0}\n"
    )
    mine = ["experiment=mine"]
    assert options(*mine, config_dir=tmp_path) == {"clip_low": 0.2, "clip_high": 4.0}
    same = options(*mine, "algorithm.loss=cispo", config_dir=tmp_path)
    assert same == {"clip_low": 0.2, "clip_high": 4.0}
    other = options(*mine, "algorithm.loss=ppo_clip", config_dir=tmp_path)
    assert other == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    given = "algorithm.loss_options.clip_low=0.1"
    other = options(*mine, "algorithm.loss=ppo_clip", given, config_dir=tmp_path)
    assert other == {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": None}


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_setting_is_an_error_that_says_what_to_use(key):
    assert key not in by_key()
    assert f"there is no setting {key}: it was removed; use " in refusal(f"{key}=1")


def test_a_removed_value_is_an_error_that_says_what_to_use():
    for key, values in REMOVED_VALUES.items():
        for value in values:
            assert value not in by_key()[key].choices
            (message,) = names(load([*GIVEN, f"{key}={value}"]))
            assert f"{key}={value}: {value} was removed; use " in message


def test_replacements_of_removed_settings_exist():
    texts = [*REMOVED.values(), *(text for one in REMOVED_VALUES.values() for text in one.values())]
    for named in re.findall(r"\b(?:[a-z_]+\.)+[a-z_]+", " ".join(texts)):
        assert named in by_key(), named


def test_a_misspelled_setting_is_an_error_that_names_the_close_one():
    assert "did you mean algorithm.kl_coef" in refusal("algorithm.kl_coeff=0.1")


PROGRAM = """
import sys
from rlmath.cli import main
names = ["algorithm.loss=x", "algorithm.advantage=y"]
code = main(["train", "model.path=m", "runner.run_dir=r", *names])
print(code, [name for name in ("torch", "vllm", "megatron", "ray") if name in sys.modules])
"""


@pytest.mark.process
def test_a_wrong_name_is_reported_without_importing_torch():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "2 []"
    assert "algorithm.loss=x" in done.stderr and "ppo_clip" in done.stderr
    assert "algorithm.advantage=y" in done.stderr and "grpo" in done.stderr


def test_aggregations_of_losses_are_aggregations():
    # Losses whose papers take a mean over sequences.
    of_means = LOSSES.having(lambda one: one.aggregations)
    assert of_means == ["gmpo", "gspo", "gspo_token", "sapo"]
    for loss in of_means:
        kinds = LOSSES.traits(loss).aggregations
        assert set(kinds) <= set(AGGREGATIONS.names())
        assert kinds[0] == "seq_mean_token_mean"


NAMES = ["plain", "a b", "a{b}", "{name}", "a,b", "a=b", "a'b", 'a"b', "a#b", "a:b", "a$b", "(a)"]
NAMES += ["a[b]", "ä", "a%b", "~a", "@a", "a+b", "-a", "<a>", "a  b", "a\\b", 'a\\"b', "a\\"]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_read_back(name):
    path = Path("/models", name)
    config = load(
        [
            path_override("model.path", path),
            path_override("runner.run_dir", path),
            f"data.train_paths=[{quoted_path(path)},b.jsonl]",
        ]
    )
    assert config.model.path == str(path)
    assert config.data.train_paths == [str(path), "b.jsonl"]


TEXTS = [
    "word",
    "null",
    "True",
    "NaN",
    "1",
    "1e5",
    "",
    " a ",
    "a\nb",
    "a\\\n",
    'say "x" \\',
    "it's",
]
TEXTS += ["{prompt} in \\boxed{}.", "\\\\", '\\"', "a, b=[c] # d", "解: {prompt}\u2028", "%s ~ @ :"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_back(text):
    config = load(["model.path=m", "runner.run_dir=r", override("data.prompt_key", text)])
    assert config.data.prompt_key == text


def test_quoted_values_are_read_back():
    values = {
        "data.system_prompt": None,
        "data.apply_chat_template": True,
        "data.overlong_prompts": OverlongPrompt.stop,
        "eval.top_p": 0.5,
        "data.max_prompt_tokens": 7,
        "data.train_paths": ["a b", "c,[d]"],
        "data.template_options": MappingProxyType({"thinking": False, "name": "a b"}),
    }
    given = [override(key, value) for key, value in values.items()]
    config = OmegaConf.structured(load(["model.path=m", "runner.run_dir=r", *given]))
    assert {key: OmegaConf.select(config, key) for key in values} == values


def test_a_path_that_needs_no_quotes_has_none():
    assert path_override("model.path", "/a-b/c_1.d/e f") == "model.path=/a-b/c_1.d/e f"
