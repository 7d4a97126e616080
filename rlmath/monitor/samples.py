"""Every sample of a step as a file, and some of them as text for TensorBoard."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmath.monitor.files import replacing, to_json
from rlmath.monitor.json_lines import LinesProcess, ProcessDied, write_lines
from rlmath.types import ONE_TURN, GradedSample, Group, Problem, Sample

FOLDER = "samples"
# Long-response runs make hundreds of MB a step, of which gzip leaves a quarter.
COMPRESS_ABOVE_CHARACTERS = 32_000_000
_SHOWN_CHARACTERS = 6000
# A problem that comes twice in a step has a number behind its id; see rollout/sampler.py.
_REPEATED = re.compile(r"#\d+$")


def write_samples(
    run_dir: str | Path,
    step: int,
    groups: Sequence[Group],
    compress_above_characters: int = COMPRESS_ABOVE_CHARACTERS,
    kind: str = "step",
    dropped: Mapping[str, str] | None = None,
    token_samples: int = 0,
    process: LinesProcess | None = None,
) -> Path:
    """Write ``samples/step_000012.jsonl``, one line per sample, atomically, and return the file.

    Args:
        compress_above_characters: With more characters of prompts and responses than this the file
            is ``.jsonl.gz``.
        kind: First part of the file's name: ``step``, or ``eval`` for held-out problems.
        dropped: By problem, why ``algorithm.filter`` dropped its group.
        token_samples: Problems whose first sample has its tokens and their rollout log-probs.
        process: Writes compressed files; ``None``: this one does.
    """
    characters = sum(
        len(group.problem.prompt) + len(graded.sample.text)
        for group in groups
        for graded in group.samples
    )
    name = f"{kind}_{step:06d}.jsonl"
    plain, compressed = Path(run_dir, FOLDER, name), Path(run_dir, FOLDER, f"{name}.gz")
    path, other = plain, compressed
    if characters > compress_above_characters:
        path, other = compressed, plain
    batches = _rows(step, groups, dropped or {}, token_samples)
    if process is None or path is plain:
        write_lines(path, (row for rows in batches for row in rows))
    else:
        try:
            process.write(path, batches)
        except ProcessDied as error:
            print(f"warning: {error}; {path} is written here", file=sys.stderr, flush=True)
            return write_samples(
                run_dir, step, groups, compress_above_characters, kind, dropped, token_samples
            )
    other.unlink(missing_ok=True)
    return path


def data_id(problem_id: str) -> str:
    """The id in the data of a problem that may have come several times in a step."""
    return _REPEATED.sub("", problem_id)


def priority(problem_id: str) -> bytes:
    """A problem's place when only some are kept or shown: the same in every step and run."""
    return hashlib.blake2b(data_id(problem_id).encode("utf-8", "replace"), digest_size=8).digest()


def write_engines(run_dir: str | Path, step: int, engines: Mapping[str, object]) -> Path:
    """Write ``samples/step_000012.engines.json``: each engine's work for the step's samples."""
    path = Path(run_dir, FOLDER, f"step_{step:06d}.engines.json")
    with replacing(path) as file:
        file.write(f"{to_json({'step': step, **engines})}\n".encode())
    return path


def limit_samples(run_dir: str | Path, keep_gib: float) -> None:
    """Remove the oldest steps' files while the total is above the limit; never those of the
    newest step with samples, or of later ones.

    Evaluation's samples are kept.
    """
    steps: dict[int, list[Path]] = {}
    for path in Path(run_dir, FOLDER).glob("step_*"):
        number = path.name.partition(".")[0].rpartition("_")[2]
        if number.isdigit():
            steps.setdefault(int(number), []).append(path)
    sizes = {step: sum(path.stat().st_size for path in files) for step, files in steps.items()}
    left = sum(sizes.values())
    sampled = [step for step, files in steps.items() if any(".jsonl" in one.name for one in files)]
    newest = max(sampled or steps, default=0)
    for step in sorted(steps):
        if left <= keep_gib * 2**30 or step >= newest:
            return
        for path in steps[step]:
            path.unlink(missing_ok=True)
        left -= sizes[step]


