"""Fakes of engines and of a run around them, for tests of schedules: samples have made-up lengths.

The sampler, stream, grading, filters, ledger and group source around them are the real ones.
"""

import contextlib
import json
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from rlmath.checkpoint.driver_state import read_driver_state, write_driver_state
from rlmath.config.load import load
from rlmath.data import ProblemStream
from rlmath.engines.requests import Request
from rlmath.rollout.sampler import Sampler
from rlmath.training import group_source
from rlmath.training.group_source import GroupSource
from rlmath.types import Problem, Sample

PROBLEMS = [Problem(f"d:{i}", f"p{i}", (1, i), ("0",)) for i in range(10)]
LONGEST = 40


class Engines:
    """Continues samples to lengths drawn from their seeds; tokens tell place and seed.

    Args:
        order_seed: Seed for the order in which requests are answered.
        version: Version of the weights.
        spread: Lengths are mostly short for 0, and any for 1.
    """

    def __init__(self, order_seed, version, spread=0.5):
        self._draw = random.Random(order_seed)
        self._version, self._spread = version, spread
        self.requests: list[Request] = []

    def length(self, seed):
        own = random.Random(seed)
        return own.randint(1, LONGEST if own.random() < self._spread else 4)

    def generate(self, requests, more, journal):
        queue = list(requests)
        while True:
            queue += more(not queue)
            assert len({one.key for one in queue}) == len(queue)
            if not queue:
                return
            yield self._answer(queue.pop(self._draw.randrange(len(queue))))

    def _answer(self, request):
        self.requests.append(request)
        whole, begun = self.length(request.seed), request.begun_tokens
        end = min(whole, begun + request.new_tokens)
        assert end > begun
        spans = () if request.begun is None else request.begun.spans
        return Sample(
            request.problem_id,
            request.index,
            (np.arange(end) + request.seed % 1000).astype(np.int32),
            np.full(end, -0.1, np.float32),
            str(request.seed % 5),
            "cut" if end < whole else "stop",
            spans if spans and spans[-1][0] == self._version else (*spans, (self._version, begun)),
            request.seed,
            self._draw.randrange(3),
        )


def score(completions, **_):
    """1 for small numbers; a 4 cannot be scored."""
    return [None if text == "4" else float(text in "01") for text in completions]


def sampler_of(*overrides, problems=10, stream=None, **more):
    given = [
        "model.path=m",
        "runner.run_dir=r",
        "algorithm.prompts_per_step=4",
        "algorithm.group_size=2",
        f"rollout.max_response_tokens={LONGEST}",
    ]
    config = load([*given, *overrides])
    return Sampler(config, stream or ProblemStream(PROBLEMS[:problems]), **more)


def through_a_checkpoint(sampler, folder):
    write_driver_state(folder, sampler.state_dict())
    return read_driver_state(folder)


def without_engines(state):
    return re.sub(r'"engine": \d+', "", json.dumps(state))


def anywhere(sampled):
    """Without what depends on the engine that sampled."""
    return [
        [(replace(one.sample, engine=0), one.reward) for one in group.samples]
        for group in sampled.groups
    ], sampled.metrics


def sample(sampler, step, collector, order_seed=0, spread=0.5):
    """A step's groups from fake engines that have the weights of the step before."""
    engines = Engines(order_seed, step - 1, spread)
    return sample_from(engines, sampler, step, collector), engines


def sample_from(engines, sampler, step, collector):
    """A step's groups, sampled unless that is done."""
    if not sampler.is_sampled:
        sampler.generate(step, engines, collector)
    return sampler.take(step)


class FakePool(Engines):
    """A pool of engines whose weights are those of the last sync."""

    def __init__(self):
        super().__init__(1, 0)
        self.spec = SimpleNamespace(sleeps=False)
        self.generation = None
        self.has_weights_at_hand = True
        self.fails = False

    def take_weights_away(self):
        self.has_weights_at_hand = False

    def sync(self, version):
        self._version, self.has_weights_at_hand = version, True

    def sleep(self): ...

    def metrics(self):
        return {}


class FakeRun:
    """The real group source of a sampler, with fakes of ranks, engines and monitor around it."""

    def __init__(self, collector, pool, sampler, monkeypatch):
        self.sampler, self.pool = sampler, pool
        self.set_step: list[int] = []
        rewards = SimpleNamespace(
            set_step=lambda step, steps: self.set_step.append(step), metrics=dict
        )
        run = SimpleNamespace(
            config=sampler._config,
            sampling=SimpleNamespace(pool=pool, rewards=rewards, collector=collector),
            actor=SimpleNamespace(begin_load=lambda: None),
        )
        monitor = SimpleNamespace(phase=lambda _: contextlib.nullcontext())
        monkeypatch.setattr(group_source, "weights_digest", lambda *_: None)
        self.source = GroupSource(run, sampler, monitor)
