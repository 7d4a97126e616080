"""Digests of the data of each step, by phase; ``rlmath bisect`` compares those of two runs.

``digests.jsonl`` has a line for each step with one digest for each phase, and
``samples/step_000012.digests.json`` the digests of each problem, sample, sequence, minibatch and
tensor. They go with the step's samples when these are removed (``runner.samples_keep_gib``).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlmath.monitor.files import json_objects, replacing, to_json
from rlmath.types import ONE_TURN, GradedSample, Group, Sample

DIGESTS_FILE = "digests.jsonl"
# Settings of a run's place and start, which do not change its results.
_PLACES = ("runner.run_dir", "runner.resume", "runner.accept_changes")
# Characters of an item in a step's file; a phase's digest is of all of its items' 16 characters.
_ITEM_CHARACTERS = 8


@dataclass(frozen=True)
class Phase:
    """A part of a step with its own digest."""

    name: str
    # Kind of its items: problems, samples (all that were sampled), sequences (those trained on),
    # minibatches, tensors, gradients (tensors that are trained), value_minibatches or value_tensors
    # (of the value model).
    of: str
    words: str


# In the order of a step: each phase depends on the ones before.
PHASES = (
    Phase("start_weights", "tensors", "the weights before the first step"),
    Phase("problems", "problems", "the data order: which problems were drawn"),
    Phase("prompts", "problems", "the prompts, as token ids"),
    Phase("answers", "problems", "the accepted answers"),
    Phase("seeds", "samples", "the seeds of the samples"),
    Phase("tokens", "samples", "the sampled tokens"),
    Phase("rollout_log_probs", "samples", "the rollout log-probs"),
    Phase("rewards", "samples", "the rewards"),
    Phase("groups", "sequences", "which samples are trained on"),
    Phase("old_log_probs", "sequences", "the actor's log-probs before the update"),
    Phase("ref_log_probs", "sequences", "the reference model's log-probs"),
    Phase("teacher_log_probs", "sequences", "the teacher's log-probs"),
    Phase("values", "sequences", "the value model's values"),
    Phase("policy_factors", "sequences", "the factors of the policy term (correction, entropy)"),
    Phase("advantages", "sequences", "the advantages"),
    Phase("value_gradient", "value_minibatches", "the value model's update"),
    Phase("value_weights", "value_tensors", "the value model's weights after it"),
    Phase("gradient", "minibatches", "gradient norm, loss and learning rate of each minibatch"),
    Phase("gradient_tensors", "gradients", "the gradient, by tensor"),
    Phase("weights", "tensors", "the weights after the update"),
)


def digest(*parts: bytes | str) -> str:
    """16 hexadecimal characters of the BLAKE2b digest of the parts, with their lengths."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "big"))
        found.update(data)
    return found.hexdigest()


def of_number(value: int) -> str:
    """The 16 hexadecimal characters of a signed 64-bit number."""
    return f"{value % 2**64:016x}"


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by full key, without those that differ between two folders of the same run."""
    folder = str(settings.get("runner.run_dir") or "\0")
    places = sorted({folder, str(Path(folder).absolute())}, key=len, reverse=True)

    def without_folder(value: Any) -> Any:
        if isinstance(value, str):
            for place in places:
                value = re.sub(rf"{re.escape(place)}(?=/|$)", "${runner.run_dir}", value)
        elif isinstance(value, list | tuple):
            value = [without_folder(one) for one in value]
        elif isinstance(value, Mapping):
            value = {str(key): without_folder(one) for key, one in value.items()}
        return value

    return {key: without_folder(value) for key, value in settings.items() if key not in _PLACES}


@dataclass
class StepDigests:
    # Keys of the items, by kind; see Phase.
    keys: dict[str, list[str]] = field(default_factory=dict)
    # Digest of each item, by phase, in the order of the keys.
    items: dict[str, list[str]] = field(default_factory=dict)
    # Numbers that show how far apart two runs are: by phase, of each item.
    numbers: dict[str, list[Any]] = field(default_factory=dict)
    # Ranks whose weights differ from rank 0's after the update.
    odd_ranks: list[int] = field(default_factory=list)

    def add(
        self,
        phase: str,
        of: str,
        keys: Sequence[str],
        digests: Sequence[str],
        numbers: Sequence[Any] | None = None,
    ) -> None:
        """A phase's digests, one for each key."""
        self.keys[of] = list(keys)
        self.items[phase] = list(digests)
        if numbers is not None:
            self.numbers[phase] = list(numbers)

    def add_first(self, earlier: StepDigests) -> None:
        """Put an earlier part of the step in front."""
        self.keys = {**earlier.keys, **self.keys}
        self.items = {**earlier.items, **self.items}
        self.numbers = {**earlier.numbers, **self.numbers}

    def line(self) -> dict[str, str]:
        return {
            phase: digest(*items, *(map(str, self.odd_ranks) if phase == "weights" else ()))
            for phase, items in self.items.items()
        }

    def details(self) -> dict[str, Any]:
        return {
            "keys": self.keys,
            "items": {
                phase: [one[:_ITEM_CHARACTERS] for one in items]
                for phase, items in self.items.items()
            },
            "numbers": self.numbers,
            "odd_ranks": self.odd_ranks,
        }


