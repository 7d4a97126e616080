"""``rlmath test plugin``: wrong data sources, benchmarks, verifiers, rewards, phase observers, step
checks, environments, transports, families and engine arguments are caught by the name of what they
violate."""

from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from rlmath.commands.plugin_test.cli import KINDS
from rlmath.commands.plugin_test.rows import check_reward
from rlmath.config.benchmarks import BENCHMARKS
from rlmath.config.data_sources import DATA_SOURCES
from rlmath.config.environments import ENVIRONMENTS
from rlmath.engines.transport import TRANSPORTS, SharedMemory, SyncBuffers
from rlmath.grading.verifiers import VERIFIERS
from rlmath.model.families import FAMILIES, FAMILY_PLUGINS
from rlmath.training.checks.base import STEP_CHECKS, StepCheck
from tests.unit.plugins.test_plugin_loading import own_plugins  # noqa: F401

pytestmark = pytest.mark.usefixtures("own_plugins")


def violations(kind: str) -> dict[str, str]:
    (chosen,) = (one for one in KINDS if one.title == kind)
    return {one.invariant: one.text for one in chosen.check("wrong") if not one.holds}


class Rows:
    """Ten rows; a right source."""

    def __init__(self, options: Any) -> None:
        self.row = 0

    def fields(self) -> Any:
        return {"prompt": f"{self.row}+1=", "solutions": [str(self.row + 1)]}

    def __iter__(self) -> Any:
        while self.row < 10:
            found = self.fields()
            self.row += 1
            yield found
        self.row = 0

    def state_dict(self) -> dict[str, Any]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.row = state["row"]


class Late(Rows):
    """Counts a row after it was given: the state is that before it."""

    def __iter__(self) -> Any:
        while self.row < 10:
            yield self.fields()
            self.row += 1
        self.row = 0


class Once(Rows):
    def __iter__(self) -> Any:
        while self.row < 10:
            self.row += 1
            yield self.fields()


class Odd(Rows):
    def fields(self) -> Any:
        return {"prompt": {1, 2}}


class Drawn(Rows):
    def fields(self) -> Any:
        return {"prompt": str(random.random())}


@pytest.mark.parametrize(
    ("source", "invariant"),
    [
        (Late, "resumes at the same row"),
        (Once, "a finite source begins again"),
        (Odd, "rows are mappings of values that JSON has"),
        (Drawn, "deterministic"),
    ],
)
def test_a_wrong_data_source_is_caught_by_name(source: Any, invariant: str) -> None:
    DATA_SOURCES.register("wrong")(Rows)
    assert violations("data source") == {}
    DATA_SOURCES.register("wrong")(source)
    found = violations("data source")
    assert invariant in found
    if source is Late:
        assert "resumed after row 1, row 2 is {'prompt': '0+1='" in found[invariant]


BENCHMARK = [{"problem": f"{one}+1=", "answer": str(one + 1), "id": one} for one in range(3)]
COUNTER = itertools.count()


@pytest.mark.parametrize(
    ("rows", "invariant"),
    [
        (lambda _: [{"question": "1+1=", "answer": "2"}], "rows have the problem and its answer"),
        (lambda _: [BENCHMARK[0], BENCHMARK[0]], "each row has its own id"),
        (lambda _: [{"problem": str(next(COUNTER)), "answer": "2"}], "deterministic"),
    ],
)
def test_a_wrong_benchmark_is_caught_by_name(rows: Any, invariant: str) -> None:
    BENCHMARKS.register("wrong")(lambda options: BENCHMARK)
    assert violations("benchmark") == {}
    BENCHMARKS.register("wrong")(rows)
    assert list(violations("benchmark")) == [invariant]


@pytest.mark.parametrize(
    ("verifier", "invariant"),
    [
        (lambda answer, gold: float(answer == gold), "result is true or false"),
        (lambda answer, gold: answer == gold == "42", "the accepted answer is accepted"),
        (lambda answer, gold: answer in gold, "other answers are not accepted"),
        (lambda answer, gold: random.random() < 0.5, "deterministic"),
    ],
)
def test_a_wrong_verifier_is_caught_by_name(verifier: Any, invariant: str) -> None:
    VERIFIERS.register("wrong")(lambda answer, gold, options: answer == gold)
    assert violations("verifier") == {}
    VERIFIERS.register("wrong")(lambda answer, gold, options: verifier(answer, gold))
    assert invariant in violations("verifier")


REWARDS = {
    "a number, or none, for each completion": "[0.0]",
    "order of completions makes no difference": "[float(i) for i, _ in enumerate(completions)]",
    "deterministic": "[__import__('random').random() for one in completions]",
}


@pytest.mark.parametrize("invariant", REWARDS)
def test_a_wrong_reward_is_caught_by_name(invariant: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "def wrong(completions, solutions, **_):\n    return [0.5 for _ in completions]"
    )
    assert all(one.holds for one in check_reward(str(file)))
    file.write_text(f"def wrong(completions, solutions, **_):\n    return {REWARDS[invariant]}\n")
    found = {one.invariant for one in check_reward(str(file)) if not one.holds}
    assert invariant in found


