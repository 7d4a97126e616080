"""A data source: sums of two numbers without end, harder from row to row.

rlmath train experiment=quickstart data.train_paths=[] \\
    data.source=examples/plugins/data_source.py:Sums data.source_options.slower=100
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlmath.data import DATA_SOURCES
from rlmath.utils.setting import Options, setting


@dataclass(frozen=True)
class SumsOptions(Options):
    seed: int = setting(0, "Seed of the numbers.", least=0)
    slower: int = setting(1000, "Rows after which numbers may be larger by 1.", least=1)


@DATA_SOURCES.register("sums", SumsOptions)
class Sums:
    def __init__(self, options: SumsOptions) -> None:
        self._options, self._row = options, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            draw = random.Random(f"{self._options.seed}/{self._row}")
            a, b = (draw.randint(0, 4 + self._row // self._options.slower) for _ in range(2))
            self._row += 1  # Before the row is given: the state is that behind it.
            yield {"prompt": f"{a}+{b}=", "solutions": [str(a + b)]}

    def state_dict(self) -> dict[str, Any]:
        return {"row": self._row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._row = state["row"]
