"""Cost of the digests of a step (``rlmath bisect``), in CPU seconds, beside the step itself.

Runs the quickstart's training for fourteen steps on a random model, adds up the CPU seconds of all
its processes from step 2 to step 12, and then repeats what the digests of such a step take: on the
driver, and on one rank that has all sequences and the whole model. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MARK = "RLMATH_BENCHMARK"
FIRST, LAST, STEPS = 2, 12, 14
MINIBATCHES = 2  # Of the quickstart's steps.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        made = [sys.executable, "-m", "rlmath.quickstart.make", str(folder)]
        subprocess.run(made, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        step_s = cpu_seconds_of_a_step(folder)
        run_dir = folder / "run"
        costs = digests_of_a_step(folder / "model", run_dir)
        samples = run_dir / "samples"
        size = (samples / f"step_{LAST:06d}.digests.json").stat().st_size
        print(
            json.dumps(
                {
                    "step_cpu_s": round(step_s, 3),
                    **{name: round(seconds, 5) for name, seconds in costs.items()},
                    "share": round(sum(costs.values()) / step_s, 5),
                    "bytes": size,
                }
            )
        )


def cpu_seconds_of_a_step(folder: Path) -> float:
    """CPU seconds of all processes of the run, as the mean over its steps."""
    mark = str(time.time())
    run_dir = folder / "run"
    command = [
        *(sys.executable, "-m", "rlmath", "train", "experiment=quickstart"),
        *(f"model.path={folder}/model", f"data.train_paths=[{folder}/data/train.jsonl]"),
        *("data.eval_paths=[]", "eval.every=0", f"runner.run_dir={run_dir}"),
        *(f"runner.steps={STEPS}", "runner.check_export_sequences=0"),
    ]
    environment = {**os.environ, MARK: mark}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)

    def at(step: int) -> tuple[int, float]:
        while (done := _steps(run_dir)) < step:
            if process.poll() is not None:
                raise SystemExit(f"the run ended at step {done}")
            time.sleep(0.02)
        return done, _cpu_seconds(mark)

    first, began_s = at(FIRST)
    last, ended_s = at(LAST)
    process.wait()
    return (ended_s - began_s) / (last - first)


def digests_of_a_step(model: Path, run_dir: Path) -> dict[str, float]:
    """CPU seconds of each part."""
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from rlmath.algorithms.filters import TruncatedRule
    from rlmath.batching.from_groups import sampled_sequences
    from rlmath.monitor import read_samples
    from rlmath.monitor.digests import DigestLog, digest_samples, sample_key
    from rlmath.training.digests import digest_sequences
    from rlmath.types import GradedSample, Group, Problem, Sample
    from rlmath.weights.fingerprint import fingerprints
    from rlmath.weights.sequence_fingerprints import SequenceFingerprints

    torch.set_num_threads(1)
    groups: dict[str, list[Any]] = {}
    for row in read_samples(run_dir / "samples" / f"step_{LAST:06d}.jsonl"):
        groups.setdefault(row["problem_id"], []).append(row)

    def grade(row: Any) -> GradedSample:
        count = row["response_tokens"]
        sample = Sample(
            *(row["problem_id"], row["index"], np.arange(count, dtype=np.int32)),
            *(np.ones(count, np.float32), row["response"], row["finish_reason"]),
            *(row["weights_version"], row["seed"], row["engine"]),
        )
        return GradedSample(sample, row["reward"], row["correct"], row["status"])

    made = [
        Group(Problem(id_, "", tuple(range(rows[0]["prompt_tokens"])), ()), tuple(map(grade, rows)))
        for id_, rows in groups.items()
    ]
    sequences = sampled_sequences(made, truncated=TruncatedRule.keep, mask_duplicates=False)
    lengths = sequences.response_lengths
    values = torch.randn(int(lengths.sum()))
    of_ranks = {"old_log_probs": values, "advantages": values}
    places = torch.arange(len(lengths))
    found = SequenceFingerprints.of(places, lengths, of_ranks)
    weights = load_file(next(model.glob("*.safetensors")))
    keys = tuple(sample_key(one) for one in sequences.samples)
    batch: Any = SimpleNamespace(sequences=sequences, keys=keys, takes_part=sequences.takes_part)
    log = DigestLog(run_dir / "again", None)
    (run_dir / "again").mkdir()

    def driver() -> None:
        digest_sequences(log.now, batch, found)
        log.now.add_first(digest_samples(made))
        log.write(1)

    return {
        "driver_s": _cost(driver),
        "sequences_s": _cost(lambda: SequenceFingerprints.of(places, lengths, of_ranks)),
        "weights_s": _cost(lambda: fingerprints(weights.items())),
        # One gradient of the weights' size for each minibatch.
        "gradients_s": MINIBATCHES * _cost(lambda: fingerprints(weights.items())),
    }


def _cost(call: Callable[[], object], times: int = 30) -> float:
    call()
    began_s = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began_s) / times


def _steps(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def _cpu_seconds(mark: str) -> float:
    total = 0.0
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.Error:
            continue
    return total


if __name__ == "__main__":
    main()
