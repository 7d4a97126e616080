"""Samples and groups that no engine made."""

import numpy as np

from rlmath.types import GradedSample, Group, Problem, Sample


def make_sample(problem="p", index=0, tokens=1, *, log_probs=0.0, version=0, **changes):
    """A finished sample of one version of the weights.

    Args:
        tokens: Their ids, or how many; they count from 0 then.
        log_probs: One for each token, or one for all.
        changes: Other fields.
    """
    ids = np.array(range(tokens) if isinstance(tokens, int) else tokens, np.int32)
    fields = {
        "text": "",
        "finish_reason": "stop",
        "spans": ((version, 0),),
        "seed": index,
        "engine": 0,
        **changes,
    }
    values = np.broadcast_to(np.asarray(log_probs, np.float32), ids.shape).copy()
    return Sample(problem, index, ids, values, **fields)


def make_group(samples, rewards, prompt=(1, 2)):
    graded = (
        GradedSample(one, reward, None, "ungraded")
        for one, reward in zip(samples, rewards, strict=True)
    )
    return Group(Problem(samples[0].problem_id, "?", tuple(prompt), ("2",)), tuple(graded))
