"""Rate of a checkpoint's write on one CPU rank, beside ``torch.save`` alone.

Writes the same float32 tensors three ways in turns, each until the disk holds them, and takes the
best of some runs: ``torch.save`` as it is by default, without zip's checksum, and as a rank and the
driver write a checkpoint (``rlmath/checkpoint/writer.py``, with XXH3-128 and the manifest).
``ratio_to_torch_save`` is to be at most 1.1, and so is ``ratio_of_cores``, of the seconds that both
keep cores busy, which a busy disk does not change; ``ratio_without_crc`` says what checksums,
manifest and torch's distributed format cost.

    python benchmarks/checkpoint.py --gib 1 --folder /tmp
    python benchmarks/checkpoint.py --gib 1 --folder /tmp --busy

Prints one JSON line: GiB, seconds of each, ratios, seconds to verify. With ``--busy``: a process
that issues small operators all the time, as a rank launches kernels, writes by a thread of its
interpreter and by a child process. Printed are seconds until each has written, and the
seconds of launches that the process lost meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

from rlmath.checkpoint.child_writer import ChildWriter  # noqa: E402
from rlmath.checkpoint.manifest import verify, write_manifest  # noqa: E402
from rlmath.checkpoint.writer import checkpoint_writer  # noqa: E402

TENSORS = 64
# As a rank of a 7B model has of weights, main parameters and moments.
BUSY_TENSORS = 512
# In which a child has imported torch; a rank copies its tensors meanwhile.
IMPORT_S = 5.0


def seconds(run: Callable[[Path], Any], folder: Path) -> tuple[float, float]:
    """Seconds of a run in an empty folder, and of this process's cores in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    began, cores_began = time.perf_counter(), time.process_time()
    run(folder)
    return time.perf_counter() - began, time.process_time() - cores_began


def measure(gib: float, parent: Path, runs: int) -> dict[str, Any]:
    """The figures of the module's docstring."""
    elements = int(gib * 2**28 / TENSORS)
    state = {str(number): torch.randn(elements) for number in range(TENSORS)}

    def save(folder: Path, crc: bool = True) -> None:
        torch.serialization.set_crc32_options(crc)
        with open(folder / "state.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def save_checkpoint(folder: Path) -> None:
        dcp.save(state, storage_writer=checkpoint_writer(folder / "actor"), no_dist=True)
        write_manifest(folder, 1, {})

    ways = (save, lambda folder: save(folder, crc=False), save_checkpoint)
    with tempfile.TemporaryDirectory(dir=parent) as made:
        folder = Path(made) / "checkpoint"
        # In turns: the machine and its disk are not as fast in every minute.
        taken = [[seconds(way, folder) for way in ways] for _ in range(runs)]
        best = [
            [min(times) for times in zip(*way, strict=True)] for way in zip(*taken, strict=True)
        ]
        (with_zip_s, with_zip_cores_s), (alone_s, _), (checkpoint_s, cores_s) = best
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
        "ratio_of_cores": round(cores_s / with_zip_cores_s, 3),
        "ratio_without_crc": round(checkpoint_s / alone_s, 3),
    }


def launches_until(done: Callable[[], bool]) -> tuple[int, float]:
    """Small operators that this thread issues until ``done``, and the seconds of that."""
    operand, count, began = torch.zeros(16), 0, time.perf_counter()
    while not done():
        for _ in range(50):
            operand.add_(1)
        count += 50
    return count, time.perf_counter() - began


def measure_busy(gib: float, parent: Path, runs: int) -> dict[str, Any]:
    """Seconds to write, and of launches lost, by a thread and by a child process."""
    torch.set_num_threads(1)
    elements = int(gib * 2**28 / BUSY_TENSORS)
    found: dict[str, Any] = {"gib": gib, "tensors": BUSY_TENSORS}
    with tempfile.TemporaryDirectory(dir=parent) as made:
        for name in ("thread", "child"):
            best = (float("inf"), 0.0)
            for run in range(runs):
                sources = [torch.zeros(elements)] * BUSY_TENSORS
                child = ChildWriter(sources)
                copies = [child.memory.empty(one.shape, one.dtype).normal_() for one in sources]
                end = time.perf_counter() + IMPORT_S
                count, took = launches_until(lambda end=end: time.perf_counter() > end)
                rate = count / took
                writer = checkpoint_writer(
                    Path(made) / f"{name}{run}", child if name == "child" else None
                )
                state = {str(number): copy for number, copy in enumerate(copies)}
                thread = threading.Thread(
                    target=dcp.save,
                    args=(state,),
                    kwargs={"storage_writer": writer, "no_dist": True},
                )
                thread.start()
                count, took = launches_until(lambda thread=thread: not thread.is_alive())
                thread.join()
                best = min(best, (took, took - count / rate))
            found[f"{name}_s"], found[f"{name}_lost_s"] = (round(one, 3) for one in best)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="GiB to write")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="where")
    parser.add_argument(
        "--runs", type=int, default=3, help="runs of each, the best of which counts"
    )
    parser.add_argument("--busy", action="store_true", help="thread and child beside launches")
    given = parser.parse_args()
    run = measure_busy if given.busy else measure
    print(json.dumps(run(given.gib, given.folder, given.runs)))


if __name__ == "__main__":
    main()
