"""A benchmark: products of two small numbers.

rlmath evaluate experiment=quickstart data.eval_paths=[] 'eval.benchmarks=[{max_problems: 20,
    name: examples/plugins/benchmark.py:products, options: {largest: 5}}]'
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlmath.config.benchmarks import BENCHMARKS, Published
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class ProductOptions(Options):
    largest: int = setting(9, "Largest factor.", least=2)


@BENCHMARKS.register("products", ProductOptions, Published(samples=4, max_response_tokens=64))
def products(options: ProductOptions) -> Iterator[dict[str, Any]]:
    """Rows with the fields ``problem`` and ``answer``, the defaults of ``Published``."""
    for a in range(2, options.largest + 1):
        for b in range(2, options.largest + 1):
            yield {"id": f"{a}x{b}", "problem": f"{a}*{b}=", "answer": str(a * b)}
