"""Per-token values of a few samples of each step: ``samples/step_000012.tokens.bin``.

They go with the step's samples (``runner.samples_keep_gib``). Read without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from rlmath.monitor.files import replacing
from rlmath.utils.array_file import BrokenFile, read_arrays, read_header, write_arrays

_PATTERN = "step_*.tokens.bin"


@dataclass(frozen=True)
class TracedSample:
    key: str  # PROBLEM/INDEX, within the step.
    tokens: int
    version: int  # Weights version that sampled its last token.
    minibatch: int  # From 0.
    discarded: bool  # The minibatch changed no weight.
    weight: float  # Weight of each of its tokens in the minibatch's loss.
    old_is_rollout: bool  # old_log_probs are the rollout log-probs (algorithm.old_log_probs).


def token_file(run_dir: str | Path, step: int) -> Path:
    return Path(run_dir, "samples", f"step_{step:06d}.tokens.bin")


def write_tokens(
    run_dir: str | Path,
    step: int,
    samples: Sequence[tuple[TracedSample, Mapping[str, NDArray[Any]]]],
) -> None:
    """Write a step's file, with each sample's values, ``[tokens]`` by name; nothing without
    samples."""
    if not samples:
        return
    import numpy as np

    names = samples[0][1]
    arrays = {name: np.concatenate([values[name] for _, values in samples]) for name in names}
    header = {"step": step, "samples": [vars(sample) for sample, _ in samples]}
    with replacing(token_file(run_dir, step)) as file:
        write_arrays(file, header, arrays)


def read_traced(run_dir: str | Path) -> Iterator[tuple[int, Sequence[TracedSample]]]:
    """Steps with a file that can be read, and its samples."""
    for path in sorted(Path(run_dir, "samples").glob(_PATTERN)):
        try:
            header = read_header(path)
            yield header["step"], [TracedSample(**one) for one in header["samples"]]
        except (BrokenFile, OSError, KeyError, TypeError):
            continue


def read_tokens(
    run_dir: str | Path, step: int
) -> Iterator[tuple[TracedSample, dict[str, NDArray[Any]]]]:
    """The samples of a step with their values; none if the file is missing or damaged."""
    try:
        header, arrays = read_arrays(token_file(run_dir, step))
        samples = [TracedSample(**one) for one in header["samples"]]
    except (BrokenFile, OSError, KeyError, TypeError):
        return
    start = 0
    for sample in samples:
        end = start + sample.tokens
        yield sample, {name: values[start:end] for name, values in arrays.items()}
        start = end
