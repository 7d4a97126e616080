"""Engines that compute NaN: an evaluation says so and why, instead of grading what they repeat."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from rlmath.errors import WeightsError
from rlmath.evaluation.run import sample_and_grade
from rlmath.model.tiny import make_tiny_model
from rlmath.types import Problem, Sample


class Pool:
    """Its second sample has the log-prob ``value``."""

    def __init__(self, model, value):
        self.spec = SimpleNamespace(model_path=str(model))
        self._value = value

    def generate(self, requests):
        for number, one in enumerate(requests):
            log_probs = np.array([-1.0, self._value if number == 1 else -1.0], np.float32)
            tokens, spans = np.array([0, 0], np.int32), ((0, 0),)
            yield Sample(one.problem_id, one.index, tokens, log_probs, "!!", "length", spans, 0, 0)


class Journal:
    """Keeps in memory."""

    def __init__(self):
        self.samples: dict[Any, Sample] = {}

    def keep(self, samples):
        for one in samples:
            self.samples[one.problem_id, one.index] = one
            yield one


def evaluate(pool, journal=None):
    collected = []

    def collect(problems, samples, size, rewards):
        collected.extend(samples)
        return SimpleNamespace(wait=lambda: ())

    rewards = SimpleNamespace(for_evaluation=lambda: rewards, metrics=dict)
    collector = SimpleNamespace(collect=collect)
    sampling = SimpleNamespace(pool=pool, rewards=rewards, collector=collector)
    benchmark = SimpleNamespace(
        samples=1, max_response_tokens=4, temperature=1.0, top_p=1.0, tools=False
    )
    problems = tuple(Problem(name, "", (1,), ("1",)) for name in ("a", "b", "c"))
    held_out = SimpleNamespace(benchmark=benchmark, problems=problems)
    sample_and_grade(sampling, 1, held_out, 0, journal)
    return collected


def test_the_weight_is_named(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = math.nan
    save_file(tensors, file)
    journal = Journal()
    with pytest.raises(WeightsError, match=r"^b: .* NaN.*model\.layers\.2\.mlp\.up_proj\.weight"):
        evaluate(Pool(folder, math.nan), journal)
    assert list(journal.samples) == [("a", 0)], "a resumed evaluation would grade it"


def test_without_one_it_is_an_overflow(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    with pytest.raises(WeightsError, match="finite, so suspect an overflow"):
        evaluate(Pool(folder, math.nan))


@pytest.mark.parametrize("value", [0.0, -math.inf])
def test_finite_log_probs_pass_evaluation(tmp_path, value):
    assert len(evaluate(Pool(tmp_path, value))) == 3
