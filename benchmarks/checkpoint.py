"""Rate of a checkpoint's write on one CPU rank, beside ``torch.save`` alone.

Writes the same float32 tensors three ways, each until the disk holds them, and takes the best of
some runs: ``torch.save`` as it is by default, without zip's checksum, and as a rank and the driver
write a checkpoint (``rlmath/checkpoint/writer.py``, with XXH3-128 and the manifest). The
ratio of the last to the second says what checksums and manifest cost.

    python benchmarks/checkpoint.py --gib 1 --folder /tmp

Prints one JSON line: GiB, seconds of each, ratios, seconds to verify.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

from rlmath.checkpoint.manifest import verify, write_manifest  # noqa: E402
from rlmath.checkpoint.writer import _writer  # noqa: E402

TENSORS = 64


def best_s(run: Callable[[Path], Any], folder: Path, runs: int) -> float:
    """Seconds of the fastest run, each in an empty folder."""
    taken = []
    for _ in range(runs):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        began = time.perf_counter()
        run(folder)
        taken.append(time.perf_counter() - began)
    return min(taken)


def measure(gib: float, parent: Path, runs: int) -> dict[str, Any]:
    """The figures of the module's docstring."""
    elements = int(gib * 2**28 / TENSORS)
    state = {str(number): torch.randn(elements) for number in range(TENSORS)}

    def save(folder: Path) -> None:
        with open(folder / "state.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def save_checkpoint(folder: Path) -> None:
        dcp.save(state, storage_writer=_writer(folder / "actor"), no_dist=True)
        write_manifest(folder, 1, {})

    with tempfile.TemporaryDirectory(dir=parent) as made:
        folder = Path(made) / "checkpoint"
        with_zip_s = best_s(save, folder, runs)
        torch.serialization.set_crc32_options(False)
        alone_s = best_s(save, folder, runs)
        torch.serialization.set_crc32_options(True)
        checkpoint_s = best_s(save_checkpoint, folder, runs)
        began = time.perf_counter()
        verify(folder)
        verify_s = time.perf_counter() - began
    return {
        "gib": gib,
        "torch_save_s": round(with_zip_s, 3),
        "torch_save_without_crc_s": round(alone_s, 3),
        "checkpoint_s": round(checkpoint_s, 3),
        "verify_s": round(verify_s, 3),
        "ratio_to_torch_save": round(checkpoint_s / with_zip_s, 3),
        "ratio_without_crc": round(checkpoint_s / alone_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="GiB to write")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where")
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each, the best of which counts"
    )
    given = parser.parse_args()
    print(json.dumps(measure(given.gib, given.folder, given.runs)))


if __name__ == "__main__":
    main()
