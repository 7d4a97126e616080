"""Refusals of an actor with linear or gated attention, by name, before anything starts."""

from __future__ import annotations

import re

import pytest

from rlmath.checks.files import model_folder
from rlmath.checks.layout import tensor_parallel_problems
from rlmath.checks.linear_attention import linear_attention_problems
from rlmath.checks.precision import batch_invariant_model
from rlmath.config.actor import Fp8, SharePrompts
from rlmath.config.schema import Config
from rlmath.config.shared_prompts import shares_prompts, sharing_problem
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec

SPEC = model_spec(KNOWN["Qwen3.5-9B"])


@pytest.mark.parametrize(
    ("layout", "fp8", "says"),
    [
        (Layout(1, 1, 1, context_parallel=2), Fp8.none, "actor.context_parallel=2: the state"),
        (Layout(1, 1, 1), Fp8.hybrid, "actor.fp8=hybrid: linear attention"),
        (Layout(8, 1, 1), Fp8.none, "actor.tensor_parallel=8: .* use at most 4"),
    ],
    ids=str,
)
def test_linear_attention_refuses_incompatible_settings(
    layout: Layout, fp8: Fp8, says: str
) -> None:
    config = Config()
    assert not list(linear_attention_problems(config, SPEC, Layout(4, 2, 2)))
    config.actor.fp8 = fp8
    (message,) = linear_attention_problems(config, SPEC, layout)
    assert re.match(says, message)
    other = model_spec(KNOWN["Qwen3-8B"])
    assert not list(linear_attention_problems(config, other, layout))


def test_batch_invariance_is_refused() -> None:
    config = Config()
    assert not list(batch_invariant_model(config, SPEC))
    config.precision.batch_invariant = True
    (message,) = batch_invariant_model(config, SPEC)
    assert "linear attention" in message


def test_tensor_ranks_get_whole_heads_of_linear_attention() -> None:
    (message,) = tensor_parallel_problems("actor", 32, SPEC, 0)
    assert "16 key heads of linear attention / 32 leaves 16" in message


def test_prompts_are_not_shared_where_a_state_passes_through_them() -> None:
    assert "linear attention" in (sharing_problem(SPEC, "cpu", 1) or "")
    assert not shares_prompts(SharePrompts.auto, SPEC, "cpu", 1)


def test_models_with_images_are_refused_before_they_are_fetched() -> None:
    config = Config()
    for path, says in (
        ("Qwen/Qwen3.5-9B", "it has an image encoder; save its text model"),
        ("models/Qwen3.5-9B", "Qwen/Qwen3.5-9B is on the hub, but it has an image encoder"),
    ):
        config.model.path = path
        (message,) = model_folder(config)
        assert says in message
    config.model.path = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    assert not list(model_folder(config))
