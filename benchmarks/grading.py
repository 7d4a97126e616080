"""Grading speed on one core, against math-verify on the same items in the same run.

Each item is a boxed answer and an accepted answer from GSM8K and OlympiadBench: every second one is
the answer itself, the others are the next problem's answer. The cache is off. Prints one JSON line:

    items_per_s, math_verify_items_per_s, ratio    rates over all items, on one core
    median_ms, p99_ms, max_ms                      of a single grade
    agreement                                      share of items with the same verdict

With --cases the tables of tests/unit/grading/cases are graded by both as well: one more line each,
with right verdicts, false positives, the median and the pairs that math-verify did not finish in
20 s.

docs/records/grading.md says what it should show: ratio at least 20, median below 0.1 ms.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmath.grading import MathGrader

_CASE_LIMIT_S = 20


def read_items(folder: Path, count: int) -> list[tuple[str, str]]:
    """(response, gold) pairs, `count` from each data set."""
    golds: list[list[str]] = [[], []]
    for line in (folder / "gsm8k_test.jsonl").read_text(encoding="utf-8").splitlines():
        golds[0].append(json.loads(line)["answer"].split("####")[1].strip())
    for line in (folder / "olympiadbench.jsonl").read_text(encoding="utf-8").splitlines():
        golds[1].append(json.loads(line)["final_answer"][0])
    items = []
    for answers in golds:
        for index, gold in enumerate(answers[:count]):
            answer = gold if index % 2 == 0 else answers[(index + 1) % len(answers)]
            items.append((f"So the result is $\\boxed{{{answer.strip('$')}}}$.", gold))
    return items


def time_ours(items: list[tuple[str, str]]) -> tuple[list[bool], list[float]]:
    """Verdicts and seconds per grade, warm, without the cache."""
    with MathGrader(num_workers=1, cache_size=0) as grader:
        grader.grade_one(
            "\\boxed{\\sum_{k=1}^1 \\sin^2 x + \\cos^2 x}", "1"
        )  # the worker process is up
        verdicts, seconds = [], []
        for response, gold in items:
            started = time.perf_counter()
            verdicts.append(grader.grade_one(response, gold).correct)
            seconds.append(time.perf_counter() - started)
    return verdicts, seconds


def time_math_verify(items: list[tuple[str, str]]) -> tuple[list[bool], list[float]]:
    """The same with math-verify, golds in a formula as it wants them."""
    from math_verify import parse, verify

    parse("$1$")
    verdicts, seconds = [], []
    for response, gold in items:
        formula = gold if "$" in gold else f"${gold}$"
        started = time.perf_counter()
        verdicts.append(bool(verify(parse(formula), parse(response))))
        seconds.append(time.perf_counter() - started)
    return verdicts, seconds


def _compare_cases(folder: Path) -> None:
    """Print how many pairs of the case tables each verifier decides as the tables do."""
    rows = [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if '"answer": ' in line  # not a whole response
    ]
    with MathGrader(num_workers=1, cache_size=0) as grader:
        grader.grade_one("\\boxed{\\sum_{k=1}^1 \\sin^2 x + \\cos^2 x}", "1")

        def ours(answer: str, gold: str) -> bool:
            return grader.grade_one(f"\\boxed{{{answer}}}", gold).correct

        _print_cases("rlmath", rows, ours)

    with _MathVerify() as theirs:
        _print_cases("math-verify", rows, theirs)


class _MathVerify:
    """math-verify in a process that can be killed: big powers hold it beyond any signal."""

    def __enter__(self) -> _MathVerify:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve_math_verify, args=(other,), daemon=True)
        self.process.start()
        self.pipe.recv()

    def __call__(self, answer: str, gold: str) -> bool:
        self.pipe.send((answer, gold))
        if self.pipe.poll(_CASE_LIMIT_S):
            return bool(self.pipe.recv())
        self.process.kill()
        self._start()
        raise TimeoutError


def _serve_math_verify(pipe: Any) -> None:
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    parse("$1$")
    pipe.send(True)
    while True:
        answer, gold = pipe.recv()
        formula = gold if "$" in gold else f"${gold}$"
        try:
            pipe.send(bool(verify(parse(formula), parse(f"\\boxed{{{answer}}}"))))
        except Exception:  # what it cannot take it does not accept
            pipe.send(False)


def _print_cases(name: str, rows: list[dict[str, Any]], grade: Callable[[str, str], bool]) -> None:
    right = false_positives = unfinished = 0
    seconds = []
    for row in rows:
        started = time.perf_counter()
        try:
            verdict = grade(row["answer"], row["gold"])
        except TimeoutError:
            verdict, unfinished = False, unfinished + 1
        seconds.append(time.perf_counter() - started)
        right += verdict == row["equal"]
        false_positives += verdict and not row["equal"]
    result = {
        "cases": len(rows),
        "negatives": sum(not row["equal"] for row in rows),
        "verifier": name,
        "agreement": round(right / len(rows), 4),
        "false_positives": false_positives,
        "median_ms": round(1e3 * statistics.median(seconds), 3),
        "unfinished": unfinished,
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("RLMATH_DATA_DIR", "../shared/data")
    parser.add_argument("--data-dir", type=Path, default=Path(default))
    parser.add_argument("--items", type=int, default=400, help="items from each of the two sets")
    parser.add_argument("--cases", action="store_true", help="also the tables of the tests")
    arguments = parser.parse_args()
    if not arguments.data_dir.is_dir():
        sys.exit(f"no folder {arguments.data_dir}: set RLMATH_DATA_DIR or --data-dir")
    items = read_items(arguments.data_dir, arguments.items)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    ours, our_seconds = time_ours(items)
    theirs, their_seconds = time_math_verify(items)
    rate, their_rate = len(items) / sum(our_seconds), len(items) / sum(their_seconds)
    ordered = sorted(our_seconds)
    result = {
        "benchmark": "grading",
        "items": len(items),
        "items_per_s": round(rate, 1),
        "math_verify_items_per_s": round(their_rate, 1),
        "ratio": round(rate / their_rate, 1),
        "median_ms": round(1e3 * statistics.median(ordered), 4),
        "p99_ms": round(1e3 * ordered[int(0.99 * (len(ordered) - 1))], 4),
        "max_ms": round(1e3 * ordered[-1], 3),
        "agreement": round(sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(items), 4),
    }
    print(json.dumps(result))
    if arguments.cases:
        tables = Path(__file__).resolve().parents[1] / "tests" / "unit" / "grading" / "cases"
        _compare_cases(tables)


if __name__ == "__main__":
    main()
