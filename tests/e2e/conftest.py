from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import python


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny model (``model/``) and arithmetic problems (``data/``)."""
    folder = tmp_path_factory.mktemp("material")
    made = python("-m", "rlmath.quickstart.make", str(folder))
    assert made.returncode == 0, made.stderr
    return folder
