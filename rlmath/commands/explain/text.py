from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rlmath.commands.explain.shares import Cause, Explanation

_UNITS = {"reward": "", "accuracy": "", "length": " tokens"}


def as_json(found: Explanation, earlier: range, later: range) -> dict[str, Any]:
    return {
        "steps": [later.start, later.stop],
        "against": [earlier.start, earlier.stop],
        **dataclasses.asdict(found),
        "change": found.change,
    }


def lines(found: Explanation, earlier: range, later: range) -> Iterator[str]:
    unit = _UNITS[found.metric]
    yield (
        f"mean {found.metric}: {found.before:.4g}{unit} in steps {steps_text(earlier)} "
        f"({found.samples[0]:,} samples), {found.after:.4g}{unit} in steps {steps_text(later)} "
        f"({found.samples[1]:,})"
    )
    yield f"change: {found.change:+.4g} ± {found.standard_error:.2g}{unit} (standard error)"
    yield ""
    width = max(len(cause.name) for cause in found.causes)
    for cause in found.causes:
        if _matters(cause):
            part = f"{cause.share / found.change:7.1%}" if found.change else ""
            yield (
                f"  {cause.name:<{width}}  {cause.share:+10.4g} ± {cause.standard_error:<8.2g}"
                f"{part}"
            )
    nothing = [c.name for c in found.causes if not _matters(c)]
    if nothing:
        yield f"  no part in it: {', '.join(nothing)}"
    yield ""
    if found.difficulty:
        yield (
            "No problem was sampled in both windows (as within one epoch), so a harder part of the "
            "data looks like lost skill. Problems by the share of their responses that are right:"
        )
        for name, (before, after) in found.difficulty.items():
            yield f"  {name:<{width}}  {before:7.1%} before  {after:7.1%} now"
    else:
        yield _shared_text(found)
    if found.moved:
        yield "Groups that moved it most (samples as STEP/PROBLEM/INDEX):"
    for one in found.moved:
        yield (
            f"  {one.part:+.4g}  mean {one.before:.4g} before, {one.now:.4g} now: "
            f"{', '.join(one.addresses[:4])}{' …' if len(one.addresses) > 4 else ''}"
        )


def _shared_text(found: Explanation) -> str:
    return (
        f"{found.shared_problems:,} problems were sampled in both windows, with "
        f"{found.shared_samples:.0%} of the samples; on others, skill and difficulty cannot be "
        "told apart."
    )


def _matters(cause: Cause) -> bool:
    """More than rounding."""
    return abs(cause.share) > 1e-9 or cause.standard_error > 1e-9


def steps_text(steps: range) -> str:
    return f"{steps.start}:{steps.stop}"
