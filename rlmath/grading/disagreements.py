"""A file of sampled disagreements between the fast layers and SymPy, for manual review."""

from __future__ import annotations

import json
import threading
from pathlib import Path

_MAX_LINES = 1_000


class DisagreementFile:
    """Appends up to 1,000 JSON lines. Thread-safe."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.write = 0
        self._lock = threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, answer: str, gold: str, fast: bool, sympy: bool, method: str) -> None:
        """Record one pair on which the layers disagree."""
        line = {"answer": answer, "gold": gold, "fast": fast, "sympy": sympy, "method": method}
        with self._lock:
            if self.write >= _MAX_LINES:
                return
            self.write += 1
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
