"""Nothing secret is printed or saved; what only sounds so is."""

import dataclasses

from rlmath.config.load import load, save, to_yaml
from rlmath.config.schema import RewardItem
from rlmath.config.secrets import HIDDEN, without_secrets
from rlmath.errors import printable


def test_secrets_are_hidden_and_other_settings_are_not(tmp_path):
    config = load(
        ["model.path=m", "runner.run_dir=r", "data.prompt_key=question", "data.train_paths=[t]"]
    )
    params = {
        "api_key": "sk-123",
        "headers": {"Authorization": "Bearer 456", "Accept": "text"},
        "url": "https://judge:789@host:8000/v1",
        "max_tokens": 16,
        "tokenizer": "path",
        "passwords": ["none"],
        "auth_token": "",
    }
    item = RewardItem(name="remote", params=params)
    config = dataclasses.replace(config, reward=dataclasses.replace(config.reward, items=[item]))
    save(config, tmp_path / "config.yaml")
    saved = (tmp_path / "config.yaml").read_text()
    assert saved == to_yaml(config)
    assert not [secret for secret in ("sk-123", "456", "789") if secret in saved]
    assert f"https://judge:{HIDDEN}@host:8000/v1" in saved
    for kept in ("prompt_key: question", "Accept: text", "max_tokens: 16", "tokenizer: path"):
        assert kept in saved
    # The settings themselves keep theirs.
    assert item.params["api_key"] == "sk-123"


def test_without_secrets_changes_nothing_else():
    value = {"lr": 1e-3, "list": [1, None, True, "a: b"], "monkey": "x", "max_prompt_tokens": 5}
    value |= dict.fromkeys(("action_key", "observation_key", "label_key"), "x")
    assert without_secrets(value) == value


def test_control_characters_are_spelled_out():
    assert printable("a\x1b[2Jb\nc\u202ed é 漢") == "a\\x1b[2Jb\nc\\u202ed é 漢"
