"""``cf_code``: Codeforces problems.

Open-R1's form, for data like open-r1/codeforces. With p the share of passed tests and a = [p = 1],

    pass_fail      R = a
    partial        R = p
    weighted_sum   R = a + 0.1 p

and ``no_submission_reward`` without a program, ``no_compile_reward`` if it does not compile.

Columns: ``official_tests`` (and ``generated_tests``) with ``input`` and ``output``; ``language``
(``cpp`` or ``python``); optionally ``generated_checker`` (a Python program, called with the files
input, correct output and submitted output, that prints 1 for a right one), ``time_limit``
(seconds), ``memory_limit`` (MiB), ``input_mode`` (``stdio``, or ``file`` for input.txt and
output.txt).

Unlike in Open-R1, a provider failure gives ``None`` instead of a failed test, and the checker runs
in its own sandbox that the submission cannot reach. Without a checker the whole output must match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlmath.rewards.base import Range, RewardSettingError, Value, Values, column, rows_of
from rlmath.rewards.program_tests import CodeReward, as_text, extract_code, limits, same_output
from rlmath.rewards.sandbox import Execution, Program, ProviderError

MODES = ("pass_fail", "partial", "weighted_sum")


class CodeforcesCode(CodeReward):
    """Codeforces reward, with the values in this module's docstring.

    Args:
        scoring_mode: ``pass_fail``, ``partial`` or ``weighted_sum``.
        no_compile_reward: Value if the program does not compile.
        no_submission_reward: Value of a response without a program.
        **running: Settings of :class:`~rlmath.rewards.program_tests.CodeReward`.
    """

    __name__ = "cf_code_reward"

    def __init__(
        self,
        scoring_mode: Literal["pass_fail", "partial", "weighted_sum"] = "weighted_sum",
        no_compile_reward: float = -0.1,
        no_submission_reward: float = -1.0,
        **running: Any,
    ) -> None:
        if scoring_mode not in MODES:
            raise RewardSettingError(
                f"cf_code: scoring_mode={scoring_mode!r}; use one of {', '.join(MODES)}"
            )
        super().__init__(**running)
        self.scoring_mode = scoring_mode
        self.no_compile_reward = no_compile_reward
        self.no_submission_reward = no_submission_reward

    @property
    def value_range(self) -> Range:
        best = 1.1 if self.scoring_mode == "weighted_sum" else 1.0
        return min(self.no_submission_reward, self.no_compile_reward, 0.0), best

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        column(self.__name__, columns, "official_tests", len(completions))
        rows = rows_of(columns, len(completions))
        return self.judge_all(completions, lambda i, text: self._score(text, rows[i]))

    def _score(self, text: str, row: Mapping[str, Any]) -> Value:
        tests = [*(row.get("official_tests") or []), *(row.get("generated_tests") or [])]
        if not tests or not row.get("language"):
            return None
        language = str(row["language"])
        source = extract_code(text, language)
        if source is None:
            return self.no_submission_reward
        from_file = row.get("input_mode") == "file"
        program = Program(language, source, collect=("output.txt",) if from_file else ())
        allowed = limits(
            row.get("time_limit") or self.limits.cpu_s,
            row.get("memory_limit") or self.limits.memory_mib,
        )
        passed = 0
        with self.prepare(program, allowed) as prepared:
            if prepared.compile_error is not None:
                return self.no_compile_reward
            for test in tests:
                given, wanted = as_text(test.get("input")), as_text(test.get("output"))
                files = {"input.txt": given} if from_file else {}
                result = prepared.run("" if from_file else given, files)
                if prepared.compile_error is not None:  # known only now with a remote compiler
                    return self.no_compile_reward
                if self._right(result, given, wanted, from_file, row.get("generated_checker")):
                    passed += 1
                elif self.scoring_mode == "pass_fail":
                    break
        everything = float(passed == len(tests))
        if self.scoring_mode == "pass_fail":
            return everything
        share = passed / len(tests)
        return share if self.scoring_mode == "partial" else everything + 0.1 * share

    def _right(
        self, result: Execution, given: str, wanted: str, from_file: bool, checker: str | None
    ) -> bool:
        if result.status != "ok":
            return False
        printed = result.files.get("output.txt", "") if from_file else result.stdout
        if not checker:
            return same_output(printed, wanted)
        names = ("input.txt", "correct_output.txt", "solution_output.txt")
        files = dict(zip(names, (given, wanted, printed), strict=True))
        # The checker comes with the data, so it gets the default limits, not the problem's.
        with self.prepare(Program("python", checker, args=names), self.limits) as judge:
            verdict = judge.run("", files)
        if verdict.status == "timeout":
            raise ProviderError("the problem's checker ran out of time")
        return verdict.status == "ok" and verdict.stdout.strip() in ("1", "1.0")
