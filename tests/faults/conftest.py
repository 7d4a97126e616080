import signal

import pytest

from tests.e2e.conftest import material  # noqa: F401
from tests.faults.broken import LAST_STEP, Run, assert_says_what_it_saved, settings_of


@pytest.fixture(autouse=True)
def nothing_runs_on():
    """After a test that failed in the middle of a run."""
    yield
    while Run.started:
        Run.started.pop().process.kill()


@pytest.fixture(scope="session")
def straight(material, tmp_path_factory):  # noqa: F811
    """A run with one engine to which nothing happens for eight steps; then Ctrl-C ends it."""
    run_dir = tmp_path_factory.mktemp("straight")
    run = Run(run_dir, settings_of(material, run_dir), run_dir / "output.log")
    run.until_saved(LAST_STEP)
    # A terminal sends it to the whole foreground group.
    assert run.end(signal.SIGINT, to="group") == 130, run.output()
    assert_says_what_it_saved(run)
    return run_dir
