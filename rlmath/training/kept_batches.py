"""Batches that steps trained on, in the run's folder, for ``rlmath replay``.

``replay/step_000012.bin`` has the sequences of a step with all that its update read: token ids,
rollout log-probs, masks, rewards, and the coefficients of the KL and the entropy. It is written by
a thread while the ranks compute.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlmath.batching.from_groups import SampleRewards
from rlmath.monitor.files import replacing
from rlmath.training.controllers import Coefficients
from rlmath.training.kept_files import kept_file, kept_files
from rlmath.training.rank_settings import threads_per_rank
from rlmath.training.step_batch import StepBatch
from rlmath.types import TrainingBatch
from rlmath.utils.array_file import read_arrays, write_arrays

if TYPE_CHECKING:
    from rlmath.training.opening import RunningRanks

# Names of the arrays that are no field of a TrainingBatch.
_TOTALS, _SEPARATE, _TAKES_PART = "reward_totals", "separate_rewards", "takes_part"


@dataclass(frozen=True)
class KeptStep:
    batch: StepBatch
    kl_coef: float  # KL coefficient of the step's update.
    entropy_coef: float  # The controller's before the step.
    layout: Mapping[str, Any]  # Layout of the ranks that did the step, see described_layout.


class KeptBatches:
    """Keeps the batches of steps.

    Args:
        folder: Made when there is something to write.
        keep_gib: The oldest steps' files are removed when all take more than this; 0: nothing is
            kept.
        last_step: The step that the run continues after; 0: none. Files of later steps go.
    """

    def __init__(self, folder: Path, keep_gib: float, last_step: int = 0) -> None:
        self._folder, self._keep_bytes = folder, keep_gib * 2**30
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replay")
        self._writing: Future[None] | None = None
        self._warned = False
        later = [path for step, path in kept_files(folder).items() if step > last_step]
        # An unfinished file of a killed process has the name that ``replacing`` gave it.
        for path in [*later, *folder.glob(".step_*.bin.*")]:
            path.unlink(missing_ok=True)

    def keep(
        self, step: int, batch: StepBatch, coefficients: Coefficients, run: RunningRanks
    ) -> None:
        """Write a step's batch in the background; waits for that of the step before.
        ``coefficients``: before the step's update. ``run``: the ranks that do it."""
        if not self._keep_bytes:
            return
        self._finish()
        header = {
            "step": step,
            "keys": list(batch.keys),
            "reward_weights": dict(batch.rewards.weights),
            "weights_version": batch.weights_version,
            "kl_coef": coefficients.kl_coef,
            "entropy_coef": coefficients.entropy_coef,
            "layout": described_layout(run),
            "plugin_hashes": dict(run.config.plugin_hashes),
        }
        self._writing = self._thread.submit(self._write, step, header, batch)

    def close(self) -> None:
        """Finish writing, and end the thread."""
        self._finish()
        self._thread.shutdown(wait=True)

    def _finish(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, step: int, header: Mapping[str, Any], batch: StepBatch) -> None:
        path = kept_file(self._folder, step)
        try:
            sequences = batch.sequences.select(range(len(batch)))
            _write_file(path, header, _of_sequences(batch), sequences)
            self._limit(path)
        except OSError as error:
            # The run is worth more than its kept batches.
            self._warn(f"{path}: {error}; rlmath replay cannot redo this step")

    def _limit(self, newest: Path) -> None:
        files = sorted(kept_files(self._folder).items())
        sizes = {path: path.stat().st_size for _, path in files}
        total = sum(sizes.values())
        for _, path in files:
            if total <= self._keep_bytes:
                return
            path.unlink(missing_ok=True)
            total -= sizes[path]
            if path == newest:
                self._warn(
                    f"a step's batch takes {sizes[path] / 2**30:.3g} GiB, more than "
                    f"runner.replay_keep_gib={self._keep_bytes / 2**30:g}: rlmath replay "
                    "cannot repeat this step"
                )

    def _warn(self, message: str) -> None:
        if not self._warned:
            print(f"warning: {message}", file=sys.stderr, flush=True)
        self._warned = True


def read_step(path: Path) -> KeptStep:
    """A step's batch. Raises BrokenFile: it is damaged; OSError: it does not exist, or cannot be
    read."""
    header, arrays = read_arrays(path)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    totals, separate, takes_part = (tensors.pop(name) for name in (_TOTALS, _SEPARATE, _TAKES_PART))
    batch = StepBatch(
        TrainingBatch(**tensors),
        tuple(header["keys"]),
        takes_part,
        SampleRewards(totals, separate, header["reward_weights"]),
        header["weights_version"],
    )
    return KeptStep(batch, header["kl_coef"], header["entropy_coef"], header["layout"])


def described_layout(run: RunningRanks) -> dict[str, Any]:
    """Parts of the layout that the last bits of an update depend on."""
    layout = run.layout
    described = dataclasses.asdict(layout.actor)
    described["pipeline_layers"] = list(layout.actor.pipeline_layers)
    return described | {
        "device": layout.device.value,
        "threads": threads_per_rank(run.config, layout),
    }


def _of_sequences(batch: StepBatch) -> dict[str, Any]:
    tensors = {
        _TOTALS: batch.rewards.totals,
        _SEPARATE: batch.rewards.separate,
        _TAKES_PART: batch.takes_part,
    }
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _write_file(
    path: Path, header: Mapping[str, Any], own: Mapping[str, Any], sequences: TrainingBatch
) -> None:
    tensors = {one.name: getattr(sequences, one.name) for one in dataclasses.fields(sequences)}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}
    with replacing(path) as file:
        write_arrays(file, header, {**own, **arrays})
