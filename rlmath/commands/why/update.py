"""A sample's part in the update: the update again, as ``rlmath replay`` does it, with a look at the
gradient of this sample alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmath.checks.machine import Machine
from rlmath.commands.replay.choices import check_ranks, read_choices, run_config
from rlmath.commands.replay.compare import StepVerdict, verdict
from rlmath.commands.replay.redo import Probed, probe
from rlmath.commands.replay.source import read_source
from rlmath.commands.why.batch import Step
from rlmath.errors import UserError


@dataclass(frozen=True)
class Again:
    """The update once more.

    Attributes:
        probed: The sample in it.
        verdict: Whether it is the run's.
    """

    probed: Probed
    verdict: StepVerdict


def update_again(step: Step, overrides: Sequence[str]) -> Again:
    """Redo the update of a sample's step.

    Args:
        overrides: Of the layout.

    Raises:
        UserError: The step trained on no such sample, what is needed is not kept, or an override
            is no layout.
    """
    address, trained = step.address, step.update.step
    choices = read_choices(overrides)
    if choices.update:
        raise UserError(
            f"--update redoes the run's own update; {', '.join(choices.update)} would be another "
            f"one: rlmath replay {step.files.folder} {trained or address.step} "
            f"{' '.join(choices.update)}"
        )
    source = None if trained is None else read_source(step.files.folder, trained)
    if source is None or address.key not in source.headers[source.step]["keys"]:
        raise UserError(
            f"--update: no step has trained on {address.step}/{address.key}: its group was dropped "
            "by algorithm.filter, or is carried over to a step that has not been"
        )
    with tempfile.TemporaryDirectory(prefix="rlmath_why_") as folder:
        config = run_config(source, source.step, choices, Path(folder))
        check_ranks(
            config, Machine.here(), min(len(one["keys"]) for one in source.headers.values())
        )
        done, probed = probe(source, choices, address.key, Path(folder))
        return Again(probed, verdict(source, done[-1], config.model.dtype))


def gradient_lines(again: Again) -> Iterator[str]:
    """The sample's share of its minibatch's gradient, and whether the update is the run's."""
    one, found = again.probed, again.probed.products
    if again.verdict.is_exact:
        yield "the update was redone, and is the run's to the last bit"
    elif again.verdict.is_right:
        yield "the update was redone, and is the run's up to rounding (another layout)"
    else:
        yield (
            "the update was redone, and is NOT what the run did: what follows is of another "
            "update (rlmath replay says how it differs)"
        )
    where = f"minibatch {one.minibatch + 1} of {one.minibatches}"
    if found is None:
        yield f"{where} was not looked at (algorithm.early_stop_rest): it has no gradient"
        return
    norm, whole = found.own**0.5, found.earlier**0.5
    yield (
        f"norm of this sample's gradient {norm:.6g}, of {where} {whole:.6g}, before clipping: "
        f"{_ratio(norm, whole)}"
    )
    if not found.earlier:
        return
    cosine = "none" if found.cosine is None else f"{found.cosine:+.4f}"
    yield (
        f"its share of the gradient: {found.both / found.earlier:+.2%}, cosine {cosine}. The share "
        "is the projection of its gradient on the minibatch's, over the norm of that; the shares "
        f"of the minibatch's {one.sequences} sequences add up to 100%"
    )
    if one.trace is not None and one.trace[0].discarded:
        yield "the minibatch was discarded: nothing was learned from it"


def _ratio(norm: float, whole: float) -> str:
    return f"{norm / whole:.2%} of it" if whole else "no sequence of it has a gradient"
