"""The locks of ``requirements/`` and what the packages in them ask for."""

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
# Versions of Python that vLLM's and torch's wheels are there for, as markers know them.
PYTHONS = ("3.11", "3.12", "3.13")


@dataclass(frozen=True)
class Lock:
    """A lock.

    Attributes:
        versions: Each package's on one version of Python, by canonical name.
        without: Packages that are deliberately not installed.
    """

    name: str
    versions: dict[str, str]
    without: frozenset[str]


def read_lock(kind, python):
    """``requirements/KIND.lock`` as pip takes it on a version of Python."""
    text = (ROOT / "requirements" / f"{kind}.lock").read_text()
    # The CPU build of torch and what is compiled on the machine stand in comments.
    special = re.findall(r"^# (?:built: )?(\S+==\S+)$", text, re.M)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    versions = {}
    for one in map(Requirement, [*special, *lines]):
        if one.marker is None or one.marker.evaluate(environment(python)):
            (pin,) = one.specifier
            assert pin.operator in ("==", "==="), f"{one} is not pinned"
            assert canonicalize_name(one.name) not in versions, f"{one.name} is locked twice"
            versions[canonicalize_name(one.name)] = pin.version
    without = re.findall(r"^# without: (\S+): \S+", text, re.M)
    return Lock(kind, versions, frozenset(canonicalize_name(name) for name in without))


def environment(python, extra=""):
    """Variables of markers."""
    return {"python_version": python, "python_full_version": f"{python}.5", "extra": extra}


def installed_packages(lock):
    found = {}
    for name in lock.versions:
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def requirements(packages, python):
    """Requirements of each package, and who asks: with the extras that others ask of it."""
    waiting, seen = [(name, "") for name in packages], set()
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen or name not in packages:
            continue
        seen.add((name, extra))
        for one in map(Requirement, packages[name].requires or []):
            if one.marker is None or one.marker.evaluate(environment(python, extra)):
                yield name, one
                waiting += [(canonicalize_name(one.name), e) for e in one.extras]


def unmet(lock, asked):
    """Requirements that are neither in the lock nor deliberately left out."""
    wrong = []
    for who, one in asked:
        name = canonicalize_name(one.name)
        version = lock.versions.get(name)
        if version is None:
            if name not in lock.without:
                wrong.append(f"{who} asks for {one}, which the lock lacks")
        elif not one.specifier.contains(version, prereleases=True):
            wrong.append(f"{who} asks for {one}; the lock has {version}")
    return sorted(set(wrong))
