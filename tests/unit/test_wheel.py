"""The wheel holds conf/, and the settings compose from it without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_settings_compose_from_a_built_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("rlmath", "conf"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    subprocess.run(
        [sys.executable, "-c", build], cwd=source, check=True, capture_output=True, text=True
    )
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    for file in (ROOT / "conf").rglob("*.yaml"):
        assert (tmp_path / "installed" / "rlmath" / file.relative_to(ROOT)).is_file()
    shutil.rmtree(source)
    result = subprocess.run(
        [sys.executable, "-m", "rlmath", "train", "experiment=quickstart", "--cfg"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "run_dir: runs/quickstart" in result.stdout
