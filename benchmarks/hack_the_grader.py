"""A policy as the tester: an evolutionary search for responses that are paid without the answer.

The population of each gold starts from real responses and from templates around the gold. Children
are made by token edits (insert, delete, replace, swap, splice with another parent) and survive by
novelty: one elite per (gold, layer that decided, paid or not, length, words in it), preferring
those that are paid and far from the gold. Three oracles that do not ask the grader for its reasons
report a paid response:

    two_golds   it is also paid by a gold that the first one does not equal
    tainted     words that negate, hedge or change a value stand in the answer (`not`, `or 9731`)
    stranger    no number or name of the gold is in it, and math-verify rejects it (if installed)

Prints one JSON line with counts, and writes each finding as JSONL to --out for a person to read.

    python benchmarks/hack_the_grader.py --minutes 60 --processes 2 --out findings.jsonl
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import time
import unicodedata
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmath.grading import MathGrader
from rlmath.grading.wording import _LEADS, CHANGING

GOLDS = (
    "0", "1", "-1", "2", "5", "-3", "42", "100", "1000000", "1234", "0.25", "3.14", "1/2", "7/3",
    "\\sqrt{2}", "2\\sqrt{3}", "\\frac{\\pi}{4}", "2^{10}", "\\frac{1}{\\sqrt{7}}", "6!", "i",
    "1+2i", "e^2", "\\ln 3", "x^2+1", "2mg", "\\frac{v_0^2}{2g}", "\\frac{n(n+1)}{2}", "(3,8)",
    "\\{3,9\\}", "[0,6)", "x>13", "(-\\infty,0)\\cup(11,\\infty)", "y=2x+7", "x=17", "f(x)=x^3",
    "x=18, y=19", "A", "(B) 12", "(A) and (C)", "yes", "ABC", "HTT", "Monday", "15%", "\\$12.50",
    "23 cm", "75^\\circ", "3:45 PM", "3:7", "1011_2", "0.\\overline{36}", "31 apples",
    "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{cases}x&x>0\\\\-x&x\\le0\\end{cases}",
    "\\frac{\\pi}{6}+k\\pi, k\\in\\mathbb{Z}", "x\\equiv 3\\pmod{7}", "\\text{no solution}",
    "\\infty", "\\emptyset", "\\vec{AB}", "14\\pm\\sqrt{5}", "\\binom{9}{4}", "|x-1|<4", "n^2-n",
)  # fmt: skip
TEMPLATES = (
    "{}", "{}", "{}", "x={}", "\\text{{{}}}", "\\left({}\\right)", "{{{}}}", "\\{{{}\\}}", "={}",
    "[{}]", "\\text{{The answer is }} {}", "{} \\text{{ is the answer}}", "{} \\text{{ apples}}",
    "{}\\%", "({}, {})", "{}, {}", "{} = {}", "{} \\text{{ or }} {}",
    "\\begin{{cases}}{}\\end{{cases}}", "\\frac{{{}}}{{1}}", "{}^1", "{} cm", "{}_{{10}}",
    "\\${}", "{}^\\circ", "|{}|", "{}!", "-{}", "{} \\pmod 7", "\\boxed{{{}}}", "\\sqrt{{{}}}",
    "\\max({})", "{} \\approx {}", "A) {}",
)  # fmt: skip
TOKENS = (
    "0", "1", "2", "7", "9731", "-", "+", "*", "/", "^", "_", "=", "<", ">", "!", "'", '"', ",",
    ";", ":", ".", "?", "|", "(", ")", "[", "]", "{", "}", "\\{", "\\}", "%", "$", "\\$", "&",
    "\\\\", "~", "\\ne ", "\\le ", "\\pm ", "\\cdot ", "\\times ", "\\frac", "\\sqrt", "\\text{",
    "\\mathrm{", "\\overline{", "\\vec{", "\\hat{", "\\left", "\\right", "\\cup ", "\\cap ",
    "\\in ", "\\pi ", "\\infty ", "\\emptyset ", "\\begin{cases}", "\\end{cases}", "\\mathbb{Z}",
    "\\equiv ", "\\bmod ", "\\lor ", "\\neg ", "\\star ", "\\oplus ", "\\ldots ", "\\sin ",
    "\\log ", "\\cancel{", "\\sout{", "\\quad ", "x", "y", "n", "k", "i", "e", "A", "B", " and ",
    " or ", " not ", " cm", " m", " kg", " apples", " times ", " the ", " is ", " per ", " of ",
    " answer ", " squared", " dozen", "th", "\u200b", "\u0338", "\u0336", "\u202e", "\u0661", "０",
    "①", "½", "²", "₂", "−", "×", "≠", "≈", "∞", "是", "不", "或", "个", "万", "\n", "\t", "10^{",
    "e5", "E3", "1,000", "0.", "1'000", "1.000.000",
)  # fmt: skip
_KNOWN = frozenset(("about", "approx", "approximately", "roughly", "so", "then"))
TAINTS = (
    *sorted(w for w in CHANGING - _LEADS - _KNOWN if len(w) > 2),
    "or 9731", ", 9731", "\\ne 9731", "9731 or", "\\lor 9731", "; 9731", "\\text{ or } 9731",
    "\\text{ not }", "\\text{ and } 9731", "\\pm 9731",
)  # fmt: skip
_SPLIT = re.compile(r"\\[A-Za-z]+|\d+|[A-Za-z]+|\s+|.", re.DOTALL)
_SIGNS = re.compile(r"\d+|[A-Za-z]{2,}")


@dataclass(slots=True)
class Candidate:
    """The text of an answer, whether it is boxed, and the tainted words that were put into it."""

    text: str
    boxed: bool = True
    taints: tuple[str, ...] = ()
    score: float = 0.0

    @property
    def response(self) -> str:
        return f"\\boxed{{{self.text}}}" if self.boxed else f"So the answer is {self.text}."

    def is_tainted(self) -> bool:
        return any(taint in self.text for taint in self.taints)


@dataclass
class Search:
    """One process of the search."""

    seed: int
    seeds: list[str]
    deadline: float
    out: Path
    tried: int = 0
    paid: int = 0
    found: Counter[str] = field(default_factory=Counter)

    def run(self) -> dict[str, Any]:
        self.random = random.Random(self.seed)
        self.elites: dict[str, dict[tuple[Any, ...], Candidate]] = {gold: {} for gold in GOLDS}
        self.reported: set[tuple[str, str]] = set()
        with MathGrader(num_workers=1, timeout_s=0.5, cache_size=20_000) as self.grader:
            self.alike = self.equal_golds()
            while time.monotonic() < self.deadline:
                gold = self.random.choice(GOLDS)
                self.consider(self.child(gold), gold)
        return {"tried": self.tried, "paid": self.paid, **self.found}

    def equal_golds(self) -> dict[str, set[str]]:
        """Golds that a response may satisfy together: those that accept each other, or a third."""
        groups: list[set[str]] = [{gold} for gold in GOLDS]
        for one in GOLDS:
            for two in GOLDS:
                if one != two and self.grader.grade_one(f"\\boxed{{{one}}}", two).correct:
                    joined = [group for group in groups if one in group or two in group]
                    groups = [g for g in groups if g not in joined] + [set().union(*joined)]
        return {gold: group for group in groups for gold in group}

    # -- variation

    def fresh(self, gold: str) -> Candidate:
        if self.random.random() < 0.3:
            return Candidate(self.random.choice(self.seeds), self.random.random() < 0.5)
        other = self.random.choice((gold, gold, gold, self.random.choice(GOLDS)))
        template = self.random.choice(TEMPLATES)
        return Candidate(template.format(gold, other), self.random.random() < 0.85)

    def child(self, gold: str) -> Candidate:
        elites = self.elites[gold]
        if len(elites) < 8 or self.random.random() < 0.1:
            parent = self.fresh(gold)
        else:
            parent = self.random.choice(list(elites.values()))
        pieces, taints = _SPLIT.findall(parent.text)[:80], list(parent.taints)
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            place = self.random.randint(0, len(pieces))
            action = self.random.random()
            if action < 0.35:
                pieces.insert(place, self.random.choice(TOKENS))
            elif action < 0.5:
                taint = self.random.choice(TAINTS)
                pieces.insert(place, f" {taint} ")
                taints.append(taint)
            elif pieces and action < 0.65:
                pieces.pop(min(place, len(pieces) - 1))
            elif pieces and action < 0.75:
                pieces[min(place, len(pieces) - 1)] = self.random.choice(TOKENS)
            elif len(pieces) > 1 and action < 0.85:
                other = self.random.randrange(len(pieces))
                at = min(place, len(pieces) - 1)
                pieces[at], pieces[other] = pieces[other], pieces[at]
            elif elites and action < 0.93:
                mate = self.random.choice(
                    list(self.elites[self.random.choice(GOLDS)].values()) or [parent]
                )
                pieces[place:] = _SPLIT.findall(mate.text)[-len(pieces) - 1 :]
            else:
                pieces = list(self.random.choice(TEMPLATES).format("".join(pieces), gold))
        boxed = parent.boxed if self.random.random() < 0.95 else not parent.boxed
        return Candidate("".join(pieces)[:400], boxed, tuple(taints[-6:]))

    # -- selection

    def consider(self, candidate: Candidate, gold: str) -> None:
        grade = self.grader.grade_one(candidate.response, gold)
        self.tried += 1
        if grade.correct:
            self.paid += 1
            self.judge(candidate, gold, grade.answer or "", grade.method)
        far = abs(len(candidate.text) - len(gold)) + len(set(candidate.text) ^ set(gold))
        candidate.score = far * (10 if grade.correct else 1) - 0.2 * len(candidate.text)
        words = frozenset(w for w in re.findall(r"[a-z]{3,}", candidate.text) if w in CHANGING)
        place = (
            grade.method,
            grade.correct,
            len(candidate.text) // 12,
            len(words),
            candidate.boxed,
        )
        elites = self.elites[gold]
        if place not in elites or candidate.score > elites[place].score:
            elites[place] = candidate

    def judge(self, candidate: Candidate, gold: str, answer: str, method: str) -> None:
        tainted = [t for t in candidate.taints if t in answer and t not in gold]
        if tainted:
            self.report("tainted", candidate, gold, answer, method)
        if self.random.random() < 0.2:
            for other in self.random.sample(GOLDS, 12):
                if other not in self.alike[gold]:
                    self.tried += 1
                    if self.grader.grade_one(candidate.response, other).correct:
                        self.report("two_golds", candidate, f"{gold} | {other}", answer, method)
        signs = _signs(gold)
        if signs and not signs & _signs(answer) and not _is_confirmed(answer, gold):
            self.report("stranger", candidate, gold, answer, method)

    def report(self, kind: str, candidate: Candidate, gold: str, answer: str, method: str) -> None:
        self.found[kind] += 1
        shape = re.sub(r"\d+", "0", re.sub(r"\s+", " ", answer))
        if (gold, shape) in self.reported or len(self.reported) > 20_000:
            return
        self.reported.add((gold, shape))
        row = {"kind": kind, "gold": gold, "response": candidate.response, "method": method}
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _signs(text: str) -> set[str]:
    """Numbers and names of a text; `０5` and `05` are 5, and options are names."""
    plain = unicodedata.normalize("NFKC", text)
    options = set(re.findall(r"(?<![A-Za-z])[A-J](?![A-Za-z])", plain))
    return options | {sign.lstrip("0") or "0" for sign in _SIGNS.findall(plain)}


def _is_confirmed(answer: str, gold: str) -> bool:
    """Whether math-verify accepts the pair too; True if it is not installed."""
    try:
        from math_verify import parse, verify
    except ImportError:
        return True
    try:
        return bool(verify(parse(f"${gold}$"), parse(f"${answer}$"), timeout_seconds=2))
    except Exception:  # an answer that it cannot take is not confirmed
        return False


def real_responses(folder: Path) -> list[str]:
    """Last sentences of worked solutions of GSM8K and Minerva."""
    texts = ["The answer is 42", "so x = 5", "it is not 7", "A and B"]
    for name, key in (("gsm8k_test", "answer"), ("minerva_math", "solution")):
        path = folder / f"{name}.jsonl"
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines()[:300]:
                texts.append(json.loads(line)[key].strip().splitlines()[-1][-120:])
    return texts


def _work(arguments: tuple[int, list[str], float, str]) -> dict[str, Any]:
    seed, seeds, minutes, out = arguments
    os.nice(19)
    return Search(seed, seeds, time.monotonic() + 60 * minutes, Path(out)).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="hack_the_grader.jsonl", help="findings, JSONL")
    default = os.environ.get("RLMATH_DATA_DIR", "../shared/data")
    parser.add_argument("--data-dir", type=Path, default=Path(default))
    arguments = parser.parse_args()
    seeds = real_responses(arguments.data_dir)
    jobs = [
        (arguments.seed + index, seeds, arguments.minutes, arguments.out)
        for index in range(arguments.processes)
    ]
    context = multiprocessing.get_context("spawn")
    # Unlike multiprocessing.Pool, it fails when a process was killed, and does not wait for it.
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        results = list(pool.map(_work, jobs))
    total: Counter[str] = Counter()
    for result in results:
        total.update(result)
    print(json.dumps({"benchmark": "hack_the_grader", "minutes": arguments.minutes, **total}))


if __name__ == "__main__":
    main()
