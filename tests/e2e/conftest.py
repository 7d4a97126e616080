import pytest

from tests.e2e import golden_curve
from tests.e2e.runs import python, quickstart, rlmath


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    """A random tiny model (``model/``) and arithmetic problems (``data/``)."""
    folder = tmp_path_factory.mktemp("material")
    made = python("-m", "rlmath.quickstart.make", str(folder))
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="session")
def learning_run(material, tmp_path_factory):
    """The folder of the golden curve's run, which learns: its model and last checkpoint. It is
    observed as well, which the curve in the repository was not."""
    run_dir = tmp_path_factory.mktemp("learned")
    run = rlmath("train", *golden_curve.settings(material, run_dir), *golden_curve.OBSERVED)
    assert run.returncode == 0, run.stderr
    assert "profile  step 2" in run.stdout
    return run_dir


@pytest.fixture(scope="session")
def quickstart_run(tmp_path_factory):
    """All that the README's first command does, in fewer steps of more updates: with two updates it
    reaches 0.6 on one CPU and 0.594 on another."""
    run_dir = tmp_path_factory.mktemp("first") / "quickstart"
    return quickstart(run_dir, "runner.steps=20", "algorithm.minibatches_per_step=4")
