import pytest

from rlmath.cli import main
from rlmath.commands.report.compare import MAX_PROBLEMS, compare
from tests.unit.commands.report.browser import CHROMIUM, HELPERS, WITHOUT, open_browser
from tests.unit.commands.report.run_maker import page_data


def test_settings_and_problems():
    first = {"a": 1, "only.first": [1], "runner.run_dir": "x", "same": None}
    second = {"a": 2, "runner.run_dir": "y", "same": None}
    solved, failed = {1: [0, 2], 3: [1, 2]}, {2: [2, 2], 4: [0, 2]}
    grades = (
        {"step": {"p1": solved, "p2": failed, "p3": solved, "p5": solved}, "eval": {}},
        {"step": {"p1": failed, "p2": failed, "p3": solved, "p6": solved}},
    )
    assert compare([first, second], grades) == {
        "settings": [["a", 1, 2], ["only.first", [1], "not a setting there"]],
        "problems": {"step": {"both": 1, "neither": 1, "only": [["p1"], []], "more": [0, 0]}},
    }


def test_lists_are_limited():
    ids = [f"p{i}" for i in range(MAX_PROBLEMS + 5)]
    one, none = ({"step": {id_: {1: [right, 1]} for id_ in ids}} for right in (1, 0))
    found = compare([{}, {}], [none, one])["problems"]["step"]
    assert found["only"] == [[], sorted(ids)[:MAX_PROBLEMS]] and found["more"] == [0, 5]


@pytest.fixture(scope="module")
def page(run_dir, make_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    second = make_run(folder / "second", "actor.optimizer.lr=1e-9", steps=2)
    out = folder / "page.html"
    assert main(["report", str(run_dir), str(second), "--out", str(out)]) == 0
    return out


@pytest.mark.process
def test_report_of_two_has_both_runs(page):
    data = page_data(page.read_text(encoding="utf-8"))
    assert [run["name"] for run in data["runs"]] == ["first", "second"]
    assert [run["steps"][-1] for run in data["runs"]] == [4, 2]
    differing = {key: values for key, *values in data["comparison"]["settings"]}
    assert differing["actor.optimizer.lr"] == [0.0002, 1e-9]
    assert "runner.run_dir" not in differing
    assert data["comparison"]["problems"]["eval"]["only"] == [["eval.jsonl:0"], []]


@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)
def test_side_by_side(page):
    with open_browser() as browser:
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=HELPERS)
        browser.open(page.as_uri())
        assert "actor.optimizer.lr" in browser.run("$('#compare').textContent")
        assert browser.run("$$('#group-main figure')[0].querySelectorAll('polyline').length") == 2
        browser.run("$('#only-eval-0').open = true")
        browser.wait_for("$('#only-eval-0 button')")
        browser.run("$('#only-eval-0 button').click()")
        assert browser.run("count()") == "5 of 59 samples"
        titles = "$$('.sample h3:first-child').map((one) => one.textContent)"
        # The other run has it at the same step, or at the nearest one.
        browser.run("$$('ul.list li')[2].click()")
        assert browser.run(titles) == [
            "first: held-out, step 4, eval.jsonl:0, sample 0",
            "second: held-out, step 2, eval.jsonl:0, sample 0",
        ]
        browser.run("set('f-run', '1')")
        assert browser.run("count()") == "2 of 59 samples"
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.problems() == []
