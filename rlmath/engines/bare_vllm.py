"""vLLM's own loop, that of ``LLM.generate``, over an engine that runs: ours is compared with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rlmath.engines.requests import Request


def bare_rates(engine: Any, requests: Sequence[Request], rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each round, by kind of sampling: with the seeds and log-probs that
    training needs, and without.

    Args:
        engine: vLLM's ``LLMEngine``, without requests.
        requests: The requests of each round; all run to their limit.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    scheduler = engine.engine_core.engine_core.scheduler
    # vLLM's front end knows no tokens in arrays.
    plain, scheduler.is_plain = getattr(scheduler, "is_plain", False), False

    def parameters(request: Request, **more: Any) -> Any:
        return SamplingParams(
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **more,
        )

    kinds = {
        "same sampling": [parameters(one, seed=one.seed, logprobs=0) for one in requests],
        "plain sampling": [parameters(one) for one in requests],
    }
    found = {
        kind: [_rate(engine, requests, of_kind) for _ in range(rounds)]
        for kind, of_kind in kinds.items()
    }
    scheduler.is_plain = plain
    return found


def _rate(engine: Any, requests: Sequence[Request], parameters: Sequence[Any]) -> float:
    started_s, tokens = time.perf_counter(), 0
    for number, (request, one) in enumerate(zip(requests, parameters, strict=True)):
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_token_ids)}
        engine.add_request(f"bare {number}", prompt, one)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens += sum(len(sample.token_ids) for sample in output.outputs)
    seconds = time.perf_counter() - started_s
    # Steps that were scheduled ahead; nothing may run when another round begins.
    while engine.engine_core.engine_core.batch_queue:
        engine.engine_core.get_output()
    return tokens / seconds
