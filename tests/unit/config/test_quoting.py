from pathlib import Path
from types import MappingProxyType

import pytest
from omegaconf import OmegaConf

from rlmath.config.load import load
from rlmath.config.quoting import override, path_override, quoted_path
from rlmath.config.schema import OverlongPrompt

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
