"""Results of the checks, as lines for the terminal and as the one file to send."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlmath.commands.selfcheck.record import Outcome
from rlmath.commands.selfcheck.runner import Result
from rlmath.errors import printable


def as_line(result: Result, name_width: int) -> str:
    """Name, status, seconds and key figures of a check; what is wrong and what to do below it."""
    outcome = result.outcome
    keys = ", ".join(figure_text(one) for one in outcome.figures if one["key"])
    head = f"{result.check.name:<{name_width}}  {outcome.status:<14}  {result.seconds:6.1f} s"
    lines = [f"{head}  {keys}".rstrip()]
    indent = " " * (name_width + 2)
    lines += [f"{indent}- {line}" for line in not_applicable_lines(outcome)]
    for one in outcome.problems:
        problem = printable(one["problem"]).splitlines()
        lines.append(f"{indent}! {problem[0]}")
        lines += [f"{indent}  {line}" for line in problem[1:4]]
        lines.append(f"{indent}  To do: {one['advice'] or result.check.advice}")
    return "\n".join(lines)


def not_applicable_lines(outcome: Outcome) -> list[str]:
    """The parts that could not run, those with one reason together."""
    parts: dict[str, list[str]] = {}
    for one in outcome.not_applicable:
        parts.setdefault(one["reason"], []).append(one["part"])
    return [
        f"not applicable: {', '.join(filter(None, names)) or 'all of it'} ({reason})"
        for reason, names in parts.items()
    ]


def figure_text(figure: Mapping[str, Any]) -> str:
    unit = f" {figure['unit']}" if figure["unit"] else ""
    return f"{figure['name']} {_number(figure['value'])}{unit}"


def summary(results: Sequence[Result]) -> str:
    counts = dict.fromkeys(("passed", "failed", "not applicable"), 0)
    for result in results:
        counts[result.outcome.status] += 1
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def as_markdown(about: Mapping[str, Any], results: Sequence[Result]) -> str:
    """Everything, to be read by people, and at the end the same as JSON."""
    lines = ["# rlmath selfcheck", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += _table(
        (result, [figure_text(one) for one in result.outcome.figures if one["key"]])
        for result in results
    )
    for result in results:
        lines += ["", *_section(result)]
    content = {"about": dict(about), "checks": [_as_dict(result) for result in results]}
    lines += ["", "## All of it as JSON", "", "```json", json.dumps(content, indent=1), "```", ""]
    return "\n".join(lines)


def as_gpu_results(about: Mapping[str, Any], results: Sequence[Result]) -> str:
    """A section for ``docs/gpu_results.md``: date, versions, commit, and each check's figures."""
    lines = [f"## `rlmath selfcheck gpu`, {about['date']}", ""]
    lines += [f"- {key}: {value}" for key, value in about.items() if key != "date"]
    return "\n".join([*lines, "", *_table((one, _everything(one.outcome)) for one in results), ""])


def _everything(outcome: Outcome) -> list[str]:
    return [
        *map(figure_text, outcome.figures),
        *not_applicable_lines(outcome),
        *(f"**{printable(one['problem']).splitlines()[0]}**" for one in outcome.problems),
    ]


def _table(rows: Iterable[tuple[Result, list[str]]]) -> Iterator[str]:
    yield from ("| check | result | seconds | figures |", "|---|---|---|---|")
    for result, parts in rows:
        head = f"{result.check.name} | {result.outcome.status} | {result.seconds:.1f}"
        yield f"| {head} | {_cell('; '.join(parts))} |"


def _section(result: Result) -> list[str]:
    outcome = result.outcome
    lines = [
        f"## {result.check.name}: {outcome.status}",
        "",
        f"What it looks at: {result.check.title}.",
        "",
    ]
    for one in outcome.problems:
        lines += [f"**Problem:** {printable(one['problem'])}", ""]
        lines += [f"**To do:** {one['advice'] or result.check.advice}", ""]
    for line in not_applicable_lines(outcome):
        lines += [f"- {line}", ""]
    if outcome.figures:
        lines += ["| figure | value | limit |", "|---|---|---|"]
        for one in outcome.figures:
            value = f"{_number(one['value'])} {one['unit']}".strip()
            lines.append(f"| {_cell(one['name'])} | {_cell(value)} | {_cell(one['limit'])} |")
        lines.append("")
    if outcome.phases_s:
        phases = ", ".join(f"{name} {s:g}" for name, s in outcome.phases_s.items())
        lines += [f"Seconds of its phases: {phases}.", ""]
    for one in outcome.texts:
        lines += [f"{one['title']}:", "", "```", one["content"].rstrip(), "```", ""]
    if result.log_tail:
        lines += ["End of its log:", "", "```", result.log_tail, "```", ""]
    return lines


def _as_dict(result: Result) -> dict[str, Any]:
    outcome = dataclasses.asdict(result.outcome)
    return {
        "name": result.check.name,
        "status": result.outcome.status,
        "seconds": round(result.seconds, 2),
        **outcome,
        "log_tail": result.log_tail,
    }


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    # Values beside 1, such as a mean exp|d|, differ in late digits.
    return f"{value:.7g}" if 0.99 < value < 1.01 else f"{value:,.4g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
