"""``ioi_code``: problems of the International Olympiad in Informatics, one subtask per row.

Open-R1's form, for data like open-r1/ioi: with s_t in [0, 1] the score of test t,

    R = min over t of s_t, rounded to ``score_precision`` digits

and 0 without a program. Tests stop at the first with score 0, which decides the minimum.

Columns: ``id``, ``test_names``, ``test_cases`` (a list of (input, output) in that order, or a
mapping by name), ``grader_files`` (a list of (path, content)), ``time_limit`` (seconds),
``memory_limit`` (bytes), ``score_precision``. Each test runs the problem's own package: the
submission is written to ``graders/<id>.cpp``, the test to ``input.txt`` and ``correct_output.txt``,
and the package prints the score. The ``piston`` provider uses the runtime ``cms_ioi``, as Open-R1
does; ``local`` uses the package's ``compile`` and ``run`` scripts. A problem without
``grader_files`` is plain C++ with standard input and output.

Corrected: a provider failure gives ``None`` instead of 0; a row whose tests are not in the data
gives ``None`` instead of downloading them during a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.rewards.base import Value, Values, column, rows_of
from rlmath.rewards.program_tests import CodeReward, as_text, extract_code, limits, same_output
from rlmath.rewards.sandbox import Limits, Program, ProviderError
from rlmath.rewards.sandbox.piston import PistonProvider

# Distinguishes a compile error from a score; the package's scripts use small exit codes.
_NO_COMPILE = 91
_RUN_PACKAGE = f"""chmod +x compile run
bash ./compile >&2 || exit {_NO_COMPILE}
for test in tests/*/; do
    cp "$test/input.txt" "$test/correct_output.txt" .
    bash ./run > score.txt
    score=0
    read -r score < score.txt || true
    echo "$score"
    case "$score" in 0|0.0|0.00) break ;; esac
done
"""
# The package's script enforces the problem's limit; this margin is a fallback.
_PACKAGE_EXTRA_S = 3
_COMPILE_S = 30
_COMPILE_MIB = 1024


class IOICode(CodeReward):
    """Lowest score of the subtask's tests, 0.0 to 1.0."""

    __name__ = "ioi_code_reward"
    value_range = (0.0, 1.0)

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
            self._run_packaged(source, tests, row)
            if _files(row)
            else self._plain(source, tests, row)
        )
        precision = row.get("score_precision")
        return round(min(scores), 2 if precision is None else int(precision))

    def _plain(
        self, source: str, tests: Sequence[tuple[str, str]], row: Mapping[str, Any]
    ) -> list[float]:
        allowed = limits(row.get("time_limit") or self.limits.cpu_s, self._memory_mib(row))
        scores: list[float] = []
        with self.prepare(Program("cpp", with_includes(source)), allowed) as program:
            if program.compile_error is not None:
                return [0.0]
            for given, wanted in tests:
                result = program.run(given)
                right = result.status == "ok" and same_output(result.stdout, wanted)
                scores.append(float(right))
                if not right:
                    break
        return scores

    def _run_packaged(
        self, source: str, tests: Sequence[tuple[str, str]], row: Mapping[str, Any]
    ) -> list[float]:
        name, package = str(row["id"]).lower(), _files(row)
        header = f"{name}.h" if f"graders/{name}.h" in package else None
        files = {f"graders/{name}.cpp": with_includes(source, header), **package}
        run_s = math.ceil(float(row.get("time_limit") or self.limits.cpu_s)) + _PACKAGE_EXTRA_S
        if isinstance(self.provider, PistonProvider):
            return self._on_piston(self.provider, files, tests, run_s, row)
        return self._with_scripts(files, tests, run_s, row)

    def _on_piston(
        self,
        provider: PistonProvider,
        files: Mapping[str, str],
        tests: Sequence[tuple[str, str]],
        run_s: int,
        row: Mapping[str, Any],
    ) -> list[float]:
        """One request per test; the server's runtime compiles and compares."""
        allowed = Limits(cpu_s=run_s, wall_s=float(run_s), memory_mib=self._memory_mib(row))
        scores: list[float] = []
        with self.count_runs(provider.prepare_files("cms_ioi", files, allowed)) as package:
            for given, wanted in tests:
                result = package.run("", {"input.txt": given, "correct_output.txt": wanted})
                ended = result.status in ("timeout", "memory", "output_limit", "disk_limit")
                scores.append(0.0 if ended else _printed_score(result.stdout))
                if scores[-1] == 0.0:
                    break
        return scores

    def _with_scripts(
        self,
        files: Mapping[str, str],
        tests: Sequence[tuple[str, str]],
        run_s: int,
        row: Mapping[str, Any],
    ) -> list[float]:
        """All tests in one sandbox, so the package is compiled once."""
        content = dict(files)
        for number, (given, wanted) in enumerate(tests):
            content[f"tests/{number:05}/input.txt"] = given
            content[f"tests/{number:05}/correct_output.txt"] = wanted
        size_mib = sum(map(len, content.values())) // 2**20
        allowed = Limits(
            cpu_s=run_s + _COMPILE_S,
            wall_s=3.0 * (run_s * len(tests) + _COMPILE_S),
            memory_mib=max(_COMPILE_MIB, self._memory_mib(row)),
            file_size_mib=self.limits.file_size_mib + 2 * size_mib,
        )
        with self.prepare(Program("bash", _RUN_PACKAGE, files=content), allowed) as package:
            result = package.run()
        if result.exit_code == _NO_COMPILE:
            return [0.0]
        scores = [_printed_score(line) for line in result.stdout.splitlines()]
        # A test that was not reached because of a limit counts as failed.
        return scores if len(scores) == len(tests) else [*scores, 0.0]

    def _memory_mib(self, row: Mapping[str, Any]) -> int:
        stated = row.get("memory_limit")
        return max(16, int(stated) // 2**20) if stated else self.limits.memory_mib


def with_includes(source: str, header: str | None = None) -> str:
    """Add the includes that solutions often omit, like Open-R1."""
    lines = []
    if "#include <bits/stdc++.h>" not in source:
        lines.append("#include <bits/stdc++.h>")
    if header is not None and f'#include "{header}"' not in source:
        lines.append(f'#include "{header}"')
    if "using namespace std;" not in source and "std::" not in source:
        lines.append("using namespace std;")
    return "\n".join([*lines, source])


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


def _printed_score(printed: str) -> float:
    """The score printed by a problem's package; 0 if it printed nothing. Raises ProviderError: the
    output is not a score, so the package itself failed."""
    words = printed.split()
    try:
        score = float(words[0]) if words else 0.0
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise ProviderError(f"the problem's package printed {printed[:80]!r}")
    return min(1.0, max(0.0, score))
