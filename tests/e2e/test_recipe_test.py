"""``rlmath test``: two short runs of a recipe, straight and resumed."""

import pytest

from tests.e2e.runs import rlmath

pytestmark = pytest.mark.long

# Two runs take minutes, and far more beside other programs.
TIMEOUT_S = 3600


@pytest.mark.parametrize("name", ["quickstart", "dapo", "open_r1"])
def test_recipe_passes_its_test(name, tmp_path):
    arguments = ("--steps", "4", "--out", str(tmp_path))
    done = rlmath("test", name, *arguments, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(
        line.split(maxsplit=1)[::-1] for line in done.stdout.splitlines() if line[:2] == "ok"
    )
    assert len([one for one in said if one.startswith(("invariants", "settings", "resume"))]) == 3
    assert "no band is stored" in done.stdout, "a band is of 30 steps"
