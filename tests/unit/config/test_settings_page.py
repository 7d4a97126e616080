import re

from rlmath.config.load import load
from rlmath.config.settings import by_key, value_of
from toolkits.pages.settings import SETTINGS_PAGE, settings_page


def test_the_page_is_current():
    current = SETTINGS_PAGE.read_text(encoding="utf-8")
    assert current == settings_page(), "run: python -m toolkits.pages.settings"


def test_the_page_begins_with_about_twenty_settings():
    first = settings_page().split("\n## ")[1]
    keys = re.findall(r"^\| `([a-z_.]+)`", first, re.MULTILINE)
    assert 20 <= len(keys) <= 25 and len(keys) == len(set(keys))
    assert {"model.path", "actor.optimizer.lr", "runner.run_dir"} <= set(keys)
    assert "sft.optimizer.lr" not in keys


def test_a_run_that_chooses_nothing_has_the_defaults_of_the_page():
    """Also where conf/config.yaml chooses an option of a group for it."""
    given = {"model.path": "m", "runner.run_dir": "r", "data.train_paths": ["a"]}
    config = load([f"{key}={value}" for key, value in given.items()])
    found = {
        key: (value_of(config, key), setting.default)
        for key, setting in by_key().items()
        # Fields of a list's entries; filled in by the loss or advantage that is chosen.
        if key not in given and "[]" not in key and not key.endswith("_options")
    }
    assert {key: both for key, both in found.items() if both[0] != both[1]} == {}
