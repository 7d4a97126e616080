"""`rlmath grade FILE`: the layer and the reason of every verdict on a file of responses."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rlmath.errors import UserError
from rlmath.grading.grader import MathGrader
from rlmath.grading.result import Grade
from rlmath.grading.settings import TASKS, Fallback, GradingSettings

# Of the layer that decided, `Grade.method`.
REASONS = {
    "exact": "the same text",
    "normalized": "the same tokens without layout",
    "numeric": "exact arithmetic",
    "structure": "its parts were compared",
    "choice": "option letters or their texts",
    "text": "compared as words",
    "family": "compared with its parameters",
    "expression": "evaluated as an expression",
    "sympy": "SymPy",
    "undecided": "SymPy could not tell, or it would cost too much",
    "gold": "the accepted answer cannot be used",
    "none": "no answer was found",
    "box": "the box is empty or never closes",
    "number": "the last number is denied or an aside",
    "marker": "nothing stands after the marker",
    "tag": "the tag is empty",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("file", metavar="FILE", type=Path, help="rows of .jsonl or .csv")
    parser.add_argument("--response-key", default="response", help="column of the response")
    parser.add_argument("--gold-key", default="gold", help="column of the accepted answer")
    parser.add_argument("--task", choices=TASKS, default="math")
    parser.add_argument(
        "--fallback",
        choices=[one.value for one in Fallback],
        default=GradingSettings.fallback.value,
        help="where to look for an answer without a box",
    )
    parser.add_argument("--out", type=Path, help="write the verdicts to this .jsonl, not to stdout")
    parser.add_argument(
        "--against", choices=("math-verify",), help="list only what it decides differently"
    )


def run(options: argparse.Namespace) -> int:
    """Grade the file; one JSON line per row, then a line of counts on stderr.

    Raises:
        UserError: the file cannot be read, a row lacks a column, or math-verify is not installed.
    """
    other = _math_verify() if options.against else None
    rows = list(read_rows(options.file, options.response_key, options.gold_key))
    counts: Counter[str] = Counter()
    out = options.out.open("w", encoding="utf-8") if options.out else sys.stdout
    try:
        with MathGrader(fallback=options.fallback) as grader:
            responses, golds = [row[0] for row in rows], [row[1] for row in rows]
            grades = grader.grade_batch(responses, golds, task=options.task)
            for number, ((response, gold), grade) in enumerate(zip(rows, grades, strict=True), 1):
                counts[grade.status] += 1
                line = _line(number, grade, grader, gold)
                if other is not None:
                    verdict = other(response, gold if isinstance(gold, str) else str(gold[0]))
                    if verdict == grade.correct:
                        continue
                    counts["disagreements"] += 1
                    line["math_verify"] = verdict
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
    finally:
        if options.out:
            out.close()
    summary = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    print(f"{len(rows)} rows: {summary}", file=sys.stderr)
    return 0


def _line(number: int, grade: Grade, grader: MathGrader, gold: Any) -> dict[str, Any]:
    reason = REASONS.get(grade.method, grade.method)
    if grade.status == "bad_gold":
        first = gold if isinstance(gold, str) else (gold[0] if gold else "")
        reason = grader.check_gold(first).problem or reason
    elif grade.status == "timeout":
        reason = "the symbolic check ran out of time"
    return {
        "row": number,
        "correct": grade.correct,
        "status": grade.status,
        "answer": grade.answer,
        "gold": grade.gold,
        "layer": grade.method,
        "reason": reason,
    }


def read_rows(path: Path, response_key: str, gold_key: str) -> Iterable[tuple[str, Any]]:
    """(response, gold) of each row; a gold in JSONL may be a text, a number or a list of texts.

    Raises:
        UserError: naming the file, the row and the column.
    """
    if path.suffix not in (".jsonl", ".csv"):
        raise UserError(f"{path}: rlmath grade reads .jsonl and .csv files")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(_rows(path, file), 1):
            for key in (response_key, gold_key):
                if row.get(key) is None:
                    held = ", ".join(map(str, row)) or "nothing"
                    raise UserError(
                        f"{path}, row {number}: no column {key!r}; it has {held} "
                        f"(see --response-key and --gold-key)"
                    )
            gold = row[gold_key]
            if isinstance(gold, bool) or not isinstance(gold, str | int | float | list):
                kind = type(gold).__name__
                raise UserError(f"{path}, row {number}: {gold_key!r} is a {kind}, not an answer")
            plain = [str(g) for g in gold] if isinstance(gold, list) else str(gold)
            yield str(row[response_key]), plain


def _rows(path: Path, file: Iterable[str]) -> Iterable[dict[str, Any]]:
    if path.suffix == ".csv":
        csv.field_size_limit(1 << 30)
        yield from csv.DictReader(file)
        return
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number} is no JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number} is a {type(row).__name__}, not an object")
        yield row


def _math_verify() -> Callable[[str, str], bool]:
    """math-verify's verdict on (response, gold), as its own users call it."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise UserError(
            "--against math-verify needs math-verify, which rlmath itself does not use; "
            "install it with: pip install 'rlmath[dev]' (or pip install 'math-verify[antlr4_9_3]')"
        ) from error

    def verdict(response: str, gold: str) -> bool:
        formula = gold if "$" in gold or "\\boxed" in gold else f"${gold}$"
        try:
            return bool(verify(parse(formula), parse(response)))
        except Exception:  # what it cannot take it does not accept
            return False

    return verdict
