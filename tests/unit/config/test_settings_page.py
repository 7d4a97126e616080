from rlmath.config.docs import SETTINGS_PAGE, settings_page


def test_the_page_is_current() -> None:
    current = SETTINGS_PAGE.read_text(encoding="utf-8")
    assert current == settings_page(), "run: python -m rlmath.config.docs"