def digest_samples(groups: Sequence[Group]) -> StepDigests:
    """Digests of samples and their rewards, in the order of the problems."""
    found = StepDigests()
    problems = [group.problem for group in groups]
    ids = [problem.id for problem in problems]
    prompts = [digest_prompt(problem.prompt_token_ids) for problem in problems]
    found.add("problems", "problems", ids, [digest(id_) for id_ in ids])
    found.add("prompts", "problems", ids, prompts)
    found.add("answers", "problems", ids, [digest(*problem.answers) for problem in problems])
    samples = [one for group in groups for one in group.samples]
    keys = [sample_key(one) for one in samples]
    found.add("seeds", "samples", keys, [digest(str(one.sample.seed)) for one in samples])
    found.add("tokens", "samples", keys, [digest_tokens(one.sample) for one in samples])
    log_probs = [digest_log_probs(one.sample) for one in samples]
    sums = [round(one.sample.log_prob(), 9) for one in samples]
    found.add("rollout_log_probs", "samples", keys, log_probs, sums)
    rewards = [one.reward for one in samples]
    found.add("rewards", "samples", keys, [_rewards(one) for one in samples], rewards)
    return found


def sample_key(graded: GradedSample) -> str:
    """A sample within its step: ``PROBLEM/INDEX``."""
    return f"{graded.sample.problem_id}/{graded.sample.index}"


def digest_prompt(token_ids: Sequence[int]) -> str:
    return digest(",".join(map(str, token_ids)))


def digest_tokens(sample: Sample) -> str:
    """Digest of a sample's tokens, who wrote which of them, and its finish reason."""
    segments = () if sample.segments == ONE_TURN else (repr(sample.segments),)
    tokens = np.asarray(sample.token_ids, np.int32).tobytes()
    return digest(tokens, sample.finish_reason, *segments)


def digest_log_probs(sample: Sample) -> str:
    return digest(np.asarray(sample.log_probs, np.float32).tobytes())


def same_item(found: str, kept: str) -> bool:
    """Whether a digest is the one that a step's file has, which keeps its beginning."""
    return found[:_ITEM_CHARACTERS] == kept


def _rewards(graded: GradedSample) -> str:
    parts = [f"{name}={value!r}" for name, value in graded.rewards.items()]
    return digest(repr(graded.reward), *parts)


class DigestLog:
    """Writes the digests of a run. ``last_step``: the step of the checkpoint that the run continues
    from, after which lines are dropped; ``None``: the run starts over."""

    def __init__(self, run_dir: Path, last_step: int | None) -> None:
        self._run_dir = run_dir
        self._first = last_step or 0
        self._path = run_dir / DIGESTS_FILE
        kept = [] if last_step is None else list(read_digests(run_dir))
        # A resumed run knows the weights before step 1.
        self._has_start = any(line["step"] == self._first for line in kept)
        kept = [line for line in kept if line["step"] <= self._first]
        if self._path.exists():
            with replacing(self._path) as file:
                file.writelines(f"{to_json(line)}\n".encode() for line in kept)
        self._settings = ""
        last = kept[-1] if kept and kept[-1]["step"] == self._first else {}
        self._weights = (self._first, last.get("weights"))
        self.now = StepDigests()

    def settings(self, values: Mapping[str, Any]) -> None:
        """The current settings, by full key."""
        plain = comparable(values)
        self._settings = digest(*(f"{key}={to_json(plain[key])}" for key in sorted(plain)))

    def weights_after(self, step: int) -> str | None:
        """Digest of the weights after a step; ``None``: unknown, or the step trained nothing."""
        of_step, found = self._weights
        return found if of_step == step else None

    @property
    def wants_start(self) -> bool:
        """Whether the weights before the first step are not known yet."""
        return not self._has_start

    def start(self, weights: Mapping[str, int]) -> None:
        """Before the first update: the fingerprint of each tensor."""
        found = StepDigests()
        digests = [of_number(value) for value in weights.values()]
        found.add("start_weights", "tensors", list(weights), digests)
        self._write(self._first, found)
        self._has_start = True

    def write(self, step: int) -> None:
        """End a step: its line, and its file with the items."""
        found, self.now = self.now, StepDigests()
        if found.items:
            self._write(step, found)

    def _write(self, step: int, found: StepDigests) -> None:
        with replacing(details_path(self._run_dir, step)) as file:
            file.write(f"{to_json({'step': step, **found.details()})}\n".encode())
        line = {"step": step, "settings": self._settings, **found.line()}
        self._weights = (step, line.get("weights"))
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(f"{to_json(line)}\n")


def details_path(run_dir: Path, step: int) -> Path:
    return run_dir / "samples" / f"step_{step:06d}.digests.json"


def read_digests(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a run's ``digests.jsonl``; damaged ones are left out."""
    lines = json_objects(Path(run_dir, DIGESTS_FILE))
    return (line for line in lines if isinstance(line.get("step"), int))


def read_details(run_dir: str | Path, step: int) -> dict[str, Any] | None:
    """The digests of a step's items; ``None``: missing or damaged."""
    try:
        found = json.loads(details_path(Path(run_dir), step).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "items" in found else None
