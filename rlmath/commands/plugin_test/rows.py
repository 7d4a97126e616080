"""Invariants of plug-ins that give rows (data source, benchmark) or judge answers (verifier,
reward)."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlmath.commands.plugin_test.finding import Finding, findings, repeats
from rlmath.config.benchmarks import BENCHMARKS
from rlmath.config.data_sources import DATA_SOURCES, DataSource
from rlmath.data.answers import accepted_answers
from rlmath.data.fields import field_of, has_field
from rlmath.data.source_stream import row_of
from rlmath.grading.verifiers import VERIFIERS
from rlmath.rewards.made_sample import made_sample
from rlmath.rewards.mix import RewardMix
from rlmath.types import Problem

# Rows of a source that are compared, and after which of them it is resumed.
ROWS, PLACES = 40, (0, 1, 7, 39)
GOLDS = ("42", "1/2", "x+1")
TEXTS = ("The answer is \\boxed{4}.", "4", "I do not know.", "", "The answer is \\boxed{5}.")


def check_data_source(name: str) -> Iterator[Finding]:
    """Test the invariants of the data source called ``name``, with its default options."""
    part = _Source(name)
    return findings(
        {
            "rows are mappings of values that JSON has": part.rows_are_plain,
            "a finite source begins again": part.begins_again,
            "resumes at the same row": part.resumes,
            "deterministic": repeats(lambda: part.rows(part.make(), ROWS)),
        }
    )


@dataclass(frozen=True)
class _Source:
    name: str

    def make(self) -> DataSource:
        return DATA_SOURCES.get(self.name)(DATA_SOURCES.options(self.name)())

    def rows(self, source: DataSource, count: int) -> list[Any]:
        """The next rows, over ends of epochs."""
        found: list[Any] = []
        while len(found) < count:
            more = list(itertools.islice(iter(source), count - len(found)))
            if not more:
                break
            found += more
        return found

    def rows_are_plain(self) -> Iterator[str]:
        found = self.rows(self.make(), ROWS)
        for number, fields in enumerate(found, 1):
            row_of(self.name, number, fields)
        if not found:
            yield "it has no rows"

    def begins_again(self) -> Iterator[str]:
        source = self.make()
        given = len(list(itertools.islice(iter(source), ROWS)))
        if 0 < given < ROWS and next(iter(source), None) is None:
            yield f"after its {given} rows, iter() of it gives none"

    def resumes(self) -> Iterator[str]:
        wanted = self.rows(self.make(), 2 * ROWS)
        for place in PLACES:
            first, second = self.make(), self.make()
            rows = iter(first)
            taken = list(itertools.islice(rows, place))
            state = json.loads(json.dumps(first.state_dict()))
            second.load_state_dict(state)
            found = self.rows(second, ROWS)
            for number, (row, other) in enumerate(
                zip(found, wanted[len(taken) :], strict=False), len(taken) + 1
            ):
                if row != other:
                    yield (
                        f"resumed after row {len(taken)}, row {number} is {_short(row)}, not "
                        f"{_short(other)}"
                    )


def _short(row: Any) -> str:
    return str(row)[:80]


def check_benchmark(name: str) -> Iterator[Finding]:
    def rows() -> list[Any]:
        return list(BENCHMARKS.get(name)(BENCHMARKS.options(name)()))

    def fields_are_there() -> Iterator[str]:
        published, found = BENCHMARKS.traits(name), rows()
        if not found:
            yield "it has no rows"
        for number, fields in enumerate(found, 1):
            row_of(name, number, fields)
            for key in (published.prompt_key, published.answer_key):
                if not has_field(fields, key):
                    yield f"row {number} has no field {key!r}"
            accepted_answers(field_of(fields, published.answer_key))

    def places_differ() -> Iterator[str]:
        seen: dict[str, int] = {}
        for number, fields in enumerate(rows(), 1):
            before = seen.setdefault(row_of(name, number, fields).place, number)
            if before != number:
                yield f"rows {before} and {number} have the same id"

    return findings(
        {
            "rows have the problem and its answer": fields_are_there,
            "each row has its own id": places_differ,
            "deterministic": repeats(rows),
        }
    )


def check_verifier(name: str) -> Iterator[Finding]:
    traits, options = VERIFIERS.traits(name), VERIFIERS.options(name)()

    def judge(answer: str, gold: str) -> Any:
        if traits.whole_response and answer:
            answer = f"The answer is \\boxed{{{answer}}}"
        return VERIFIERS.get(name)(answer, gold, options)

    pairs = list(itertools.product((*GOLDS, ""), GOLDS))

    def result() -> Iterator[str]:
        for answer, gold in pairs:
            found = judge(answer, gold)
            if not isinstance(found, bool):
                yield f"of {answer!r} and {gold!r} it is {found!r}"

    def accepts() -> Iterator[str]:
        for gold in GOLDS:
            if not judge(gold, gold):
                yield f"{gold!r} is not accepted where {gold!r} is the answer"

    def refuses() -> Iterator[str]:
        for answer, gold in pairs:
            if answer != gold and judge(answer, gold):
                yield f"{answer!r} is accepted where {gold!r} is the answer"

    return findings(
        {
            "result is true or false": result,
            "the accepted answer is accepted": accepts,
            "other answers are not accepted": refuses,
            "deterministic": repeats(lambda: [judge(*pair) for pair in pairs]),
        }
    )


def check_reward(place: str) -> Iterator[Finding]:
    """Hold the reward of a file or an import path to the invariants."""
    part = _Reward(place)
    return findings(
        {
            "a number, or none, for each completion": part.numbers,
            "order of completions makes no difference": part.order,
            "deterministic": repeats(part.run),
        }
    )


@dataclass(frozen=True)
class _Reward:
    place: str

    def run(self, texts: tuple[str, ...] = TEXTS) -> list[float | None]:
        """Value of each response; a call gets its own copy of the row. Raises RewardError: it
        raises, or returns something else than numbers."""
        columns = {"prompt": "2+2=", "solutions": ["4"]}
        problem = Problem("p", "2+2=", (1, 2, 3), ("4",), columns)
        samples = [made_sample("p", index, text.encode(), text) for index, text in enumerate(texts)]
        with RewardMix.from_config([{"name": self.place}]) as mix:
            return [one.reward for one in mix.score_group(problem, samples)]

    def numbers(self) -> Iterator[str]:
        for text, value in zip(TEXTS, self.run(), strict=True):
            if value is not None and not math.isfinite(value):
                yield f"of {text!r} it is {value}"

    def order(self) -> Iterator[str]:
        for text, one, other in zip(TEXTS, self.run(), self.run(TEXTS[::-1])[::-1], strict=True):
            if one != other:
                yield f"of {text!r} it is {one}, and {other} in another order"
