"""Tiers: every test has the marker of its folder, so that a part of the suite can be chosen.

``launchers/test.sh fast`` runs what stays in its process and needs no engine, no ranks and no run.
Files of ``tests/unit`` that start processes say so: ``pytestmark = pytest.mark.process``, and so
does a test that takes too long for each save. ``long`` is given by hand to tests that take minutes
and prove more of the same; the plain command leaves them out.
``launchers/test.sh long`` runs them, and properties on forty times as many random cases
(``@settings(max_examples=...)`` on a test would fix their number in both).
"""

import gc
import itertools
import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from hypothesis import HealthCheck, settings

# Random cases are not judged by the clock: a busy machine draws them slowly.
_NO_CLOCK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", _NO_CLOCK, max_examples=25)
settings.register_profile("many", _NO_CLOCK, max_examples=1000)
settings.load_profile("few")

# Before torch starts OpenMP: one of several processes has one thread, as a second would spin on a
# core that another needs.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what runs in its background with Ctrl-C ignored, and so would be all that tests
# start and end with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent
# Tier of contracts, and of tests in tests/unit that say so.
PROCESS = "process"
TIER_OF_FOLDER = {
    "unit": "fast",
    "contracts": PROCESS,
    "dryrun": "distributed",
    "distributed": "distributed",
    "engine": "engine",
    "e2e": "e2e",
    "faults": "faults",
    "cuda_wheels": "cuda_wheels",
    "bridge": "bridge",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """``--dist loadfile``: a file's tests stay in one process, with the fixtures that they share.
    All contracts do, so that only one process imports Megatron and vLLM. They do it in functions.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return unit_of(nodeid)

    return Scheduling(config, log)


def unit_of(nodeid):
    """Tests that stay in one process."""
    folder = "tests/contracts/"
    return folder if nodeid.startswith(folder) else nodeid.partition("::")[0]


def tier_of(path):
    """The marker of a test file; a folder without one is an error, so that none is forgotten."""
    folder = path.relative_to(ROOT).parts[0]
    if folder not in TIER_OF_FOLDER:
        raise pytest.UsageError(f"tests/{folder} has no tier: name one in tests/conftest.py")
    return TIER_OF_FOLDER[folder]


def pytest_ignore_collect(collection_path, config):
    """Folders of tiers that ``-m`` leaves out are not imported: Ray, Megatron and vLLM take each
    worker ten seconds."""
    chosen = config.getoption("markexpr")
    if not chosen or collection_path.parent != ROOT or not collection_path.is_dir():
        return None
    tiers = set(TIER_OF_FOLDER.values())
    own = TIER_OF_FOLDER.get(collection_path.name)
    others = sorted({*re.findall(r"\w+", chosen)} - tiers - {"and", "or", "not"})
    expression = Expression.compile(chosen)
    # A test of the folder may have any of the markers that are no tiers.
    for tier, *held in itertools.product(
        {own, PROCESS} if own == "fast" else {own}, *[(True, False)] * len(others)
    ):
        has = {tier: True, **dict(zip(others, held, strict=True))}
        if expression.evaluate(lambda name, has=has, **_: has.get(name, False)):
            return None
    return True


def pytest_collection_finish():
    freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    found = yield
    if nextitem is not None and nextitem.path != item.path:
        freeze()
    return found


def freeze():
    """Freeze the imports, items and leftovers of a file's tests; a tenth of the fast tier went
    into searching it for garbage again and again, and each ``gc.collect`` of the code took
    seconds."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker(PROCESS) is None:
            item.add_marker(tier_of(item.path))
    if hasattr(config, "workerinput"):
        # In parallel, files that start processes come first: they take longest, and the others
        # fill the gaps that they leave at the end.
        sizes = Counter(unit_of(item.nodeid) for item in items)
        starts = {unit_of(item.nodeid) for item in items if item.get_closest_marker(PROCESS)}

        def order(item):
            unit = unit_of(item.nodeid)
            return unit not in starts, -sizes[unit]

        items.sort(key=order)
