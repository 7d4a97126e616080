"""``ioi_code``: problems of the International Olympiad in Informatics, one subtask per row.

Open-R1's form, for data like open-r1/ioi: with s_t in [0, 1] the score of test t,

    R = min over t of s_t, rounded to ``score_precision`` digits

and 0 without a program. Tests stop at the first with score 0, which settles the minimum.

Columns: ``id``, ``test_names``, ``test_cases`` (a list of (input, output) in that order, or a
mapping by name), ``grader_files`` (a list of (path, content)), ``time_limit`` (seconds),
``memory_limit`` (bytes), ``score_precision``. Every test is one run of the problem's own package:
the submission goes to ``graders/<id>.cpp``, the test to ``input.txt`` and ``correct_output.txt``,
and the package prints the score. With the ``piston`` provider the runtime ``cms_ioi`` does that,
as in Open-R1; with ``local`` the package's own ``compile`` and ``run`` scripts. A problem without
grader files is plain C++ with standard input and output.

Corrected: a provider that fails gives ``None`` (it gave 0, as for a wrong program); a row whose
tests are not in the data gives ``None`` (they were downloaded in the middle of a step).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.rewards.base import Value, Values, column
from rlmath.rewards.program_tests import (
    CodeReward,
    as_text,
    extract_code,
    limits,
    rows_of,
    same_output,
)
from rlmath.rewards.sandbox import Execution, Limits, PreparedProgram, Program, ProviderError
from rlmath.rewards.sandbox.piston import PistonProvider

# Compile errors are told from the score by this exit code; the package's scripts use small ones.
_NO_COMPILE = 91
_RUN_PACKAGE = f"""chmod +x compile run
bash ./compile >&2 || exit {_NO_COMPILE}
exec bash ./run
"""
_INCLUDES = "#include <bits/stdc++.h>\nusing namespace std;\n"
# The package's script keeps the problem's own limit; this much more is the last resort.
_PACKAGE_EXTRA_S = 3
_COMPILE_S = 30
_COMPILE_MIB = 1024


class IOICode(CodeReward):
    """0.0 to 1.0: the least score of the subtask's tests."""

    __name__ = "ioi_code_reward"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        column(self.__name__, columns, "test_cases", len(completions))
        rows = rows_of(columns, len(completions))
        return self.judge_all(completions, lambda i, text: self._score(text, rows[i]))

    def _score(self, text: str, row: Mapping[str, Any]) -> Value:
        tests = _tests(row)
        if not tests:
            return None
        source = extract_code(text, "cpp")
        if source is None:
            return 0.0
        scores = (
            self._packaged(source, tests, row) if _files(row) else self._plain(source, tests, row)
        )
        return round(min(scores), int(row.get("score_precision") or 2))

    def _plain(
        self, source: str, tests: Sequence[tuple[str, str]], row: Mapping[str, Any]
    ) -> list[float]:
        allowed = limits(row.get("time_limit") or self.limits.cpu_s, self._memory_mib(row))
        scores: list[float] = []
        with self.provider.prepare(Program("cpp", with_includes(source)), allowed) as program:
            if program.compile_error is not None:
                return [0.0]
            for given, wanted in tests:
                result = program.run(given)
                right = result.status == "ok" and same_output(result.stdout, wanted)
                scores.append(float(right))
                if not right:
                    break
        return scores

    def _packaged(
        self, source: str, tests: Sequence[tuple[str, str]], row: Mapping[str, Any]
    ) -> list[float]:
        files = {f"graders/{str(row['id']).lower()}.cpp": with_includes(source), **_files(row)}
        run_s = math.ceil(float(row.get("time_limit") or self.limits.cpu_s)) + _PACKAGE_EXTRA_S
        with self._prepare_package(files, run_s, row) as package:
            scores: list[float] = []
            for given, wanted in tests:
                score = _package_score(
                    package.run("", {"input.txt": given, "correct_output.txt": wanted})
                )
                scores.append(score)
                if score == 0.0:
                    break
        return scores

    def _prepare_package(
        self, files: Mapping[str, str], run_s: int, row: Mapping[str, Any]
    ) -> PreparedProgram:
        if isinstance(self.provider, PistonProvider):
            allowed = Limits(cpu_s=run_s, wall_s=float(run_s), memory_mib=self._memory_mib(row))
            return self.provider.prepare_files("cms_ioi", files, allowed)
        allowed = Limits(
            cpu_s=run_s + _COMPILE_S,
            wall_s=3.0 * run_s + _COMPILE_S,
            memory_mib=max(_COMPILE_MIB, self._memory_mib(row)),
        )
        return self.provider.prepare(Program("bash", _RUN_PACKAGE, files=files), allowed)

    def _memory_mib(self, row: Mapping[str, Any]) -> int:
        stated = row.get("memory_limit")
        return max(16, int(stated) // 2**20) if stated else self.limits.memory_mib


def with_includes(source: str) -> str:
    """The source with the standard headers that solutions leave out, as Open-R1 adds them."""
    return source if "#include <bits/stdc++.h>" in source else _INCLUDES + source


def _tests(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    cases = row.get("test_cases") or []
    if isinstance(cases, Mapping):
        names = row.get("test_names") or list(cases)
        cases = [cases[name] for name in names if name in cases]
    pairs = []
    for case in cases:
        given, wanted = (
            (case.get("input"), case.get("output")) if isinstance(case, Mapping) else case
        )
        pairs.append((as_text(given), as_text(wanted)))
    return pairs


def _files(row: Mapping[str, Any]) -> dict[str, str]:
    return {name: content for name, content in row.get("grader_files") or [] if content}


def _package_score(result: Execution) -> float:
    """The score that a problem's package printed.

    Raises:
        ProviderError: The package itself failed.
    """
    if result.exit_code == _NO_COMPILE or result.status in ("timeout", "memory", "output_limit"):
        return 0.0
    words = result.stdout.split()
    try:
        score = float(words[0]) if words else 0.0
    except ValueError as error:
        raise ProviderError(f"the problem's package printed {result.stdout[:80]!r}") from error
    if not math.isfinite(score):
        raise ProviderError(f"the problem's package printed {result.stdout[:80]!r}")
    return min(1.0, max(0.0, score))
