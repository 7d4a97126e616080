"""``binary_code``: 1 if the program passes every test, else 0.

Open-R1's ``code`` with a threshold (0.99 of the tests there, all of them here). The tests stop at
the first failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmath.rewards.base import Value
from rlmath.rewards.code import Code


class BinaryCode(Code):
    """1.0 or 0.0; ``None`` where :class:`~rlmath.rewards.code.Code` gives ``None``."""

    __name__ = "binary_code_reward"
    stop_at_first_failure = True

    def _share(self, text: str, info: Mapping[str, Any]) -> Value:
        share = super()._share(text, info)
        return None if share is None else float(share == 1.0)
