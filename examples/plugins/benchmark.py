"""A benchmark: products of one-digit numbers.

rlmath evaluate experiment=quickstart data.eval_paths=[] \\
    'eval.benchmarks=[{name: examples/plugins/benchmark.py:products, max_problems: 20}]'
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlmath.config.benchmarks import BENCHMARKS, Published


@BENCHMARKS.register("products", traits=Published(samples=4, max_response_tokens=64))
def products() -> Iterator[dict[str, Any]]:
    """Rows with the fields ``problem`` and ``answer``, the defaults of ``Published``."""
    for a in range(2, 10):
        for b in range(2, 10):
            yield {"id": f"{a}x{b}", "problem": f"{a}*{b}=", "answer": str(a * b)}
