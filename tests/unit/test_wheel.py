"""The wheel holds conf/; with SymPy alone it is the verifier, and with the extras it trains."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A folder with the contents of the wheel, and nothing of the repository near it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
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
    (file,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "installed")
    shutil.rmtree(source)
    return folder / "installed"


def test_settings_compose_from_a_built_wheel(wheel, tmp_path):
    for file in (ROOT / "conf").rglob("*.yaml"):
        assert (wheel / "rlmath" / file.relative_to(ROOT)).is_file()
    result = subprocess.run(
        [sys.executable, "-m", "rlmath", "train", "experiment=quickstart", "--cfg"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "run_dir: runs/quickstart" in result.stdout


def requirements_of(distributions):
    """Packages that pip installs for distributions without extras, and for those these bring."""
    found = set()
    for distribution in distributions:
        for one in map(Requirement, distribution.requires or []):
            if one.name not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
                found.add(one.name)
                distributions.append(importlib.metadata.distribution(one.name))
    return found


@pytest.fixture(scope="module")
def bare(wheel):
    """A folder for ``PYTHONPATH`` with what ``pip install rlmath`` installs, and nothing else."""
    (rlmath,) = importlib.metadata.distributions(name="rlmath", path=[str(wheel)])
    packages = requirements_of([rlmath])
    assert packages == {"sympy", "mpmath"}
    folder = wheel.parent / "bare"
    folder.mkdir()
    (folder / "rlmath").symlink_to(wheel / "rlmath")
    for name in packages:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        (folder / name).symlink_to(Path(spec.origin).parent)
    return folder


def without_packages(bare, folder, *arguments):
    """Python that can import the standard library and what is in ``bare``."""
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(bare)},
        capture_output=True,
        text=True,
        timeout=300,
    )


PROGRAM = r"""
import importlib.util
for name in ("torch", "megatron", "ray", "hydra", "omegaconf", "vllm", "transformers", "numpy"):
    assert importlib.util.find_spec(name) is None, name
from rlmath.grading import check_gold, grade
from rlmath.rewards import RewardMix, available_rewards, get_reward
from rlmath.types import Problem, Sample

assert grade(r"so \boxed{\frac12}", "0.5").correct
# A worker of the fork server.
assert grade(r"\boxed{\sum_{k=1}^1 \sin^2 x+\cos^2 x}", "1").method == "sympy"
assert not check_gold(27.0).usable
assert get_reward("math")([r"\boxed{7}", "8"], solution=["7", "7"]) == [5.0, -5.0]
program = ["```python\nprint(input())\n```"]
tests = [{"language": "python", "test_cases": [{"input": "x", "output": "x"}]}]
assert get_reward("code")(program, verification_info=tests) == [1.0]
problem = Problem("1", "2+5?", (1,), ("7",))
samples = [Sample("1", 0, (1, 2), (-0.1, -0.1), r"\boxed{7}", "stop", ((0, 0),), 0, 0)]
names = ("math", "length", "repetition_penalty")
with RewardMix.from_config([{"name": name} for name in names]) as mix:
    (scored,) = mix.score_group(problem, samples)
assert scored.rewards["math"] == 5.0
skipped = {"remote", "soft_overlong_punishment"}  # These have no default for an address, a length.
for name in set(available_rewards()) - skipped:
    get_reward(name)
print("done")
"""


def test_verifier_and_rewards_need_no_package_of_training(bare, tmp_path):
    done = without_packages(bare, tmp_path, "-c", PROGRAM)
    assert done.stdout == "done\n", done.stderr


def test_grade_runs_and_train_names_the_extra(bare, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"response": r"\boxed{7}", "gold": "7"}))
    done = without_packages(bare, tmp_path, "-m", "rlmath", "grade", "rows.jsonl")
    assert json.loads(done.stdout.splitlines()[0])["correct"], done.stderr
    for command in (["train", "experiment=quickstart"], ["doctor"]):
        done = without_packages(bare, tmp_path, "-m", "rlmath", *command)
        assert done.returncode == 2
        assert "rlmath[cpu]" in done.stderr and "Traceback" not in done.stderr
    assert without_packages(bare, tmp_path, "-m", "rlmath", "train", "--help").returncode == 0
