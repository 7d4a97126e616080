"""The report's file: one page, closed to the network, in which a sample's text is only text."""

import base64
import hashlib
import re
import shutil
from html.parser import HTMLParser

import pytest

from rlmath.cli import main
from rlmath.commands.report.page import FOLDER, SCRIPTS
from rlmath.commands.report.sample_sets import MAX_COLUMNS, MAX_PROBLEMS, heat_map, read_samples_of
from rlmath.commands.report.tokens import columns_of
from rlmath.commands.report.traces import MAX_LINKS, traces_of
from rlmath.monitor.run_folder import RunFolder
from tests.unit.commands.report.run_maker import HOSTILE, STEPS, group, page_data, trace

# Too slow to run after each change.
pytestmark = pytest.mark.process


class Page(HTMLParser):
    """Elements of a page with their attributes, and what is in its scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        tag = self.elements[-1][0] if self.elements else ""
        if tag in ("script", "style") and data.strip():
            self.blocks.append((tag, data))


@pytest.fixture(scope="module")
def text(run_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "out.html"
    assert main(["report", str(run_dir), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def test_report_runs_only_its_own_script(text):
    page = Page(text)
    meta = [a for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    (policy,) = [a["content"] or "" for a in meta]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    blocks = [(tag, data) for tag, data in page.blocks if "{" in data[:400]]
    style, data, script = (data for _, data in blocks)
    for name, block in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert rules[name] == f"'sha256-{digest}'"
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert "<" not in data and data.isascii()


def test_report_loads_no_resource(text):
    page = Page(text)
    assert not {"src", "srcset", "data", "action", "poster"} & {
        name for _, attributes in page.elements for name in attributes
    }
    assert all((a.get("href") or "#").startswith("#") for _, a in page.elements)
    assert not {"link", "iframe", "object", "embed", "img"} & {tag for tag, _ in page.elements}
    own = "".join((FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    # Names of namespaces are no addresses.
    assert set(re.findall(r"https?://[\w./]+", own)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1998/Math/MathML",
    }
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", own)
    assert "url(" not in (FOLDER / "report.css").read_text(encoding="utf-8")


def test_texts_are_as_they_were_sampled(text):
    (run,) = page_data(text)["runs"]

    def source(sample):
        pieces = [one for *_, part in sample["response"] for one in part]
        return "".join(p if isinstance(p, str) else run["formulas"][p][0] for p in pieces)

    shown = {source(sample) for sample in run["samples"]}
    for sampled in (*HOSTILE[:4], HOSTILE[5]):
        assert sampled in shown
    (cut,) = {one for one in shown if "characters left out" in one}
    assert cut.startswith("xxx") and len(cut) < 50_000
    assert any("middle of long texts" in note for note in run["notes"])
    # Seeds are larger than JavaScript's exact numbers.
    assert {sample["seed"] for sample in run["samples"]} >= {str(2**60), str(2**60 + 1)}


def test_report_has_the_runs_facts(text):
    data = page_data(text)
    (run,) = data["runs"]
    assert dict(zip(data["fact_names"], run["facts"], strict=True))["loss"] == "ppo_clip"
    learning, health, time = run["answers"]
    assert learning[1:3] == ["open", "not known after so few steps"]
    assert health[1] == "bad" and "collapse detector: 1" in health[2] and "warning: 1" in health[2]
    assert time[1:3] == ["good", f"finished: {STEPS} steps"]
    assert run["steps"] == [0, 1, 2, 3, 4]
    assert run["metrics"]["rollout/rewards"] == [None, 1, 2, 3, 4]
    assert run["metrics"]["train/loss"][3] is None
    events = {(step, kind) for step, kind, _ in run["events"]}
    assert {
        (2, "detector"),
        (2, "discarded"),
        (3, "restart"),
        (3, "failure"),
        (3, "warning"),
        (3, "not_finite"),
    } <= events
    # An automatic choice is an event when it is another one.
    assert [step for step, kind, _ in run["events"] if kind == "decision"] == [1]
    assert set(data["event_kinds"]) >= {kind for _, kind in events}
    training = run["kinds"]["step"]
    assert training["samples"] == [9] * STEPS
    assert training["statuses"] == {"correct": [4] * 4, "timeout": [1] * 4, "wrong": [4] * 4}
    assert training["lengths"][0] == [4, 4, 4, 5, 6, 6, 6]
    assert training["truncated"] == [pytest.approx(1 / 9)] * STEPS
    rows = {row["id"]: row["cells"] for row in training["heat"]["rows"]}
    assert rows["train.jsonl:0"] == [[step, 1, 2] for step in range(STEPS)]
    assert rows["train.jsonl:3"] == [[1, 3, 3]]
    samples = [one for one in run["samples"] if one["problem"] == "train.jsonl:1"]
    assert {one["dropped"] for one in samples} == {"equal_rewards"}
    group = {"size": 3, "right": 0, "mean": -5.0, "deviation": 0.0}
    assert all(one["of_group"] == group for one in samples)
    (other,) = {
        tuple(one["of_group"].values())
        for one in run["samples"]
        if one["problem"] == "train.jsonl:0"
    }
    assert other == (3, 1, 0.0, pytest.approx(50**0.5))
    assert {one["method"] for one in samples} == {"exact"} <= set(data["methods"])


def test_values_by_token(text):
    """The first sample of one problem of each step, with its texts from the tokenizer."""
    (run,) = page_data(text)["runs"]
    found = [one for one in run["samples"] if one["by_token"]]
    assert [(one["step"], one["kind"], one["index"]) for one in found] == [
        (step, "step", 0) for step in range(1, STEPS + 1)
    ]
    for one in found:
        table = one["by_token"]
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
        assert len(rows) == one["tokens"] and all(row["text"] for row in rows)
        assert {row["log_prob"] for row in rows} == {-0.5}
        if one["step"] == 1:  # Nothing was traced of it.
            assert table["columns"] == ["text", "log_prob"] and "not traced" in table["note"]
            continue
        assert table["note"] == "in minibatch 2 of the update"
        last = len(rows) - 1
        for place, row in enumerate(rows):
            assert row["difference"] == place / 8 and row["reference"] == place / 8 + 0.25
            assert row["entropy"] == place / 4
            assert row["pull"] == pytest.approx(-place * 1e-4, rel=1e-3)
            assert row["advantage"] == (-1.5 if place < last else 0)
        assert [row["use"] for row in rows] == [3, 2, *[0] * (last - 2), 1]
        versions = [2, 2, *[3] * (last - 1)] if one["step"] == 4 else []
        assert [row["version"] for row in rows if "version" in row] == versions


def test_outputs_of_tools_have_no_differences():
    graded = group("p", [5.0], ["2"], step=6).samples[0]
    row = {"segments": [["model", 3, ""], ["observation", 4, ""], ["model", 2, ""]]}
    found = columns_of(row, trace(graded))
    assert [bool(one) for one in found["reference"]] == [True] * 3 + [False] * 4 + [True] * 2
    assert list(found["difference"][:8]) == [0, 0.125, 0.25, 0, 0, 0, 0, 0.875]


def test_report_explains_changes(text, run_dir, tmp_path):
    (run,) = page_data(text)["runs"]
    assert [(one["metric"], one["against"], one["steps"]) for one in run["changes"]] == [
        (metric, [1, 3], [3, 5]) for metric in ("reward", "accuracy", "length")
    ]
    length = run["changes"][2]
    assert length["change"] == pytest.approx(2)
    assert sum(one["share"] for one in length["causes"]) == pytest.approx(2, abs=1e-9)
    windows = ["--steps", "4:5", "--against", "1:2", "--out", str(tmp_path / "page.html")]
    assert main(["report", str(run_dir), *windows]) == 0
    (run,) = page_data((tmp_path / "page.html").read_text(encoding="utf-8"))["runs"]
    assert run["changes"][2]["change"] == pytest.approx(3)
    assert main(["report", str(run_dir), *windows[:2]]) == 2


def test_a_run_that_is_being_written(run_dir, tmp_path):
    """Lines that are cut off, bytes that are no UTF-8 and a damaged archive leave the rest."""
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "rollout/rew')
    with (run / "decisions.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "wh')
    samples = sorted((run / "samples").glob("step_*.jsonl"))
    with samples[0].open("ab") as file:
        file.write(samples[1].read_bytes().splitlines()[0].replace(b"What", b"\xff\xfe") + b"\n")
        file.write(b'{"step": 1, "problem_id": "cut')
    (run / "samples" / "step_000009.jsonl.gz").write_bytes(b"\x1f\x8b\x08 not an archive")
    assert main(["report", str(run)]) == 0
    (data,) = page_data((run / "report.html").read_text(encoding="utf-8"))["runs"]
    assert data["answers"][2][2] == f"ended or interrupted at step {STEPS} of {STEPS}"
    assert data["steps"] == [0, 1, 2, 3, 4]
    assert data["kinds"]["step"]["samples"][0] == 10
    assert any("\ufffd\ufffd" in str(prompt) for prompt in data["prompts"])
    damaged = [note for note in data["notes"] if "damaged" in note]
    assert [note.split(":")[0] for note in damaged] == [
        "samples/step_000001.jsonl",
        "samples/step_000009.jsonl.gz",
    ]


def test_a_folder_without_a_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "not a folder" in capsys.readouterr().err


def test_report_is_refreshed_during_the_run(make_run, tmp_path, monkeypatch):
    """This process holds the folder, as a run's does; between two pages the run ends."""
    from rlmath.utils.run_lock import only_run_in

    run = make_run(tmp_path / "run", steps=2)
    pages = []

    def wait(seconds):
        pages.append((seconds, (run / "report.html").read_text(encoding="utf-8")))
        make_run(run)

    monkeypatch.setattr("rlmath.commands.report.cli.time.sleep", wait)
    with only_run_in(run):
        assert main(["report", str(run), "--every", "30"]) == 0
    ((seconds, first),) = pages
    assert seconds == 30 and '<meta http-equiv="refresh" content="30">' in first
    assert page_data(first)["runs"][0]["answers"][2][2] == f"running: step 2 of {STEPS}"
    last = (run / "report.html").read_text(encoding="utf-8")
    assert 'http-equiv="refresh"' not in last
    assert page_data(last)["runs"][0]["answers"][2][2] == f"finished: {STEPS} steps"


