"""Cost of keeping the batches of steps (``rlmath replay``): CPU seconds and bytes.

A step of 512 responses of 2,000 tokens, with token ids as frequent as words are (Zipf) and
log-probs as a trained model gives them (most tokens are nearly certain), or with ids that are
uniform and log-probs of all sizes, which compress worst. Prints a JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SAMPLES, GROUP, LENGTH, PROMPT, VOCABULARY = 512, 16, 2000, 150, 151_936
ROUNDS = 5


def main() -> None:
    from rlmath.utils.array_file import read_arrays, write_arrays

    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    for kind in ("text", "random"):
        arrays = step_arrays(kind)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.bin"
            began = time.process_time()
            for _ in range(ROUNDS):
                with path.open("wb") as file:
                    write_arrays(file, {"step": 1}, arrays)
            wrote = time.process_time()
            for _ in range(ROUNDS):
                read_arrays(path)
            read = time.process_time()
            tokens = SAMPLES * LENGTH
            print(
                json.dumps(
                    {
                        "tokens": kind,
                        "bytes_per_response_token": round(path.stat().st_size / tokens, 2),
                        "write_cpu_s_per_million": round(
                            (wrote - began) / ROUNDS / tokens * 1e6, 3
                        ),
                        "read_cpu_s_per_million": round((read - wrote) / ROUNDS / tokens * 1e6, 3),
                    }
                )
            )


def step_arrays(kind: str) -> dict[str, Any]:
    """The arrays of a step as ``rlmath.training.kept_batches`` names them."""
    draw = np.random.default_rng(0)
    responses = SAMPLES * LENGTH
    prompts = np.repeat(
        _tokens(kind, draw, SAMPLES // GROUP * PROMPT).reshape(-1, PROMPT), GROUP, 0
    )
    answers = _tokens(kind, draw, responses).reshape(SAMPLES, LENGTH)
    log_probs = -draw.random(responses) * 20
    if kind == "text":
        log_probs = -(draw.exponential(0.3, responses) ** 2)
    return {
        "tokens": np.concatenate([prompts, answers], axis=1).reshape(-1),
        "engine_log_probs": log_probs.astype(np.float32),
        "loss_mask": np.ones(responses, np.bool_),
        "prompt_lengths": np.full(SAMPLES, PROMPT),
        "response_lengths": np.full(SAMPLES, LENGTH),
        "group_ids": np.arange(SAMPLES) // GROUP,
        "weights_versions": np.zeros(SAMPLES, np.int64),
        "rewards": np.zeros(SAMPLES, np.float32),
    }


def _tokens(kind: str, draw: np.random.Generator, count: int) -> Any:
    if kind == "random":
        return draw.integers(0, VOCABULARY, count, np.int32)
    return np.minimum(draw.zipf(1.2, count) - 1, VOCABULARY - 1).astype(np.int32)


if __name__ == "__main__":
    main()
