"""The page in a real browser: it loads nothing, and every control does what it says.

Where no Chromium is installed, test_report_page.py still checks the file's structure.
"""

import json

import pytest

from rlmath.cli import main
from tests.unit.commands.report.browser import CHROMIUM, HELPERS, WITHOUT, open_browser

pytestmark = [pytest.mark.process, pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)]


@pytest.fixture(scope="module")
def browser():
    with open_browser() as one:
        one.call("Page.addScriptToEvaluateOnNewDocument", source=HELPERS)
        yield one


@pytest.fixture(scope="module")
def url(run_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("browser") / "page.html"
    assert main(["report", str(run_dir), "--out", str(out)]) == 0
    return out.as_uri()


def test_report_opens_offline_and_runs_no_sample_code(browser, url):
    browser.open(url)
    opened_ms = browser.run("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert 0 < opened_ms < 2000
    assert browser.run("$$('section').map((one) => one.id)") == [
        *("summary", "curves", "changes", "time", "problems", "distributions", "samples", "about")
    ]
    # Every sample is shown once, as formulas and as it is.
    browser.run("$$('ul.list li').forEach((item) => item.click())")
    browser.run("$('#raw').click()")
    browser.run("$$('ul.list li').forEach((item) => item.click())")
    assert browser.run("window.pwned === undefined")
    assert browser.run("$$('script').length") == 2
    assert browser.run("$$('img, iframe, object, main a').length") == 0
    assert browser.problems() == []


def test_the_policy_forbids_requests_and_scripts(browser, url):
    browser.open(url)
    refused = browser.run(
        """new Promise(async (done) => {
          const found = [];
          document.addEventListener("securitypolicyviolation",
            (event) => found.push(event.effectiveDirective) > 2 && done(found));
          const script = document.createElement("script");
          script.textContent = "window.pwned = 9";
          document.body.append(script);
          const image = document.createElement("img");
          image.src = "https://localhost/x.png";
          document.body.append(image);
          fetch("https://localhost/x").catch(() => null);
        })"""
    )
    assert set(refused) == {"script-src-elem", "img-src", "connect-src"}
    assert browser.run("window.pwned === undefined")


def test_samples_are_found(browser, url):
    browser.open(url)
    assert browser.run("count()") == "39 of 39 samples"
    for field, value, found in (
        ("f-text", "RIGHT TO LEFT", 2),
        ("f-kind", "eval", 3),
        ("f-step", "3", 9),
        ("f-problem", "train.jsonl:1", 12),
        ("f-status", "timeout", 4),
        ("f-finish", "length", 4),
        ("f-reward-least", "1", 17),
        ("f-reward-most", "-1", 18),
        ("f-tokens-least", "9", 3),
        ("f-tokens-most", "3", 1),
    ):
        browser.run(f"set('{field}', '{value}')")
        assert browser.run("count()") == f"{found} of 39 samples", field
        browser.run("$('#f-reset').click()")
        assert browser.run("count()") == "39 of 39 samples"
    browser.run("set('f-problem', 'train.jsonl:0'); set('f-step', '2'); set('f-status', 'timeout')")
    text = browser.run("$('.sample').textContent")
    assert "1 of 3 right, mean reward 0, standard deviation 7.0711" in text
    assert "timeout" in text and "SymPy" in text and "truncated at the limit" in text
    # Another sample of the group.
    browser.run("$$('.sample .row button')[0].click()")
    assert "sample 0" in browser.run("$('.sample h3').textContent")
    browser.run("$('#f-reset').click(); set('f-text', 'no such text')")
    assert "No sample fits" in browser.run("$('#sample-detail').textContent")


def test_formulas_and_characters(browser, url):
    browser.open(url)
    browser.run("set('f-text', 'frac{1}{2}')")
    assert browser.run("$$('.sample math mfrac').length") == 1
    assert browser.run("$$('.sample math').length") == 3
    assert browser.run("$$('.sample math [href]').length") == 0
    # A formula that does not close is text.
    assert "$\\frac{1$" in browser.run("$('.sample').textContent")
    browser.run("$('#raw').click()")
    assert browser.run("$$('.sample math').length") == 0
    assert "$\\frac{1}{2}$" in browser.run("$('.sample').textContent")
    browser.run("$('#raw').click(); set('f-text', 'right to left')")
    signs = browser.run("$$('.text .control').map((one) => one.textContent)")
    assert signs == ["U+202E", "U+202C", "U+2028", "U+2029", "U+0000", "U+001B"]
    browser.run("set('f-text', 'xxxxxxxxxx')")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


def test_turns_and_folded_outputs(browser, url):
    browser.open(url)
    browser.run("set('f-text', '<b>two</b>')")
    assert browser.run("count()") == "1 of 39 samples"
    assert "python: ok, 0.25 s" in browser.run("$('.sample .facts').textContent")
    turns = browser.run("$$('.sample .text').map((one) => one.getAttribute('aria-label'))")
    assert turns == ["prompt", "turn 1", "output 1", "turn 2"]
    seen = "$('[aria-label=\"output 1\"]').checkVisibility()"
    assert browser.run("$('.sample summary').textContent") == "output 1, 3 tokens"
    assert not browser.run(seen)
    browser.run("$('.sample summary').click()")
    assert browser.run(seen)
    text = browser.run("$('[aria-label=\"output 1\"]').textContent")
    assert text == "\n```output\n<b>two</b>\n```\n"
    assert browser.run("$$('[aria-label=\"turn 2\"] mfrac').length") == 1
    assert browser.problems() == []


def test_report_token_values(browser, url):
    browser.open(url)
    browser.run("set('f-kind', 'step'); set('f-step', '3')")
    browser.run("$$('ul.list li').find((one) => (one.click(), $('.sample details')))")
    browser.run("$('.sample details').open = true")
    browser.wait_for("$('.sample details .text')")
    # exp(-0.5) is 0.61; the class is a line below the token, too.
    assert browser.run("$$('.tokens > .m0').length") == 6
    assert browser.run("$$('.sample details tr').length") == 7
    assert "-0.5" in browser.run("$('.sample details table').textContent")
    # Each measure marks tokens by lines as well as by color.
    marked = "$$('.tokens > span').map((one) => one.className.replace('at', '').trim())"
    lines = "$$('.tokens > span').map((one) => getComputedStyle(one).textDecorationLine)"
    for measure, classes, decorations in (
        ("advantage", ["d3"] * 5 + [""], ["underline"] * 5 + ["none"]),
        ("difference", ["", *["u2"] * 3, "u3", "u3"], ["none"] + ["overline"] * 5),
        ("entropy", ["", "m1", "m1", "m2", "m2", "m2"], ["none"] + ["underline"] * 5),
        ("use", ["clip", "left", "", "", "", "out"], None),
        ("pull", ["", "d1", "d2", "d2", "d3", "d3"], ["none"] + ["underline"] * 5),
        ("reference", ["u1"] * 2 + ["u2"] * 4, ["overline"] * 6),
    ):
        browser.run(f"choose('.measure', '{measure}')")
        assert browser.run(marked) == classes, measure
        assert decorations is None or browser.run(lines) == decorations
    browser.run("choose('.measure', 'use')")
    assert "clipped" in browser.run("$('.sample details table').textContent")
    assert browser.run("$$('.sample details tr').length") == 4  # Of those not trained on.
    # By keys, with all that is known of a token.
    browser.run("$('.tokens').focus()")
    said = "$('.sample details [role=status]').textContent"
    for key, code, place in (("End", 35, 5), ("ArrowLeft", 37, 4), ("Home", 36, 0)):
        browser.press(key, code)
        assert browser.run(said).startswith(f"token {place}, ")
    for word in (
        "advantage -1.5",
        "actor minus engine 0 nats",
        "clipped: the loss has no gradient",
    ):
        assert word in browser.run(said)
    # The next sample is shown in the same way, here one of two weights versions.
    browser.run("set('f-step', '4')")
    browser.run("$$('ul.list li').find((one) => (one.click(), $('.sample details')))")
    browser.wait_for("$('.tokens')")
    assert browser.run("$('.measure').value") == "use"
    browser.run("choose('.measure', 'version')")
    assert browser.run(marked) == ["control", "m1", "m1", "control", *[""] * 5]
    assert browser.run("$$('.tokens .control').map((one) => one.textContent)") == [
        "version 2", "version 3",
    ]  # fmt: skip
    assert browser.problems() == []


def test_curves(browser, url):
    browser.open(url)
    titles = "$$('#curves figcaption').map((one) => one.firstChild.textContent)"
    assert "rollout/rewards" not in browser.run(titles), "it is beside the summary"
    first = "$$('#summary figcaption').map((one) => one.firstChild.textContent)"
    assert browser.run(first) == ["rollout/rewards", "eval/accuracy"]
    # On the first screen of an ordinary window.
    assert browser.run("$$('#summary figure')[1].getBoundingClientRect().bottom <= 800")
    assert browser.run("!$('#group-memory')")
    signs = "$$('#curves .event-sign').map((one) => one.textContent).join('')"
    assert "!" in browser.run(signs)
    browser.run("$('#events-detector').click()")
    assert "!" not in browser.run(signs)
    browser.run("$('#events-decision').click()")
    assert "d" in browser.run(signs)
    browser.run("set('metric-search', 'LOSS')")
    assert browser.run(titles) == ["train/loss"]
    browser.run("set('metric-search', '')")
    browser.run("$('#group-timing').open = true")
    browser.wait_for("$$('#group-timing figure').length >= 3")
    browser.run("$('#event-list').open = true")
    browser.wait_for("$('#event-list').textContent.includes('<b>low</b>')")
    assert "<i>odd</i>" in browser.run("$('#event-list').textContent")
    # Keys read values, and Enter shows the step's samples.
    browser.run("set('metric-search', 'rollout/rewards')")
    browser.run("$('#curves figure').focus()")
    for key, code, step in (("ArrowLeft", 37, 3), ("Home", 36, 1), ("ArrowRight", 39, 2)):
        browser.press(key, code)
        assert browser.run("$('#curves figure .read').textContent").startswith(f"step {step}: ")
    browser.press("Enter", 13, "\r")
    assert browser.run("$('#f-step').value") == "2"
    assert browser.run("count()") == "9 of 39 samples"


def test_an_axis_of_tokens_or_hours_and_curves_of_one_point(browser, tmp_path, make_run):
    run = make_run(tmp_path / "axes", steps=2)
    rows = [
        {"step": 1, "rollout/rewards": 0.0, "rollout/response_tokens": 1000, "timing/step": 36},
        {"step": 2, "rollout/rewards": 1.0, "rollout/response_tokens": 3000, "timing/step": 72},
        {"step": 3, "rollout/rewards": 2.0, "rollout/response_tokens": 4000, "eval/accuracy": 0.5},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(run), "--out", str(tmp_path / "axes.html")]) == 0
    browser.open((tmp_path / "axes.html").as_uri())
    middle = "Number($$('#summary figure')[0].querySelectorAll('circle')[1].getAttribute('cx'))"
    assert browser.run(middle) == pytest.approx(44 + 308 / 2)
    browser.run("choose('#axis', 'tokens')")
    assert browser.run(middle) == pytest.approx(44 + 308 * 3 / 7, abs=0.1)
    read = "$$('#summary figure')[{}].querySelector('.read').textContent"
    assert browser.run(read.format(0)).startswith("step 3 (8000 sampled tokens): 2")
    browser.run("choose('#axis', 'hours')")
    assert browser.run(middle) == pytest.approx(44 + 308)
    assert "(0.03 hours of steps)" in browser.run(read.format(0))
    assert browser.run("$$('#summary circle.alone').length") == 1
    assert browser.run(read.format(1)).endswith(", the only value")
    assert browser.problems() == []


def test_times_problems_and_distributions(browser, url):
    browser.open(url)
    browser.run("set('time-step-0', '1')")
    assert browser.run("$('output').textContent").startswith("step 1: ")
    assert "generate" in browser.run("$('.waterfall').textContent")
    # The held-out problems were sampled in more steps, on average.
    assert browser.run("$('#heat-0-eval').open")
    browser.run("$('#heat-0-step').open = true")
    browser.wait_for("$('#heat-0-step button[title]')")
    first = "$('#heat-0-step button[title]').textContent"
    assert browser.run(first) == "train.jsonl:0" or browser.run(first) == "train.jsonl:1"
    browser.run("set('order-0-step', 'hardest')")
    assert browser.run(first) == "train.jsonl:1"
    browser.run("set('order-0-step', 'easiest'); $('#heat-0-step button[title]').click()")
    assert browser.run("count()") == "3 of 39 samples"
    browser.run("$('#dist-eval').open = true")
    browser.wait_for("$$('#heat-0-eval tr').length === 2 && $$('#dist-eval figure').length > 4")
    browser.run("$('#settings-0').open = true")
    browser.wait_for("$('#settings-0').textContent.includes('algorithm.group_size')")


def test_report_changes_open_their_samples(browser, url):
    browser.open(url)
    assert "steps 3 to 4 against steps 1 to 2" in browser.run("$('#changes').textContent").lower()
    browser.run("$('#change-0-length').open = true; $('#change-0-accuracy').open = true")
    browser.wait_for("$$('#change-0-length tr').length > 1 && $('#change-0-accuracy h3')")
    browser.run("$('#change-0-length button').click()")
    assert browser.run("$('#f-step').value") in ("3", "4")
    assert browser.run("count()") == "3 of 39 samples"


def test_long_lists_are_shown_in_parts(browser, make_run, tmp_path):
    """More samples than the list has at first, and more problems than the heat map has."""
    run = make_run(tmp_path / "many", steps=2)
    file = run / "samples" / "step_000002.jsonl"
    lines = file.read_text().splitlines()
    more = [
        line.replace("train.jsonl:3", f"train.jsonl:{n}") for n in range(10, 150) for line in lines
    ]
    file.write_text("\n".join([*lines, *(one for one in more if "train.jsonl:1" in one)]) + "\n")
    assert main(["report", str(run), "--out", str(tmp_path / "many.html")]) == 0
    browser.open((tmp_path / "many.html").as_uri())
    found = browser.run("Number(count().split(' ')[0])")
    assert found > 200
    shown = browser.run("$$('ul.list li').length")
    assert shown == 201 and browser.run("$('#more').textContent") == "show 200 more"
    browser.run("$('#more').click()")
    assert browser.run("$$('ul.list li').length") > shown
    browser.run("$('#heat-0-step').open = true")
    browser.wait_for("$('#heat-0-step table')")
    button = "$$('#heat-0-step button').find((one) => one.textContent.startsWith('show '))"
    rows = "$$('#heat-0-step tr').length"
    before = browser.run(rows)
    browser.run(f"{button}.click()")
    assert browser.run(rows) > before
    browser.run(f"{button}.click()")
    assert browser.run(rows) == before


def test_report_works_with_the_keyboard(browser, url):
    """Tab reaches every control, and arrows move in the list."""
    browser.open(url)
    reached = set()
    for _ in range(120):
        browser.press("Tab", 9)
        reached.add(browser.run("document.activeElement.id || document.activeElement.className"))
    fields = browser.run("$$('input, select').filter((one) => one.offsetParent).map((o) => o.id)")
    assert set(fields) <= reached
    assert {"skip", "chart", "list", "raw", "f-reset", "text"} <= reached
    browser.run("$('ul.list').focus()")
    before = browser.run("$('li[aria-selected=true]').id")
    browser.press("ArrowDown", 40)
    after = browser.run("$('li[aria-selected=true]').id")
    assert before != after == browser.run("$('ul.list').getAttribute('aria-activedescendant')")
    browser.press("Home", 36)
    assert browser.run("$('li[aria-selected=true]').id") == before
