"""`rlmath grade FILE`: the layer and the reason of every verdict on a file of responses."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from rlmath.errors import UserError
from rlmath.grading.grader import MathGrader
from rlmath.grading.result import Grade
from rlmath.grading.settings import REWARD_FALLBACK, TASKS, Fallback
from rlmath.grading.verifiers import VERIFIERS
from rlmath.plugins import PluginError
from rlmath.plugins.loading import use
from rlmath.plugins.source import split

# Description of each layer that can decide, `Grade.method`.
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
    "verifier": "the verifier's decision",
    "number": "the words beside the last number deny or change it",
    "marker": "nothing stands after the marker",
    "tag": "the tag is empty",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="rows of .jsonl or .csv")
    parser.add_argument("--response-key", default="response", help="column of the response")
    parser.add_argument("--gold-key", default="gold", help="column of the accepted answer")
    parser.add_argument("--task", choices=TASKS, default="math")
    parser.add_argument(
        "--fallback",
        choices=[one.value for one in Fallback],
        default=REWARD_FALLBACK.value,
        help="where to look for an answer if there is no box; default: %(default)s, as in training",
    )
    parser.add_argument(
        "--verifier", metavar="NAME", help="compare with this one, such as my_file.py:close_enough"
    )
    parser.add_argument(
        "--verifier-option", action="append", default=[], metavar="KEY=VALUE",
        help="an option of the verifier"
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="write the verdicts to this .jsonl, not to stdout")
    parser.add_argument(
        "--against", choices=("math-verify",), help="list only rows where its verdict differs"
    )


def run(options: argparse.Namespace) -> int:
    """Grade the file; one JSON line per row, then a line of counts on stderr. Raises UserError: the
    file cannot be read, a row lacks a column, the verdicts cannot be written, or math-verify is not
    installed."""
    other = _math_verify() if options.against else None
    verifier = _verifier(options.verifier, options.verifier_option)
    rows = list(read_rows(options.file, options.response_key, options.gold_key))
    counts: Counter[str] = Counter()
    out = _open_out(options.out) if options.out else sys.stdout
    try:
        with MathGrader(fallback=options.fallback, **verifier) as grader:
            grader.check_verifier()
            responses, golds = [row[0] for row in rows], [row[1] for row in rows]
            grades = grader.grade_batch(responses, golds, task=options.task)
            for number, ((response, gold), grade) in enumerate(zip(rows, grades, strict=True), 1):
                counts[grade.status] += 1
                line = _line(number, grade, grader, gold)
                if other is not None:
                    accepted = [gold] if isinstance(gold, str) else gold
                    verdict = any(other(response, one) for one in accepted)
                    if verdict == grade.correct:
                        continue
                    counts["disagreements"] += 1
                    line["math_verify"] = verdict
                out.write(_json_line(line, out.encoding or "utf-8"))
    finally:
        if options.out:
            out.close()
    untabled = sum(grade.untabled for grade in grades)
    if untabled:
        counts["with words in a language that has no table"] = untabled
    summary = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    print(f"{len(rows)} rows with fallback={options.fallback}: {summary}", file=sys.stderr)
    return 0


def _verifier(name: str | None, given: list[str]) -> dict[str, Any]:
    """The grader's settings of a verifier, which is imported first."""
    if name is None:
        if given:
            raise UserError(f"--verifier-option {given[0]}: there is no --verifier")
        return {}
    place, attribute = split(name)
    if attribute:
        try:
            use(place)
        except PluginError as error:
            raise UserError(f"--verifier {name}: {error}") from error
    VERIFIERS.get(name)
    if not given:
        return {"verifier": name}
    from rlmath.config.options import VERIFIER_OPTIONS

    values = {key: value for key, _, value in (one.partition("=") for one in given)}
    return {"verifier": name, "verifier_options": VERIFIER_OPTIONS.options(name, values).plain()}


def _open_out(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written: {error.strerror}") from error


def _json_line(line: dict[str, Any], encoding: str) -> str:
    text = json.dumps(line, ensure_ascii=False) + "\n"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:  # Half of a surrogate pair, or a terminal that is not UTF-8.
        text = json.dumps(line) + "\n"
    return text


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
    """(response, gold) of each row; a gold in JSONL may be a text, a number or a list of these.
    Raises UserError: naming the file, the row and the column."""
    if path.suffix not in (".jsonl", ".csv"):
        raise UserError(f"{path}: rlmath grade reads .jsonl and .csv files")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    for number, row in enumerate(_rows(path, io.StringIO(_text(path), newline="")), 1):
        for key in (response_key, gold_key):
            if key not in row:
                held = ", ".join(map(str, row)) or "nothing"
                raise UserError(
                    f"{path}, row {number}: no column {key!r}; it has {held} "
                    f"(see --response-key and --gold-key)"
                )
            if row[key] is None:  # null, or a short row of a .csv
                raise UserError(f"{path}, row {number}: {key!r} has no value")
        gold = row[gold_key]
        for one in gold if isinstance(gold, list) else [gold]:
            if isinstance(one, bool) or not isinstance(one, str | int | float):
                kind = "null" if one is None else f"a {type(one).__name__}"
                where = "holds" if isinstance(gold, list) else "is"
                raise UserError(
                    f"{path}, row {number}: {gold_key!r} {where} {kind}, which is not an answer"
                )
        plain = [str(one) for one in gold] if isinstance(gold, list) else str(gold)
        yield str(row[response_key]), plain


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")  # Spreadsheets write a byte order mark.
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line} is not UTF-8: {error.reason}; convert it") from error


def _rows(path: Path, file: Iterable[str]) -> Iterable[dict[str, Any]]:
    if path.suffix == ".csv":
        csv.field_size_limit(1 << 30)
        try:
            yield from csv.DictReader(file)
        except csv.Error as error:
            raise UserError(f"{path} is no CSV: {error}") from error
        return
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number} is no JSON: {error.msg}") from error
        except ValueError as error:  # Python reads no more than 4,300 digits.
            raise UserError(
                f"{path}, line {number}: {error}; write such a number as a text, in quotes"
            ) from error
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
        except Exception:  # an answer that it cannot read is not accepted
            return False

    return verdict
