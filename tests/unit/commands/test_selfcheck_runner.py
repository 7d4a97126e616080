"""Checks that hang, crash or leave processes fail alone, with what they had measured."""

import json
import os
import stat

import psutil
import pytest

from rlmath.cli import main
from rlmath.commands.selfcheck import report, suite
from rlmath.commands.selfcheck.catalog import CHECKS, Check, select
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record, read_outcome
from rlmath.commands.selfcheck.runner import adopting_child_processes, run_check
from rlmath.device.nvidia import GpuState
from rlmath.errors import UserError
from rlmath.model.published import KNOWN

pytestmark = pytest.mark.process

NAMES = ("hangs", "raises", "segfaults", "exits", "is_wrong", "not_here", "in_part", "good")


def check(name, limit_s=60.0):
    target = f"tests.unit.commands.selfcheck_targets:{name}"
    return Check(name, f"what {name} does", f"Fix {name}.", limit_s, target)


def node(folder):
    return Node("cpu", 0, "", 0.0, "model", str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("selfcheck")


@pytest.fixture(scope="module")
def results(folder):
    with adopting_child_processes():
        yield {
            name: run_check(check(name, 4.0 if name == "hangs" else 60.0), node(folder / name))
            for name in NAMES
        }


def problem(result):
    return result.outcome.problems[0]["problem"]


def test_each_has_its_own_status_whatever_became_of_the_others(results):
    statuses = {name: result.outcome.status for name, result in results.items()}
    failed = dict.fromkeys(("hangs", "raises", "segfaults", "exits", "is_wrong"), "failed")
    others = {"not_here": "not applicable", "in_part": "passed", "good": "passed"}
    assert statuses == failed | others


def test_a_check_that_hangs_is_ended_with_all_that_it_started(results, folder):
    result = results["hangs"]
    assert "4 s in the phase 'the long one'" in problem(result)
    # Its measurements until then stay, and its log says where it hung.
    assert result.outcome.figures[0]["name"] == "before"
    assert "in hangs" in result.log_tail
    child = int((folder / "hangs" / "child").read_text())
    assert not psutil.pid_exists(child)


def test_a_crash_is_named(results):
    assert "SIGSEGV in the phase 'the kernel'" in problem(results["segfaults"])
    assert "in segfaults" in results["segfaults"].log_tail
    assert problem(results["raises"]).startswith("ValueError: an unlucky")
    assert "Traceback" in results["raises"].log_tail
    assert "exit code 7" in problem(results["exits"])


def test_child_process_of_a_passed_check_is_ended(tmp_path):
    with adopting_child_processes():
        result = run_check(check("leaves_an_orphan"), node(tmp_path))
    assert result.outcome.status == "passed"
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


def test_lines_say_what_to_do(results):
    wrong = report.as_line(results["is_wrong"], 9)
    assert "failed" in wrong
    assert "! 3 is more than 2\n" in wrong
    # Its own advice, and the check's where it has none.
    assert "To do: Take 2." in wrong
    assert "To do: Fix is_wrong." in wrong
    assert "rate 1,235 tokens/s" in report.as_line(results["good"], 9)
    assert "not applicable: all of it (there is no GPU)" in report.as_line(results["not_here"], 9)
    assert "TP 2, CP 2 (it needs" in report.as_line(results["in_part"], 9)
    assert "\x1b" not in report.as_line(results["raises"], 9)


def test_the_file_has_everything_as_text_and_as_json(results):
    text = report.as_markdown({"date": "today", "commit": "abc"}, list(results.values()))
    assert "- commit: abc" in text
    assert "| good | passed |" in text
    assert "**To do:** Fix segfaults." in text
    content = json.loads(text.rsplit("```json\n", 1)[1].rsplit("\n```", 1)[0])
    checks = {one["name"]: one for one in content["checks"]}
    assert [*checks] == list(NAMES)
    assert content["about"]["commit"] == "abc"
    rate = checks["good"]["figures"][1]
    assert (rate["value"], rate["unit"], rate["limit"]) == (1234.5678, "tokens/s", ">= 1")
    assert checks["segfaults"]["problems"][0]["problem"] == problem(results["segfaults"])
    page = report.as_gpu_results({"date": "today", "commit": "abc"}, list(results.values()))
    assert "today" in page
    assert "rate 1,235 tokens/s" in page
    assert "**4 is more than 2**" in page
    summary = report.summary(list(results.values()))
    assert [word for word in summary.split() if word.isdigit()] == ["2", "5", "1"]


def test_a_check_that_never_ended_has_not_passed(tmp_path):
    record = Record(tmp_path / "record.jsonl")
    record.figure("all is well", 1)
    with open(tmp_path / "record.jsonl", "a") as file:
        file.write('{"event": "en')
    assert read_outcome(tmp_path / "record.jsonl").status == "failed"
    assert read_outcome(tmp_path / "nothing").status == "failed"


def test_gpu_memory_that_stays_is_a_problem(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    # Each call finds 300 MiB more in use.
    smi.write_text(
        "#!/bin/sh\n"
        f"echo x >> {tmp_path}/calls\n"
        f"n=$(wc -l < {tmp_path}/calls)\n"
        'echo "0, GPU-a, NVIDIA H100 80GB HBM3, 580.1, 81559, $((n * 300))"\n'
    )
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("rlmath.commands.selfcheck.runner.MEMORY_WAIT_S", 0.0)
    result = run_check(check("good"), node(tmp_path / "good"))
    assert result.outcome.status == "failed"
    assert "300 MiB of GPU-a" in problem(result)


def test_selfcheck_only_selects_checks():
    assert select(None) == CHECKS
    assert [one.name for one in select("update, actor")] == ["actor", "update"]
    speed = select("speed, update")
    assert [one.name for one in speed] == ["update", "throughput"]
    assert sum(one.limit_s for one in speed) <= 480
    for names in ("actor,none_such", ""):
        with pytest.raises(UserError, match="weight_sync"):
            select(names)


def test_append_adds_a_section(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "gpu_results.md"
    page.write_text("# What has run\n")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    monkeypatch.setattr(suite, "this_node", lambda out, model: node(out))
    checks = [check("good"), check("is_wrong")]
    assert suite.run(checks, str(tmp_path / "out"), None, "docs/gpu_results.md") == 1
    text = page.read_text()
    assert text.startswith("# What has run\n\n## `rlmath selfcheck gpu`")
    assert "torch" in text
    assert "| good | passed |" in text
    assert "| is_wrong | failed |" in text
    assert suite.run(checks[:1], str(tmp_path / "out"), None, None) == 0
    assert page.read_text() == text


def test_mistakes_in_the_command_are_exit_code_2(tmp_path, capsys):
    for arguments in (
        ["gpu", "--only", "none_such"],
        ["gpus"],
        [],
        ["gpu", f"model.path={tmp_path / 'none_such'}"],
    ):
        assert main(["selfcheck", *arguments]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_a_model_that_cannot_be_trained_on_one_gpu_is_refused_before_anything_runs(
    tmp_path, monkeypatch
):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["Qwen2.5-7B"]))
    states = [GpuState(0, "GPU-a", "NVIDIA H100 80GB HBM3", "580.1", 81559, 4)]
    monkeypatch.setattr(suite, "gpu_states", lambda: states)
    # 7.6 billion x 18 bytes.
    with pytest.raises(UserError, match=r"127\.\d GiB to train on one GPU"):
        suite.this_node(tmp_path / "out", str(tmp_path))


def test_selfcheck_removes_files_of_an_earlier_run(tmp_path):
    run_check(check("in_part"), node(tmp_path / "a"))
    (tmp_path / "a" / "run").mkdir()
    result = run_check(check("good"), node(tmp_path / "a"))
    assert result.outcome.status == "passed"
    assert result.outcome.not_applicable == []
    assert not (tmp_path / "a" / "run").exists()
    # A folder that is not a check's is left as it is.
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("")
    run_check(check("good"), node(tmp_path / "mine"))
    assert (tmp_path / "mine" / "notes").exists()
