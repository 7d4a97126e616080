"""Commands other than ``train`` know a family and a verifier that only a plug-in has."""

import json
import shutil

import pytest

from rlmath.cli import main
from rlmath.errors import UserError
from rlmath.model.families import FAMILY_PLUGINS
from rlmath.model.tiny import tiny_config
from rlmath.validation.convert import use_plugins_of_run
from tests.unit.plugins.test_plugin_loading import EXAMPLES, own_plugins  # noqa: F401

pytestmark = pytest.mark.usefixtures("own_plugins")
FAMILY = EXAMPLES / "model_family.py"
SHORT = ["rollout.max_response_tokens=512"]


@pytest.fixture
def model(tmp_path):
    """A folder of the example's architecture."""
    fields = tiny_config() | {"architectures": ["MyQwen2ForCausalLM"], "model_type": "qwen2"}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    return tmp_path / "model"


@pytest.mark.parametrize("what", ["layout", "weights"])
def test_plan_knows_the_family(what, model, tmp_path, capsys):
    words = ["plan", what, f"model.path={model}"] + SHORT * (what == "layout")
    assert main(words) == 2
    assert "MyQwen2ForCausalLM is not supported" in capsys.readouterr().err
    assert main([*words, f"plugins=[{tmp_path / 'gone.py'}]"]) == 2
    message = capsys.readouterr().err
    assert message.count("gone.py: no such file") == 1 and "supported" not in message
    assert main([*words, f"plugins=[{FAMILY}]"]) == 0


def test_a_plugin_of_a_checkpoints_run_is_imported(tmp_path):
    mine = tmp_path / "family.py"
    shutil.copy(FAMILY, mine)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    use_plugins_of_run(checkpoint)  # A folder without a run.
    (tmp_path / "run" / "config.yaml").write_text(f"plugins: [{mine}]\n")
    use_plugins_of_run(checkpoint)
    assert "renamed_qwen2" in FAMILY_PLUGINS.names()
    mine.unlink()
    with pytest.raises(UserError, match=r"config.yaml: plugins=.*no such file.*plugins=\[FILE\]"):
        use_plugins_of_run(checkpoint)


def statuses(rows, capsys, *words):
    assert main(["grade", str(rows), *words]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {one["layer"] for one in lines} <= {"verifier", "none"}
    return [one["status"] for one in lines]


@pytest.mark.process
def test_grade_asks_the_verifier(tmp_path, capsys):
    rows, mine = tmp_path / "rows.jsonl", f"{EXAMPLES}/verifier.py:close_enough"
    texts = (r"so \boxed{1.4}", r"so \boxed{1.6}", "I do not know")
    rows.write_text("".join(json.dumps({"response": t, "gold": "1"}) + "\n" for t in texts))
    assert statuses(rows, capsys, "--verifier", mine) == ["wrong", "wrong", "no_answer"]
    half = ("--verifier", mine, "--verifier-option", "tolerance=0.5")
    assert statuses(rows, capsys, *half) == ["correct", "wrong", "no_answer"]
    for words, part in {
        ("--verifier", f"{tmp_path}/gone.py:f"): "gone.py: no such file",
        ("--verifier", "close"): "'close' is not known; known are: ",
        ("--verifier-option", "tolerance=1"): "there is no --verifier",
        (*half[:3], "tolerance=2"): "has to be",
        (*half[:3], "tolerance=far"): "wrong type; expected",
        (*half[:3], "slack=2"): "has no such option; it has tolerance",
    }.items():
        capsys.readouterr()
        assert main(["grade", str(rows), *words]) == 2
        assert part in capsys.readouterr().err