def read_samples(path: str | Path) -> Iterator[dict[str, Any]]:
    path = Path(path)
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for line in lines:
            yield json.loads(line)


def drop_samples_after(run_dir: str | Path, step: int) -> None:
    """Remove the files of later steps: a run that continues after ``step`` makes them again."""
    folder = Path(run_dir, FOLDER)
    for path in (*folder.glob("*_*.json*"), *folder.glob("*_*.tokens.bin")):
        number = path.name.partition(".")[0].rpartition("_")[2]
        if number.isdigit() and int(number) > step:
            path.unlink(missing_ok=True)


def sample_as_text(problem: Problem, graded: GradedSample) -> str:
    """A sample for reading: what it is worth, the prompt, the response; long ones are cut."""
    sample = graded.sample
    worth = "none" if graded.reward is None else f"{graded.reward:g}"
    return "\n".join(
        [
            f"problem {problem.id}, sample {sample.index}",
            f"reward {worth}, {graded.status}, answer {graded.answer!r}, "
            f"accepted {list(problem.answers)}",
            f"{len(sample.token_ids)} tokens, finish reason {sample.finish_reason}, "
            f"weights version {sample.weights_version}",
            "",
            "── prompt",
            cut_text(problem.prompt, _SHOWN_CHARACTERS)[0],
            "── response",
            cut_text(sample.text, _SHOWN_CHARACTERS)[0],
        ]
    )


def _rows(
    step: int, groups: Sequence[Group], dropped: Mapping[str, str], token_samples: int
) -> Iterator[list[dict[str, Any]]]:
    ids = sorted((group.problem.id for group in groups), key=priority)
    by_token = set(ids[:token_samples])
    for group in groups:
        id_ = group.problem.id
        yield [
            _row(step, group.problem, graded, dropped.get(id_))
            | (_tokens(graded) if place == 0 and id_ in by_token else {})
            for place, graded in enumerate(group.samples)
        ]


def _row(step: int, problem: Problem, graded: GradedSample, dropped: str | None) -> dict[str, Any]:
    sample = graded.sample
    return {
        "step": step,
        "problem_id": problem.id,
        "index": sample.index,
        "prompt": problem.prompt,
        "response": sample.text,
        "answer": graded.answer,
        "accepted": list(problem.answers),
        "status": graded.status,
        "method": graded.method,
        "correct": graded.correct,
        "reward": graded.reward,
        "rewards": dict(graded.rewards),
        "dropped": dropped,
        "finish_reason": sample.finish_reason,
        "prompt_tokens": len(problem.prompt_token_ids),
        "response_tokens": len(sample.token_ids),
        **_turns(sample),
        "weights_version": sample.weights_version,
        "spans": [list(span) for span in sample.spans],
        "engine": sample.engine,
        "seed": sample.seed,
    }


def _turns(sample: Sample) -> dict[str, Any]:
    """Who wrote which tokens, the calls and the failure; nothing of a single turn without calls."""
    if sample.segments == ONE_TURN and not sample.calls and sample.failure is None:
        return {}
    found: dict[str, Any] = {
        "model_tokens": sample.model_tokens,
        "segments": [
            [kind, end - start, text]
            for (kind, start, end), text in zip(
                sample.pieces(), sample.texts or (sample.text,), strict=True
            )
        ],
        "calls": [list(one) for one in sample.calls],
    }
    return found if sample.failure is None else found | {"failure": sample.failure}


def _tokens(graded: GradedSample) -> dict[str, Any]:
    sample = graded.sample
    return {
        "token_ids": sample.token_ids.tolist(),
        "log_probs": [round(one, 4) for one in sample.log_probs.tolist()],
    }


def cut_text(text: str, most: int) -> tuple[str, int]:
    """``text`` without its middle if it is longer than ``most``, and the characters left out."""
    cut = len(text) - most
    if cut <= 0:
        return text, 0
    half = most // 2
    return f"{text[:half]}\n[… {cut} characters left out …]\n{text[-half:]}", cut
