"""Samples of a step to trace token by token, and the files of their traces."""

from __future__ import annotations

from collections.abc import Sequence

from rlmath.actor.token_traces import TokenTrace
from rlmath.config.schema import Config, OldLogProbs
from rlmath.monitor import Monitor
from rlmath.monitor.samples import priority
from rlmath.monitor.token_files import TracedSample, write_tokens
from rlmath.training.step_batch import StepBatch


def traced_places(keys: Sequence[str], count: int) -> tuple[int, ...]:
    """The first sample of as many problems: of the same problems in every step that has them.
    ``keys``: ``PROBLEM/INDEX`` of each sequence of the step. ``count``: number of problems."""
    first: dict[str, int] = {}
    for place, key in enumerate(keys):
        first.setdefault(key.rpartition("/")[0], place)
    return tuple(first[problem] for problem in sorted(first, key=priority)[:count])


def write_traces(
    config: Config, batch: StepBatch, traces: Sequence[TokenTrace], monitor: Monitor, step: int
) -> None:
    """Write the ranks' traces to a file beside the step's samples. ``batch``: batch of the step."""
    of_engine = config.algorithm.old_log_probs is OldLogProbs.engine
    versions = batch.sequences.weights_versions
    samples = [
        (
            TracedSample(
                batch.keys[one.place],
                len(one.values["token_ids"]),
                int(versions[one.place]),
                one.minibatch,
                one.discarded,
                one.weight,
                of_engine,
            ),
            {name: values.numpy() for name, values in one.values.items()},
        )
        for one in sorted(traces, key=lambda one: one.place)
    ]
    write_tokens(monitor.run_dir, step, samples)
