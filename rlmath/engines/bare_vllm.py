"""Tokens per second of vLLM's own ``LLM.generate``, in its own process: ``python -m`` this with two
paths, of a JSON file that says what to run and of the one to write."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(asked_path: str, answer_path: str) -> None:
    """Generate the same requests several times, with the sampling that training needs and without.

    The answer has tokens per second of each round, by kind.
    """
    from vllm import LLM, SamplingParams, TokensPrompt

    asked: dict[str, Any] = json.loads(Path(asked_path).read_text(encoding="utf-8"))
    engine = LLM(**asked["engine"])
    prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in asked["prompts"]]
    common = {"max_tokens": asked["max_tokens"], "ignore_eos": True, "detokenize": False}
    kinds: dict[str, list[Any]] = {
        "same sampling": [SamplingParams(seed=s, logprobs=0, **common) for s in asked["seeds"]],
        "plain sampling": [SamplingParams(**common) for _ in asked["seeds"]],
    }
    answer: dict[str, list[float]] = {}
    for kind, parameters in kinds.items():
        rates = []
        for _ in range(asked["rounds"]):
            started_s = time.perf_counter()
            outputs = engine.generate(prompts, parameters, use_tqdm=False)
            seconds = time.perf_counter() - started_s
            rates.append(sum(len(one.outputs[0].token_ids) for one in outputs) / seconds)
        answer[kind] = rates
    Path(answer_path).write_text(json.dumps(answer), encoding="utf-8")
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