def test_traces_of_profiled_steps_are_linked_from_where_the_page_is(make_run, tmp_path):
    folder = make_run(tmp_path / "run")

    def count_links():
        assert main(["report", str(folder)]) == 0
        page = (folder / "report.html").read_text(encoding="utf-8")
        return len(page_data(page)["runs"][0]["traces"])

    assert count_links() == 0
    step = folder / "profile" / "step_000005"
    step.mkdir(parents=True)
    for name in ("rank_0.json.gz", ".rank_1.json.gz", "engine_0 #1.json.gz"):
        (step / name).touch()
    found = traces_of(folder, tmp_path / "pages")
    assert [name for name, _ in found] == [
        "step_000005/engine_0 #1.json.gz",
        "step_000005/rank_0.json.gz",
    ]
    assert [link for _, link in found] == [
        "../run/profile/step_000005/engine_0%20%231.json.gz",
        "../run/profile/step_000005/rank_0.json.gz",
    ]
    assert count_links() == 2
    for rank in range(MAX_LINKS):
        (step / f"rank_{rank}.json.gz").touch()
    assert traces_of(folder, folder)[-1] == ["and 1 more", "profile"]


def test_a_small_page_has_the_same_problems_in_every_step(run_dir):
    run = RunFolder(run_dir)
    everything = read_samples_of(run, 10**9)
    assert not any(everything.left_out.values())
    some = read_samples_of(run, 15_000)
    of_step = [
        {row["problem_id"] for row in some.chosen if row["kind"] == "step" and row["step"] == step}
        for step in (1, 3)
    ]
    assert "train.jsonl:1" in of_step[0] & of_step[1]
    assert 0 < some.left_out["step"] < 36
    # Each file has at least one, and figures are over all.
    assert {row["step"] for row in some.chosen} == {0, 1, 2, 3, 4}
    assert some.figures == everything.figures and some.grades == everything.grades


def test_a_heat_map_of_many_steps_and_problems():
    steps = range(1, 3 * MAX_COLUMNS + 1)
    grades = {f"p{i}": {step: [1, 2] for step in steps if step % (i + 1) == 0} for i in range(200)}
    heat = heat_map(grades)
    assert len(heat["columns"]) == MAX_COLUMNS and heat["columns"][0] == [1, 3]
    assert len(heat["rows"]) == MAX_PROBLEMS
    assert heat["left_out"] == len(grades) - MAX_PROBLEMS
    assert heat["rows"][0] == {"id": "p0", "cells": [[c, 3, 6] for c in range(MAX_COLUMNS)]}
    assert heat_map({}) == {"columns": [], "rows": [], "left_out": 0}
