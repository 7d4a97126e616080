"""A sample drawn again from the weights, the seed and the prompt that it came from."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlmath.commands.replay.source import read_source
from rlmath.commands.why.batch import Step
from rlmath.commands.why.sampled import admitted_in, prompt_tokens, spans_of
from rlmath.config.load import from_plain
from rlmath.config.schema import Config
from rlmath.errors import UserError
from rlmath.monitor.digests import digest_log_probs, digest_tokens, same_item
from rlmath.rollout.requests import Request
from rlmath.rollout.sampler import max_response_tokens
from rlmath.types import Sample


def regenerate_lines(step: Step) -> Iterator[str]:
    """Sample it again, and compare tokens and log-probs with those of the run.

    A response that several versions of the weights sampled is continued by each in turn.

    Raises:
        UserError: The weights cannot be had, or no engine can start.
    """
    spans = spans_of(step)
    ends: list[int | None] = [*(start for _, start in spans[1:]), None]
    found: Sample | None = None
    with tempfile.TemporaryDirectory(prefix="rlmath_why_") as name:
        for (version, start), end in zip(spans, ends, strict=True):
            folder = Path(name) / f"version_{version}"
            weights = _weights(step, version, folder)
            part = "" if len(spans) == 1 else f", from token {start}"
            yield f"weights version {version}{part}: {weights.origin}"
            budget = None if end is None else end - start
            found = _sample(_with_weights(step, weights, folder), step, found, budget)
    assert found is not None
    yield from _compared(step, found)


def _compared(step: Step, found: Sample) -> Iterator[str]:
    tokens = step.noted("tokens", "samples", step.address.key)
    log_probs = step.noted("rollout_log_probs", "samples", step.address.key)
    if tokens is None:
        same = found.text == step.row["response"]
        known = "its digests are gone, and the text is"
    else:
        same = same_item(digest_tokens(found), tokens[0])
        known = f"its {len(found.token_ids)} tokens are"
    yield f"{known} {'the same' if same else 'NOT the same'}"
    if not same:
        yield f"| {found.text[:1200]}"
    if same and log_probs is not None:
        exact = same_item(digest_log_probs(found), log_probs[0])
        difference = abs(found.log_prob() - log_probs[1])
        yield "its log-probs are " + (
            "the same, bit by bit"
            if exact
            else f"the same up to {difference:.2g} nats in the sum: their last bits depend on what "
            "else is in an engine's batch"
        )


@dataclass(frozen=True)
class _Weights:
    """A version of the weights.

    Attributes:
        origin: In words.
        is_checkpoint: Of rlmath; otherwise a Hugging Face folder.
    """

    path: Path
    origin: str
    is_checkpoint: bool = False


def _weights(step: Step, version: int, folder: Path) -> _Weights:
    """Find the weights after a step of the run, or redo the updates that led to them.

    Args:
        folder: For weights that are made.

    Raises:
        UserError: Neither is possible.
    """
    run_dir = step.files.folder
    if version == 0:
        path = Path(step.config.model.path)
        return _Weights(path, f"those of {path}, which the run began with")
    checkpoint = run_dir / "checkpoints" / f"step_{version:06d}"
    if checkpoint.is_dir():
        return _Weights(checkpoint, f"the checkpoint {checkpoint}", is_checkpoint=True)
    if step.files.is_finished and version == step.files.last_step:
        return _Weights(run_dir / "hf", f"the trained model {run_dir / 'hf'}")
    return _made_again(run_dir, version, folder / "replay")


def _made_again(run_dir: Path, version: int, folder: Path) -> _Weights:
    from rlmath.commands.replay.compare import verdict
    from rlmath.commands.replay.redo import weights_after

    try:
        source = read_source(run_dir, version)
    except UserError as error:
        raise UserError(
            f"--regenerate: the sample came from the weights after step {version}; there is no "
            f"checkpoint of it in {run_dir / 'checkpoints'}, and its updates cannot be redone: "
            f"{error}"
        ) from error
    done, model = weights_after(source, folder)
    dtype = from_plain(source.settings(version)).model.dtype
    verdicts = [verdict(source, one, dtype) for one in done]
    if not all(one.is_right for one in verdicts):
        raise UserError(
            f"--regenerate: the updates up to step {version} were redone, and the weights are not "
            f"the run's; rlmath replay {run_dir} {version} shows where they diverge"
        )
    start = "the initial weights" if source.start.path is None else f"{source.start.path}"
    exact = "to the last bit" if all(one.is_exact for one in verdicts) else "up to rounding"
    steps = f"step {source.steps[0]}"
    if len(source.steps) > 1:
        steps = f"steps {source.steps[0]} to {source.steps[-1]}"
    return _Weights(model, f"{steps} redone from {start}, equal {exact}")


def _with_weights(step: Step, weights: _Weights, folder: Path) -> Config:
    """The settings with ``model.path`` a folder of the weights, and one engine on this machine."""
    from rlmath.evaluation.source import with_checkpoint

    config = step.config
    if weights.is_checkpoint:
        ours = dataclasses.replace(config.eval, checkpoint=str(weights.path))
        config = with_checkpoint(dataclasses.replace(config, eval=ours), folder / "model")
    else:
        model = dataclasses.replace(config.model, path=str(weights.path))
        config = dataclasses.replace(config, model=model)
    return dataclasses.replace(
        config,
        runner=dataclasses.replace(config.runner, run_dir=str(folder)),
        cluster=dataclasses.replace(config.cluster, nodes=1, ray_address=None),
        rollout=dataclasses.replace(config.rollout, engines=1),
    )


def request_of(step: Step, begun: Sample | None, budget_tokens: int | None) -> Request:
    """What the run asked an engine for, now to continue what was begun by at most ``budget_tokens``
    more; ``None``: to the end."""
    return Request(
        problem_id=step.address.problem,
        index=step.address.index,
        prompt_token_ids=prompt_tokens(step),
        max_tokens=max_response_tokens(step.config, admitted_in(step)),
        temperature=step.config.rollout.temperature,
        top_p=1.0,
        seed=int(step.row["seed"]),
        ignore_eos=step.config.rollout.ignore_eos,
        begun=begun,
        budget_tokens=budget_tokens,
    )


def _sample(config: Config, step: Step, begun: Sample | None, budget_tokens: int | None) -> Sample:
    """The sample, or ``budget_tokens`` of it after what was begun."""
    from rlmath.cluster.placement import placed
    from rlmath.cluster.session import ray_session
    from rlmath.config.arithmetic import resolve_layout
    from rlmath.config.schema import Device
    from rlmath.device import choose_platform
    from rlmath.rollout.pool import RolloutPool
    from rlmath.training.session import engine_spec

    joins = config.cluster.ray_address is not None
    platform = choose_platform(config.cluster.device.value, "any", elsewhere=joins)
    platform.prepare_driver()
    layout = resolve_layout(config, Device(platform.name))
    with ray_session(config.cluster), placed(layout, 1) as places:
        spec = engine_spec(config, layout, trains=True)
        pool = RolloutPool(
            spec,
            num_engines=layout.engines,
            stall_timeout_s=config.rollout.stall_timeout_s,
            max_restarts=0,
            places=places.engines,
        )
        with pool:
            (sample,) = pool.generate([request_of(step, begun, budget_tokens)], lambda _: [])
    return sample
