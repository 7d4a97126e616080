"""Make training, worked and held-out problems of grade-school word problem sets.

    python toolkits/word_problems.py RAW --to datasets/word_problems

RAW is a folder with any of asdiv.jsonl, svamp.jsonl, mawps.jsonl and gsm8k_test.jsonl, in the
fields in which the sets are published (ASDiv: body, question, answer, formula; SVAMP: Body,
Question, Answer, Equation; MAWPS: input, target; GSM8K: question, answer), of which GSM8K is only
held out.
``experiment=smollm2_word_problems`` reads the result:
``train.jsonl`` (problems and answers), ``worked.jsonl`` (problems with a short solution, for SFT),
and one held-out file per set. What is held out is decided by a hash of the problem's words, so it
does not depend on the order or number of files, and no problem is in two places.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hub_sources import UnusableRowError
from known_texts import words_of
from rlmath.data.files import MalformedRowError, read_rows
from rlmath.errors import UserError
from rlmath.monitor.files import refuse_existing, replacing
from rlmath.utils.command_line import run_command

# A longer decimal is a rounded fraction, which no solution writes in the same way.
_NUMBER = r"-?\d+(?:\.\d{1,4})?"
_OPERATOR = re.compile(r"\s*([-+*/()])\s*")


@dataclass(frozen=True)
class WordProblem:
    """One problem.

    Attributes:
        text: Question of the problem.
        answer: A number.
        worked: A short solution that ends in the boxed answer; ``None``: the set has none.
    """

    text: str
    answer: str
    worked: str | None


def main(argv: Sequence[str]) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("raw", type=Path, metavar="RAW", help="folder with the published files")
    parser.add_argument("--to", type=Path, required=True, help="folder to write to")
    parser.add_argument("--held-out", type=int, default=400, help="problems held out of each set")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    arguments = parser.parse_args(argv)
    found = {name: arguments.raw / f"{name}.jsonl" for name in READERS}
    found = {name: path for name, path in found.items() if path.is_file()}
    if not found:
        raise UserError(f"{arguments.raw} has none of {', '.join(f'{n}.jsonl' for n in READERS)}")
    files = split(
        {name: list(_read(path, READERS[name])) for name, path in found.items()},
        held_out=arguments.held_out,
    )
    paths = {name: arguments.to / f"{name}.jsonl" for name in files}
    refuse_existing("--to", paths.values(), overwrite=arguments.overwrite)
    arguments.to.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        with replacing(paths[name]) as file:
            file.writelines(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
        print(f"{paths[name]}: {len(rows)} rows")
    return 0


def split(
    sets: Mapping[str, Sequence[WordProblem]], *, held_out: int
) -> dict[str, list[dict[str, Any]]]:
    """Rows of each file to write, without a problem in two places.

    A problem that two sets share (MAWPS and SVAMP took some from ASDiv) counts for the first. The
    problems with the lowest hash of a set are held out.

    Args:
        sets: Name of a set to its problems.
        held_out: Problems held out of each set that has no test split.

    Raises:
        UserError: A set has too few problems.
    """
    seen: set[tuple[str, ...]] = set()
    train: list[dict[str, Any]] = []
    worked: list[dict[str, Any]] = []
    files: dict[str, list[dict[str, Any]]] = {}
    for name, problems in sets.items():
        fresh = {}
        for problem in problems:
            key = words_of(problem.text)
            if key not in seen:
                seen.add(key)
                fresh[key] = problem
        ordered = [fresh[key] for key in sorted(fresh, key=_digest)]
        files[name.removesuffix("_test")] = [
            {"prompt": problem.text, "solutions": [problem.answer]}
            for problem in ordered[:held_out]
        ]
        if name.endswith("_test"):
            continue
        if len(ordered) <= held_out:
            raise UserError(
                f"{name}: {len(ordered)} different problems are too few to hold out {held_out}"
            )
        for problem in ordered[held_out:]:
            train.append({"prompt": problem.text, "solutions": [problem.answer], "set": name})
            if problem.worked is not None:
                worked.append({"prompt": problem.text, "response": problem.worked, "set": name})
    return {"train": train, "worked": worked, **files}


def _digest(words: tuple[str, ...]) -> bytes:
    return hashlib.sha256(" ".join(words).encode()).digest()


def _read(path: Path, reader: Callable[[Mapping[str, Any]], WordProblem]) -> Iterator[WordProblem]:
    left_out: Counter[str] = Counter()
    for row in read_rows([path]):
        if isinstance(row.fields, MalformedRowError):
            raise UserError(f"{row.place}: {row.fields}")
        try:
            yield reader(row.fields)
        except UnusableRowError as error:
            left_out[str(error)] += 1
        except KeyError as error:
            raise UserError(
                f"{row.place}: no field {error}; it has {', '.join(row.fields)}"
            ) from error
    print(f"{path}: left out: {dict(left_out) or 'none'}")


def _asdiv(row: Mapping[str, Any]) -> WordProblem:
    """``answer`` is ``9 (apples)``, ``formula`` is ``7+2=9``."""
    answer = _number(str(row["answer"]).split("(")[0])
    left, _, right = str(row["formula"]).partition("=")
    text = f"{row['body'].strip()} {row['question'].strip()}"
    return WordProblem(text, answer, _equation(left, answer) if _same(right, answer) else None)


def _svamp(row: Mapping[str, Any]) -> WordProblem:
    """``Equation`` is ``( 290.0 / 2.0 )``; its outermost parentheses say nothing."""
    answer = _number(row["Answer"])
    left = re.sub(r"(\d)\.0\b", r"\1", str(row["Equation"])).strip()
    if left.startswith("(") and left.endswith(")") and left.count("(") == 1:
        left = left[1:-1]
    body = row["Body"].strip()
    text = f"{body}{'' if body.endswith(('.', ',', '?', '!')) else '.'} {row['Question'].strip()}"
    return WordProblem(text, answer, _equation(left, answer))


def _mawps(row: Mapping[str, Any]) -> WordProblem:
    return WordProblem(str(row["input"]).strip(), _number(row["target"]), None)


def _gsm8k(row: Mapping[str, Any]) -> WordProblem:
    answer = str(row["answer"]).partition("####")[2].replace(",", "")
    return WordProblem(str(row["question"]).strip(), _number(answer), None)


def _equation(left: str, answer: str) -> str | None:
    """``7 + 2 = 9. The answer is \\boxed{9}.``; ``None`` for what is no arithmetic."""
    left = _OPERATOR.sub(r" \1 ", left)
    left = re.sub(r"\s+", " ", left).replace("( ", "(").replace(" )", ")").strip()
    if not re.fullmatch(r"[-+*/() .\d]+", left) or not re.search(r"\d [-+*/] \(?\d", left):
        return None
    return f"{left} = {answer}. The answer is \\boxed{{{answer}}}."


def _number(text: Any) -> str:
    """The number as it is written in an answer: ``43``, ``2.5``.

    Raises:
        UnusableRowError: It is none.
    """
    found = re.fullmatch(_NUMBER, str(text).strip())
    if not found:
        raise UnusableRowError("the answer is no number of at most four decimals")
    return f"{float(found[0]):g}" if float(found[0]) < 1e6 else str(int(float(found[0])))


def _same(text: str, answer: str) -> bool:
    try:
        return _number(text) == answer
    except UnusableRowError:
        return False


READERS: dict[str, Callable[[Mapping[str, Any]], WordProblem]] = {
    "asdiv": _asdiv,
    "svamp": _svamp,
    "mawps": _mawps,
    "gsm8k_test": _gsm8k,
}

if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
