"""Settings that make steps with long responses faster at a price: proposed, never chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlmath.checks.quantization import quantization_model, quantization_problems
from rlmath.commands.plan.layouts import EQUAL_SHARE, Plan, find_plans
from rlmath.commands.plan.request import PlanRequest
from rlmath.config.quoting import override
from rlmath.config.rollout import KvCacheDtype
from rlmath.errors import UserError

# Responses from here on are long: keys and values and the longest responses bound a step.
LONG_TOKENS = 8192
# Settings with which samples come from other arithmetic or weights than the actor's. They need the
# correction; the alignment gate, which is on, watches them.
KV_IN_FP8 = {"rollout.kv_cache_dtype": KvCacheDtype.fp8}
CARRY_OVER = {"rollout.schedule": "carry_over", "rollout.max_lag": 2}
CORRECTION = {"algorithm.correction.kind": "token_truncate"}


def proposals(request: PlanRequest, best: Plan) -> list[str]:
    """Lines with settings and the predicted seconds of a step, the fastest last; empty: none is
    faster, or responses are short."""
    if request.work.response_tokens < LONG_TOKENS:
        return []
    limit = (1 - EQUAL_SHARE) * best.step_s
    found = [(s, words) for s, words in _alternatives(request, best) if s < limit]
    return [
        f"{' '.join(override(key, value) for key, value in (words | CORRECTION).items())}: "
        f"{seconds:,.0f} s a step"
        for seconds, words in sorted(found, key=lambda one: -one[0])
    ]


def _alternatives(request: PlanRequest, best: Plan) -> Iterator[tuple[float, dict[str, Any]]]:
    """Predicted seconds of a step, and the settings.

    A step does not wait for carried-over responses, so it has no tail. The tokens that engines read
    again are not counted (docs/records/performance.md has simulations that count them).
    """
    yield best.step_s - best.tail_s, CARRY_OVER
    if request.kv_cache_in_fp8 or request.gpu.fp8_tflops is None:
        return
    other = request.with_settings(KV_IN_FP8)
    config, spec = other.config, other.spec
    if [*quantization_problems(config, "evaluate"), *quantization_model(config, spec)]:
        return
    try:
        plan = find_plans(other)[0]
    except UserError:
        return
    yield plan.step_s, KV_IN_FP8
    yield plan.step_s - plan.tail_s, KV_IN_FP8 | CARRY_OVER
