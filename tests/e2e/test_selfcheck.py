"""``rlmath selfcheck gpu`` on CPU: every check runs once, and finds faults that were planted."""

import json

import pytest

from rlmath.commands.selfcheck import report
from rlmath.commands.selfcheck.catalog import CHECKS, Check
from rlmath.commands.selfcheck.checks.training import FIGURES
from rlmath.commands.selfcheck.record import read_outcome
from rlmath.commands.selfcheck.suite import run_checks
from rlmath.commands.selfcheck.worker import RECORD_FILE
from tests.e2e import selfcheck_shared
from tests.e2e.runs import marked_processes, rlmath

# Checks of few processes, and of many. tests/distributed/test_actor.py compares what actor does.
ALONE = ("environment", "update", "sleep")
STARTS = ("actor", "parallel", "engines", "training")


def values(outcome):
    return {one["name"]: one["value"] for one in outcome.figures}


@pytest.fixture(scope="module")
def shared_outcomes(tmp_path_factory):
    """Results of the checks on one set of ranks and engines, by name."""
    out = tmp_path_factory.mktemp("shared")
    target = f"{selfcheck_shared.__name__}:run"
    check = Check("shared", "checks on shared parts", "", 600.0, target)
    (result,) = run_checks([check], out, None)
    assert result.outcome.status == "passed", report.as_line(result, 0) + result.log_tail
    names = [*selfcheck_shared.CHECKS, "stale", "lost_bit"]
    return {name: read_outcome(out / "shared" / name / RECORD_FILE) for name in names}


def test_every_check_is_run_here():
    assert {*ALONE, *STARTS, *selfcheck_shared.CHECKS} == {check.name for check in CHECKS}


def selfcheck(folder, names):
    """Lines of the command's output by the check's name, the whole output, and the checks of the
    file that it wrote, by name too."""
    words = ("--only", ",".join(names), "--out", str(folder))
    done = rlmath("selfcheck", "gpu", *words, mark="selfcheck")
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(folder / "selfcheck.md") in done.stdout
    assert marked_processes("selfcheck") == []
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    text = (folder / "selfcheck.md").read_text(encoding="utf-8")
    content = json.loads(text.rsplit("```json\n", 1)[1].rsplit("\n```", 1)[0])
    return lines, done.stdout, {one["name"]: one for one in content["checks"]}


def figures_of(checks):
    return {
        name: {one["name"]: one["value"] for one in check["figures"]}
        for name, check in checks.items()
    }


# The command with checks of a test: tests/unit/commands/test_selfcheck_runner.py.
@pytest.mark.long
def test_selfcheck_command_passes(tmp_path):
    lines, said, checks = selfcheck(tmp_path, ALONE)
    assert all(" passed " in lines[name] for name in ALONE if name != "sleep")
    # A check that means nothing on a CPU has not passed.
    assert "not applicable" in lines["sleep"]
    assert "2 passed, 0 failed, 1 not applicable" in said

    figures = figures_of(checks)
    assert figures["update"]["1024 tokens model FLOPs"] > 0
    assert figures["update"]["1024 tokens log-probs"] < figures["update"]["1024 tokens update"]
    parts = [one["part"] for one in checks["update"]["not_applicable"]]
    assert parts == ["memory against the plan, MFU, launches", "Triton's kernels"]


@pytest.mark.long
def test_selfcheck_of_layouts_engines_and_a_run_passes(tmp_path):
    """The check of engines on one start of them: ``shared_outcomes``."""
    lines, _, checks = selfcheck(tmp_path, STARTS)
    assert all(" passed " in lines[name] for name in STARTS)
    figures = figures_of(checks)
    for layout in ("TP 1 (DP 2)", "TP 2", "CP 2"):
        assert 0 < figures["actor"][f"{layout} max |Δ|"] < 1e-4
        assert 1 < figures["actor"][f"{layout} mean exp|Δ|"] <= 1.0001
    parallel = figures["parallel"]
    for layout in ("DP 2", "TP 2", "PP 2", "CP 2"):
        assert parallel[f"{layout} gradient norm"] > 0
    assert 0 < parallel["worst difference of gradient norms"] < 1e-4
    assert parallel["all-reduce"] > 0
    # Three starts: one rank an engine, the same again, and engines of two ranks.
    for name in ("TP 1", "TP 1 again", "TP 2"):
        assert figures["engines"][f"{name} KV cache"] > 0
    assert figures["engines"]["samples equal in two starts"] == "32 of 32"
    parts = [one["part"] for one in checks["engines"]["not_applicable"]]
    assert parts == ["GPUs of ranks and engines"]
    assert figures["training"]["steps"] == 2
    assert {f"step 2 {name}" for name, _ in FIGURES.values()} <= set(figures["training"])
    assert 1 <= figures["training"]["step 2 mean exp|Δ|"] <= 1.0001


def test_selfcheck_of_shared_engines_and_ranks(shared_outcomes):
    statuses = {name: shared_outcomes[name].status for name in selfcheck_shared.CHECKS}
    assert set(statuses.values()) == {"passed"}, shared_outcomes
    # All that it calls a start is the one start here.
    assert values(shared_outcomes["engines"])["samples equal in two starts"] == "32 of 32"
    sync = values(shared_outcomes["weight_sync"])
    assert sync["largest tensor"] > sync["bucket"]
    assert sum(name.endswith("mean exp|Δ|") for name in sync) == 3
    assert values(shared_outcomes["alignment"])["version 0 mean exp|Δ|"] <= 1.0001
    checkpoint = values(shared_outcomes["checkpoint"])["engines awake tensors that came back"]
    count, _, total = checkpoint.partition(" of ")
    assert int(count) == int(total) > 50
    speed = values(shared_outcomes["throughput"])
    rates = ("decoding", "vLLM alone, plain sampling", "weight sync rate", "checkpoint rate")
    assert all(speed[name] > 0 for name in (*rates, "engine / vLLM alone"))
    size = values(shared_outcomes["checkpoint"])["engines awake size"]
    assert speed["checkpoint size"] == pytest.approx(size, rel=0.01)


def test_a_stale_engine_after_the_first_sync_is_found(shared_outcomes):
    outcome = shared_outcomes["stale"]
    assert outcome.status == "failed"
    (problem,) = [one["problem"] for one in outcome.problems]
    assert "differs" in problem
    checked = [name for name in values(outcome) if name.endswith("mean exp|Δ|")]
    # The first sync passed, and the second was caught before anything was sampled with it.
    assert len(checked) == 1


def test_a_checkpoint_that_loses_a_bit_is_found(shared_outcomes):
    outcome = shared_outcomes["lost_bit"]
    assert outcome.status == "failed"
    (problem,) = [one["problem"] for one in outcome.problems]
    assert "1 of" in problem
    assert "exp_avg" in problem
