import pytest

from tests.e2e import golden_curve
from tests.e2e.runs import python, rlmath


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    """A random tiny model (``model/``) and arithmetic problems (``data/``)."""
    folder = tmp_path_factory.mktemp("material")
    made = python("-m", "rlmath.quickstart.make", str(folder))
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="session")
def learning_run(material, tmp_path_factory):
    """The folder of the golden curve's run, which learns: its model and last checkpoint."""
    run_dir = tmp_path_factory.mktemp("learned")
    run = rlmath("train", *golden_curve.settings(material, run_dir))
    assert run.returncode == 0, run.stderr
    return run_dir
