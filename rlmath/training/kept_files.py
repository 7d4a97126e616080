"""Files of the batches that a run keeps; see ``kept_batches``. Read without torch."""

from __future__ import annotations

from pathlib import Path

FOLDER = "replay"


def kept_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.bin"


def kept_files(folder: Path) -> dict[int, Path]:
    found = {path.stem.rpartition("_")[2]: path for path in folder.glob("step_*.bin")}
    return {int(step): path for step, path in found.items() if step.isdigit()}