class Nothing(StepCheck):
    """A right one."""


class NotANumber(StepCheck):
    def before_update(self, now: Any) -> Any:
        return {"checks/mine": float("inf")}


class Fragile(StepCheck):
    def before_update(self, now: Any) -> Any:
        return {"checks/mine": len(now.groups[0].samples) / 1}


class Writes(StepCheck):
    def before_update(self, now: Any) -> Any:
        for group in now.groups:
            group.samples[0].sample.token_ids[0] = 7
        return {}


class Draws(StepCheck):
    def before_update(self, now: Any) -> Any:
        return {"checks/mine": random.random()}


class AsksRanks(StepCheck):
    def before_update(self, now: Any) -> Any:
        return {"checks/mine": now.run.actor.weights_changes()}


@pytest.mark.parametrize(
    ("check", "invariant"),
    [
        (NotANumber, "metrics are finite numbers by name"),
        (Fragile, "a step without groups is no error"),
        (Writes, "samples are left alone"),
        (Draws, "deterministic"),
    ],
)
def test_a_wrong_step_check_is_caught_by_name(check: Any, invariant: str) -> None:
    for right in (Nothing, AsksRanks):
        STEP_CHECKS.register("wrong")(right)
        assert violations("step check") == {}
    STEP_CHECKS.register("wrong")(check)
    assert list(violations("step check")) == [invariant]


class Adds:
    total = 0

    def reset(self, prompt: str) -> str | None:
        return f"Add to {prompt}"

    def add(self, number: int, more: int | str = 0) -> int:
        """Adds.

        Args:
            number: A number.
            more: Nothing.
        """
        self.total += number
        return self.total

    def get_reward(self) -> float | None:
        return float(self.total)


class NeedsRow(Adds):
    def reset(self, secret: str) -> str | None:  # type: ignore[override]
        return None


class Opens(Adds):
    def reset(self, prompt: str) -> str | None:
        return str(random.random())


class Unbounded(Adds):
    def get_reward(self) -> float | None:
        return float("inf")


class Shared(Adds):
    def add(self, number: int) -> int:
        """Adds.

        Args:
            number: A number.
        """
        Adds.total += number
        return Adds.total


@pytest.mark.parametrize(
    ("environment", "invariant"),
    [
        (NeedsRow, "its reset takes a row and its methods are tools"),
        (Opens, "samples of a row begin with the same text"),
        (Unbounded, "answers and rewards are as documented"),
        (Shared, "deterministic, whatever other samples do"),
    ],
)
def test_a_wrong_environment_is_caught_by_name(environment: Any, invariant: str) -> None:
    ENVIRONMENTS.register("wrong")(Adds)
    assert violations("environment") == {}
    ENVIRONMENTS.register("wrong")(environment)
    assert invariant in violations("environment")


class Nowhere(SharedMemory):
    def fits(self, device: str, colocated: bool) -> bool:
        return False


class Endless(SharedMemory):
    backend = None  # type: ignore[assignment]


class Shrinking(SharedMemory):
    def plan_bytes(self, sizes: Any) -> SyncBuffers:
        return SyncBuffers(2**40 // sizes.bucket_bytes, 0)


@pytest.mark.parametrize(
    ("transport", "invariant"),
    [
        (Nowhere, "it fits somewhere"),
        (Endless, "vLLM's workers have an end"),
        (Shrinking, "buffers do not shrink with the bucket"),
    ],
)
def test_a_wrong_transport_is_caught_by_name(transport: Any, invariant: str) -> None:
    TRANSPORTS.register("wrong")(transport)
    assert list(violations("weight transport")) == [invariant]


def test_a_wrong_family_is_caught_by_name() -> None:
    qwen2 = FAMILIES[0]
    other = dataclasses.replace(qwen2, architectures=("MineForCausalLM",))
    FAMILY_PLUGINS.register("wrong")(lambda: other)
    assert violations("model family") == {}
    FAMILY_PLUGINS.register("wrong")(lambda: qwen2)
    assert list(violations("model family")) == ["its architectures are its own"]
    twice = dataclasses.replace(other, entries=(*other.entries, other.entries[0]))
    FAMILY_PLUGINS.register("wrong")(lambda: twice)
    assert list(violations("model family")) == ["each tensor has one place"]
    (entry, *rest) = other.entries
    tensor = dataclasses.replace(entry.hf[0], dims=("vocab", "hiden"))
    unknown = (dataclasses.replace(entry, hf=(tensor,)), *rest)
    FAMILY_PLUGINS.register("wrong")(lambda: dataclasses.replace(other, entries=unknown))
    assert "hiden" in violations("model family")["sizes are known"]
    FAMILY_PLUGINS.register("wrong")(lambda: {"entries": []})  # type: ignore[arg-type, return-value]
    assert "it is a dict" in violations("model family")["result is a family with architectures"]
