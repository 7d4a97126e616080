"""The item at which two runs diverge, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlmath.commands.bisect.compare import Item, Parting
from rlmath.errors import printable
from rlmath.monitor.run_folder import Row, RunFolder, row_key

_BEFORE, _AFTER = 20, 60
_TENSORS = 5
_REWARDS = ("reward", "rewards", "status", "answer", "method", "correct")


def sides(run_a: RunFolder, run_b: RunFolder, parting: Parting) -> Iterator[str]:
    if parting.phase.of in ("tensors", "gradients", "value_tensors"):
        yield from _tensors(parting)
        return
    if not parting.items:
        return
    item, phase = parting.items[0], parting.phase
    if phase.of in ("minibatches", "value_minibatches"):
        yield from _numbers(item)
        if phase.name == "gradient":
            yield from _gradients(run_a, run_b, parting.step)
        return
    if phase.name == "problems":
        return  # The two ids already show the difference.
    step = parting.step
    rows = [_row(run, step, key) for run, key in ((run_a, item.a), (run_b, item.b))]
    if item.numbers is not None and phase.name != "rewards":
        a, b = item.numbers
        yield f"sum over its tokens: A {a}, B {b}" + _by(a, b)
    if rows[0] is None or rows[1] is None:
        return
    yield from _of_rows(phase.name, rows[0], rows[1])


def _of_rows(phase: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    if phase == "prompts":
        yield f"prompt: A {a.get('prompt_tokens')} tokens, B {b.get('prompt_tokens')}"
        yield from _texts(a["prompt"], b["prompt"])
    elif phase == "answers":
        yield f"accepted: A {a.get('accepted')}, B {b.get('accepted')}"
    elif phase == "seeds":
        yield f"seed: A {a.get('seed')}, B {b.get('seed')}"
    elif phase == "tokens":
        yield from _first_token(a, b, "token_ids")
        yield f"response: A {a['response_tokens']} tokens, B {b['response_tokens']}"
        yield from _texts(a["response"], b["response"])
    elif phase == "rollout_log_probs":
        yield from _first_token(a, b, "log_probs")
    elif phase == "rewards":
        for key in _REWARDS:
            if a.get(key) != b.get(key):
                yield f"{key}: A {a.get(key)}, B {b.get(key)}"
    if a.get("weights_version") != b.get("weights_version"):
        yield f"weights version: A {a.get('weights_version')}, B {b.get('weights_version')}"


def _first_token(a: Mapping[str, Any], b: Mapping[str, Any], key: str) -> Iterator[str]:
    """The first token of two samples, if both have kept theirs (``runner.token_samples``)."""
    at = _first(a[key], b[key]) if key in a and key in b else None
    if at is not None:
        one, other = (
            ", ".join(f"{name} {row[name][at]}" for name in ("token_ids", "log_probs"))
            if at < len(row[key])
            else "it has ended"
            for row in (a, b)
        )
        yield f"first at token {at} of the response: A {one}; B {other}"


def _texts(a: str, b: str) -> Iterator[str]:
    at = _first(a, b)
    if at is None:
        yield "the texts are the same; the tokens are not"
        return
    yield f"the texts differ from character {at} on:"
    for name, text in (("A", a), ("B", b)):
        yield f"  {name}: {printable(repr(text[max(0, at - _BEFORE) : at + _AFTER]))}"


def _first(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    if a == b:
        return None
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _numbers(item: Item) -> Iterator[str]:
    a, b = item.numbers or ({}, {})
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return
    for key in sorted(a.keys() | b.keys(), key=lambda key: (key != "grad_norm", key)):
        if a.get(key) != b.get(key):
            yield f"{key}: A {a.get(key)}, B {b.get(key)}" + _by(a.get(key), b.get(key))


def _gradients(run_a: RunFolder, run_b: RunFolder, step: int) -> Iterator[str]:
    known = []
    for run in (run_a, run_b):
        details = run.details(step)
        if details is None or "gradient_tensors" not in details["items"]:
            return
        names, prints = details["keys"]["gradients"], details["items"]["gradient_tensors"]
        known.append(dict(zip(names, prints, strict=True)))
    a, b = known
    names = [name for name in a if a[name] != b.get(name)]
    if names:
        yield f"gradients of {len(names)} of {len(a)} tensors differ: {_list_names(names)}"


def _tensors(parting: Parting) -> Iterator[str]:
    names = [str(item.a or item.b) for item in parting.items]
    if len(names) > 1:
        yield f"tensors: {_list_names(names)}"
    for name, ranks in zip("AB", parting.odd_ranks, strict=True):
        if ranks:
            yield f"in {name}, these ranks hold other weights than rank 0: {list(ranks)}"


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _TENSORS} more" if len(names) > _TENSORS else ""
    return f"{', '.join(names[:_TENSORS])}{more}"


def _by(a: Any, b: Any) -> str:
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        return ""
    scale = max(abs(a), abs(b))
    return f" (by {abs(a - b):.3g}, relative {abs(a - b) / scale:.2g})" if scale else ""


def _row(run: RunFolder, step: int, key: str | None) -> Row | None:
    """The sample ``PROBLEM/INDEX`` or the first one of a problem, from the step's samples file."""
    if key is None or step not in run.training_steps:
        return None
    rows = run.rows(run.training_steps[step])
    return next((row for row in rows if key in (row["problem_id"], row_key(row))), None)
