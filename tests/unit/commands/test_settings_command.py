"""``rlmath settings``: settings by a word, with type, range, default and meaning; plug-ins' too."""

import pytest

from rlmath.cli import main
from rlmath.config.settings import settings
from tests.unit.plugins.test_plugin_loading import EXAMPLES, own_plugins  # noqa: F401

pytestmark = pytest.mark.usefixtures("own_plugins")


def output_of(capsys, *words):
    assert main(["settings", *words]) == 0
    return capsys.readouterr().out


def test_a_setting_is_printed_with_type_range_default_and_meaning(capsys):
    found = output_of(capsys, "kl_coef")
    assert found.startswith("algorithm.kl_coef\n    number, at least 0; default 0.0\n    Coeff")
    both = output_of(capsys, "loss_options", "dual")
    assert "algorithm.loss_options.dual_clip" in both
    assert "algorithm.loss_options.clip_high" not in both
    one = output_of(capsys, "loss_options.threshold")
    assert "algorithm.loss_options.threshold  with algorithm.loss=dppo" in one


def test_options_of_plugins_are_among_them(capsys):
    loss = f"plugins=[{EXAMPLES}/loss.py]"
    found = output_of(capsys, "log-ratio, in nats", loss)
    assert found.startswith("algorithm.loss_options.limit  with algorithm.loss=soft_clip\n")
    assert "number, more than 0; default 0.3" in found
    assert "algorithm.loss_options.limit=" in output_of(capsys, "--keys", loss).splitlines()


def test_keys_are_all_that_can_be_given(capsys):
    keys = output_of(capsys, "--keys").splitlines()
    assert len(keys) == len(set(keys))
    assert {f"{one.key}=" for one in settings() if "[]" not in one.key} <= set(keys)


def test_an_unknown_word_is_an_error_with_a_close_one(capsys):
    assert main(["settings", "kl_coeff"]) == 2
    assert "has kl_coeff in it; did you mean kl_coef?" in capsys.readouterr().err
