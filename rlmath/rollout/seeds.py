"""Seeds of requests: each sample of a run has its own random stream.

A seed depends only on run seed, step, problem and index, so the same run gives the same samples
with any number of engines, in any order, and when a request is run again after an engine was lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from rlmath.engines.requests import Request
from rlmath.types import Problem


def request_seed(run_seed: int, step: int, problem_id: str, index: int) -> int:
    """Seed of one sample.

    The first 8 bytes, as a big-endian number without its top bit, of the BLAKE2b digest of
    ``"{run_seed}/{step}/{index}/{problem_id}"`` in UTF-8. The problem comes last, because it alone
    may hold a slash: different samples never read as the same text.

    Args:
        step: Optimization step that the sample is for.
        index: The sample's place in the problem's group.

    Returns:
        A number in ``[0, 2**63)``, the range that a torch generator takes.
    """
    text = f"{run_seed}/{step}/{index}/{problem_id}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def requests_for(
    problems: Iterable[Problem],
    *,
    samples: int,
    max_tokens: int,
    temperature: float,
    top_p: float = 1.0,
    run_seed: int,
    step: int,
    wants_routes: bool = False,
) -> list[Request]:
    """Requests for ``samples`` completions of each problem, in the order of problems."""
    return [
        Request(
            problem_id=problem.id,
            index=index,
            prompt_token_ids=problem.prompt_token_ids,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=request_seed(run_seed, step, problem.id, index),
            wants_routes=wants_routes,
        )
        for problem in problems
        for index in range(samples)
    ]


def in_environment(requests: Iterable[Request], problems: Iterable[Problem]) -> list[Request]:
    """The requests of these problems, with turns that the pool's environment answers."""
    by_id = {problem.id: problem for problem in problems}
    return [replace(request, problem=by_id[request.problem_id]) for request in requests]
