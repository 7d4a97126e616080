"""Arrays that stay with the engines, under the other schedules: samples, checkpoints and metrics
are those of arrays on the driver, and what outlives its step needs no engine's node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from rlmath.errors import LostArrays
from rlmath.rollout.collect import Collector
from rlmath.rollout.ledger import LEDGER_FILE, Ledger
from rlmath.rollout.sampler import Sampled, Sampler
from rlmath.utils.array_refs import ArrayRef
from tests.unit.rollout.stand_ins import (
    STORE,
    Engines,
    anywhere,
    get_block,
    sampler_of,
    through_a_checkpoint,
    without_engines,
)

THERE = "rollout.arrays=engines"
FILTERED = ("algorithm.filter.keep=variance", "algorithm.filter.max_rounds=12")
CARRY_OVER = ("rollout.schedule=carry_over", "rollout.carry_over_tokens=8", "rollout.max_lag=2")
PIPELINED = ("rollout.schedule=pipelined",)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ray, "get", get_block)
    STORE.clear()
    yield
    STORE.clear()


def held(sampled: Sampled) -> list[bool]:
    """Of each sample, whether its arrays are with an engine."""
    groups = sampled.groups
    return [isinstance(s.sample.token_ids, ArrayRef) for group in groups for s in group.samples]


def same(one: Sampled, other: Sampled) -> None:
    assert anywhere(one) == anywhere(other)
    assert one.dropped == other.dropped


@pytest.mark.parametrize("extra", [(), FILTERED])
def test_carry_over(collector: Collector, extra: tuple[str, ...], tmp_path: Path) -> None:
    """Each step's engines are gone with all their blocks when the next one begins, and a run that
    resumes has what is unfinished; also where it begins to leave arrays there, or ends to."""
    straight = sampler_of(*CARRY_OVER, *extra)
    other = sampler_of(*CARRY_OVER, *extra, THERE, ledger=Ledger(tmp_path / LEDGER_FILE))
    seen: list[bool] = []
    cut = finished = 0
    for step in range(1, 12):
        given: list[Any] = [Engines(seed, step - 1) for seed in (step, -step)]
        one, two = (
            sampler.sample(step, engines, collector, contextlib.nullcontext)
            for sampler, engines in zip((straight, other), given, strict=True)
        )
        same(one, two)
        seen += held(two)
        there = step != 6
        assert all(request.holds_arrays == there for request in given[1].requests)
        STORE.clear()
        finished += sum(len(group.finished) for group in other._live.values())
        cut += sum(len(group.cut) for group in other._live.values())
        if step % 3 == 2:
            state = through_a_checkpoint(other, tmp_path)
            assert without_engines(state) == without_engines(straight.state_dict())
            arrays = "rollout.arrays=driver" if step == 5 else THERE
            ledger = Ledger(tmp_path / LEDGER_FILE, step)
            other = sampler_of(*CARRY_OVER, *extra, arrays, ledger=ledger)
            other.load_state_dict(state)
        elif step == 6:
            state = through_a_checkpoint(other, tmp_path)
            other = sampler_of(
                *CARRY_OVER, *extra, THERE, ledger=Ledger(tmp_path / LEDGER_FILE, step)
            )
            other.load_state_dict(state)
    assert cut and finished and any(seen) and not all(seen)
    assert straight.ledger.balance == other.ledger.balance


def generate(sampler: Sampler, step: int, collector: Collector, order_seed: int = 0) -> None:
    """Ahead of its step, but for the first."""
    ahead = step > 1
    engines: Any = Engines(order_seed, step - 1 - ahead)
    sampler.generate(step, engines, collector, contextlib.nullcontext, ahead=ahead)


@pytest.mark.parametrize("extra", [(), FILTERED])
def test_pipelined(collector: Collector, extra: tuple[str, ...], tmp_path: Path) -> None:
    """A checkpoint is made when the next step's groups are there, and has their arrays."""
    straight = sampler_of(*PIPELINED, *extra)
    other = sampler_of(*PIPELINED, *extra, THERE, ledger=Ledger(tmp_path / LEDGER_FILE))
    generate(straight, 1, collector)
    generate(other, 1, collector)
    for step in range(1, 9):
        one, two = straight.take(step), other.take(step)
        same(one, two)
        resumed = step % 3 == 1 and step > 1
        assert any(held(two)) != resumed
        generate(straight, step + 1, collector, order_seed=step)
        generate(other, step + 1, collector, order_seed=-step)
        if step % 3 == 0:
            state = through_a_checkpoint(other, tmp_path)
            assert without_engines(state) == without_engines(straight.state_dict())
            STORE.clear()
            ledger = Ledger(tmp_path / LEDGER_FILE, step)
            other = sampler_of(*PIPELINED, *extra, THERE, ledger=ledger)
            other.load_state_dict(state)
    assert straight.ledger.balance == other.ledger.balance


def test_a_node_that_goes_with_what_waits_for_its_step_is_named(collector: Collector) -> None:
    """What was sampled ahead is nowhere else; no checkpoint says that it has it."""
    sampler = sampler_of(*PIPELINED, THERE)
    generate(sampler, 1, collector)
    sampler.take(1)
    generate(sampler, 2, collector)
    STORE.clear()
    with pytest.raises(LostArrays, match=r"sample 0 of problem d:\d+ \(engine \d\)"):
        sampler.state_dict()


def test_a_node_that_goes_before_the_end_of_its_step_is_named(collector: Collector) -> None:
    """A group that is not finished has samples there, of which the step's end wants the arrays."""

    class Going(Engines):
        def generate(self, *arguments: Any) -> Any:
            yield from super().generate(*arguments)
            STORE.clear()

    sampler = sampler_of(*CARRY_OVER, THERE)
    with pytest.raises(LostArrays, match=r"sample \d of problem d:\d+\S* \(engine \d\)"):
        for step in range(1, 9):
            engines: Any = Going(step, step - 1)
            sampler.sample(step, engines, collector, contextlib.nullcontext)
            assert all(isinstance(x.token_ids, np.ndarray) for x in _waiting(sampler))


def _waiting(sampler: Sampler) -> list[Any]:
    live = [one for group in sampler._live.values() for one in group.finished.values()]
    return live + [s.sample for _, g in sampler._groups.carried_over for s in g.samples]
