import re

from rlmath.config.docs import SETTINGS_PAGE, settings_page


def test_the_page_is_current() -> None:
    current = SETTINGS_PAGE.read_text(encoding="utf-8")
    assert current == settings_page(), "run: python -m rlmath.config.docs"


def test_the_page_begins_with_about_twenty_settings() -> None:
    first = settings_page().split("\n## ")[1]
    keys = re.findall(r"^\| `([a-z_.]+)`", first, re.MULTILINE)
    assert 20 <= len(keys) <= 25 and len(keys) == len(set(keys))
    assert {"model.path", "actor.optimizer.lr", "runner.run_dir"} <= set(keys)
    assert "sft.optimizer.lr" not in keys
