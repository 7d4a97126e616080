"""``code``: the share of tests that the response's program passes.

Open-R1's form. The column ``verification_info`` holds in each row

    {"language": "python", "test_cases": [{"input": ..., "output": ..., "type": "stdin_stdout"}]}

or the same as JSON. A test passes if the program exits with code 0 and its whole output is right.
Corrected: Open-R1 compared only as many lines as the shorter output had, so a prefix passed; here
all lines count. A provider failure gives ``None`` instead of 0, and so does a row without tests, or
with tests of a type other than ``stdin_stdout``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.rewards.base import Value, Values, column
from rlmath.rewards.program_tests import CodeReward, as_record, as_text, extract_code, same_output
from rlmath.rewards.sandbox import Program


class Code(CodeReward):
    """Share of passed tests, 0.0 to 1.0; 0.0 without a program."""

    __name__ = "code_reward"
    value_range = (0.0, 1.0)
    stop_at_first_failure = False

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        infos = column(self.__name__, columns, "verification_info", len(completions))
        records = [None if i is None else as_record(i) for i in infos]

        def judge(index: int, text: str) -> Value:
            record = records[index]
            return None if record is None else self._share(text, record)

        return self.judge_all(completions, judge)

    def _share(self, text: str, info: Mapping[str, Any]) -> Value:
        tests = info.get("test_cases") or []
        if not tests or any(t.get("type", "stdin_stdout") != "stdin_stdout" for t in tests):
            return None
        language = str(info.get("language") or "python")
        source = extract_code(text, language)
        if source is None:
            return 0.0
        passed = 0
        with self.prepare(Program(language, source), self.limits) as program:
            if program.compile_error is not None:
                return 0.0
            for test in tests:
                result = program.run(as_text(test.get("input")))
                if program.compile_error is not None:  # known only now with a remote compiler
                    return 0.0
                if result.status == "ok" and same_output(
                    result.stdout, as_text(test.get("output"))
                ):
                    passed += 1
                elif self.stop_at_first_failure:
                    break
        return passed / len(tests)
