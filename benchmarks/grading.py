"""Grading speed on one core, against math-verify on the same items in the same run.

Each item is a boxed answer and an accepted answer from GSM8K and OlympiadBench: every second one is
the answer itself, the others are the next problem's answer. The cache is off. Prints one JSON line:

    items_per_s, math_verify_items_per_s, ratio    rates over all items, on one core
    median_ms, p99_ms, max_ms                      of a single grade
    agreement                                      share of items with the same verdict

With --cases the tables of tests/unit/grading/cases are graded by both as well: one more line each,
with right verdicts, false positives, the median and the pairs that math-verify did not finish in
20 s.

With --extraction one more line: the search for an answer without a box in responses of 30 kB, its
ratio to one pass of a regular expression (`[0-9]+`) over the same response, the ratio of
math-verify's parse to it, and the longest time that a hostile megabyte holds the caller:

    median_ms, worst_ms, median_passes, worst_passes, math_verify_ratio, megabyte_ms

docs/grading.md says what it should show: ratio at least 20, median below 0.1 ms.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmath.grading import MathGrader
from rlmath.grading.extract import extract

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
        grader.grade_one("\\boxed{\\sin^2 x + \\cos^2 x}", "1")  # the worker process is up
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


_STEP = "The sum of the first 12 terms is $x^2+3x = 40$, so x = 5 or x = -8. We continue with 7.\n"
LONG_RESPONSES = (
    _STEP * 400 + "Therefore there are 42 apples.",
    "word " * 6_000 + "so there are 42 apples",
    "我们计算得到。" * 2_000 + "所以一共有42个苹果。",
    _STEP * 400 + "so $x=42$",
    "word " * 8_000,
    "a." * 20_000 + "42",
    "(" * 40_000,
    "$" * 40_000,
    "1," * 20_000,
    "5 because " * 4_000,
    "nswer" * 8_000,
    "word\n" * 6_000 + "Ответ" + " " * 190 + "1?",
    "word\n" * 6_000 + "la respuesta" + " " * 186 + "1?",
    "$a=1,~~b=2$ " * 2_500 + "so x=42",
    "~~5~~ " * 5_000,
    "~~\\boxed{5}~~ " * 2_300,
    "= 5 " * 7_500,
    "5-" * 15_000,
    "\\(" * 15_000 + "5",
    "It is 6 " * 4_000,
    "5 = 5 in 3 " * 2_800,
    "(5, " * 7_500,
    "<|x|>" * 6_000 + "5",
    "he has 5 apples, she has 6 apples. " * 850,
)


def _fastest(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of several calls: other work on the machine only adds."""
    fastest = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def _time_extraction() -> None:
    """Print what finding an answer without a box costs."""
    from math_verify import parse

    ours, passes, theirs = [], [], []
    digits = re.compile(r"[0-9]+")
    for response in LONG_RESPONSES:
        text = response[-30_000 // (1 if response.isascii() else 3) :]
        ours.append(_fastest(lambda text=text: extract(text, "number"), 100))
        one_pass = _fastest(lambda text=text: sum(1 for _ in digits.finditer(text)), 20)
        passes.append(ours[-1] / one_pass)
        theirs.append(_fastest(lambda text=text: parse(text), 1))
    with MathGrader(num_workers=1, cache_size=0) as grader:
        megabytes = []
        for response in LONG_RESPONSES:
            text = (response * (1_000_000 // len(response) + 1))[:1_000_000]
            for hostile in (text, f"\\boxed{{{text}}}", f"\\boxed{{{text[:31_000]}}}"):
                megabytes.append(_fastest(lambda t=hostile: grader.grade_one(t, "42"), 3))
    result = {
        "benchmark": "grading_extraction",
        "bytes": 30_000,
        "median_ms": round(1e3 * statistics.median(ours), 4),
        "worst_ms": round(1e3 * max(ours), 4),
        "median_passes": round(statistics.median(passes), 3),
        "worst_passes": round(max(passes), 3),
        "math_verify_ratio": round(sum(theirs) / sum(ours), 1),
        "megabyte_ms": round(1e3 * max(megabytes), 2),
    }
    print(json.dumps(result))


def _compare_cases(folder: Path) -> None:
    """Print how many pairs of the case tables each verifier decides as the tables do."""
    rows = [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        if path.stem not in ("extraction", "unboxed", "affirmed", "endings")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    with MathGrader(num_workers=1, cache_size=0) as grader:
        grader.grade_one("\\boxed{\\sin^2 x + \\cos^2 x}", "1")

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
    parser.add_argument("--extraction", action="store_true", help="also long responses, no box")
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
    if arguments.extraction:
        _time_extraction()
    if arguments.cases:
        tables = Path(__file__).resolve().parents[1] / "tests" / "unit" / "grading" / "cases"
        _compare_cases(tables)


if __name__ == "__main__":
    main()
