"""Groups of samples for made-up runs, and the data of a page."""

import dataclasses
import json

import numpy as np

from rlmath.monitor.token_files import TracedSample
from rlmath.types import GradedSample, Group, Problem
from tests.support.samples import make_sample

STEPS = 4
# Text that a model may write, or a file may hold: none may run, break or reorder the page.
HOSTILE = (
    "</script><script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 2'><!-- <svg onload=window.pwned=3>",
    "\u202eright to left\u202c\u2028\u2029\x00\x1b[2J\ud83d",
    "@@DATA@@ @@SCRIPT@@ {{x}}",
    "x" * 200_000,
    r"$\href{javascript:window.pwned=4}{x}$ and $\frac{1}{2}$ and \(a < b\) and $\frac{1$",
)


def group(id_, rewards, texts, step):
    """Samples of a problem; a positive reward is a right answer."""
    problem = Problem(id_, f"What is {id_}?", (1, 2, 3), ("2",))
    samples = []
    for index, (reward, text) in enumerate(zip(rewards, texts, strict=True)):
        more = {
            "text": text,
            "finish_reason": "length" if reward is None else "stop",
            "spans": ((step - 1, 0),) if step < 4 else ((step - 2, 0), (step - 1, 2)),
            "seed": 2**60 + index,
        }
        sample = make_sample(id_, index, 3 + index + step, log_probs=-0.5, **more)
        right = None if reward is None else reward > 0
        status = "timeout" if right is None else "correct" if right else "wrong"
        method = "sympy" if right is None else "exact"
        samples.append(GradedSample(sample, reward, right, status, "2", {"math": reward}, method))
    return Group(problem, tuple(samples))


def in_turns(made):
    """A group whose last sample, of nine tokens, has called a tool."""
    *others, last = made.samples
    segments = (("model", 0), ("glue", 3), ("observation", 4), ("glue", 5), ("model", 6))
    texts = ("```python\n1+1\n```", "\n```output\n", "<b>two</b>", "\n```\n", r"$\frac{4}{2}$")
    calls = (("python", "ok", 0.25),)
    turns = dataclasses.replace(
        last.sample, segments=segments, texts=texts, calls=calls, text="".join(texts)
    )
    return Group(made.problem, (*others, dataclasses.replace(last, sample=turns)))


def trace(graded):
    """Possible traces of a sample, in a step with a reference model. Its first token
    is clipped, its second one left out, and its last one not in the loss."""
    sample = graded.sample
    count = len(sample.token_ids)
    places = np.arange(count, dtype=np.float32)
    mask, factors = places < count - 1, (places != 1).astype(np.float32)
    values = {
        "token_ids": sample.token_ids,
        "engine_log_probs": sample.log_probs,
        "old_log_probs": sample.log_probs + places / 8,
        "ref_log_probs": sample.log_probs - 0.25,
        "log_probs": sample.log_probs + 1,
        "entropy": places / 4,
        "advantages": np.where(mask, -1.5, 0).astype(np.float32),
        "policy_factors": factors,
        "loss_mask": mask,
        "pulls": -places * 1e-4,
        "clipped": places == 0,
    }
    version = sample.weights_version
    own = TracedSample(f"{sample.problem_id}/{sample.index}", count, version, 1, False, 0.01, False)
    return own, values


def page_data(text):
    block = text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    return json.loads(block)
