"""A sample drawn again from the weights, the seed and the prompt that it came from."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlmath.commands.why.batch import Step
from rlmath.commands.why.sampled import admitted_in, prompt_tokens, spans_of
from rlmath.config.schema import Config
from rlmath.errors import UserError
from rlmath.monitor.digests import digest_log_probs, digest_tokens, same_item
from rlmath.rollout.requests import Request
from rlmath.rollout.sampler import max_response_tokens
from rlmath.types import Sample


def regenerate_lines(step: Step) -> Iterator[str]:
    """Sample it again, and compare tokens and log-probs with those of the run.

    Raises:
        UserError: The weights are not kept, or no engine can start.
    """
    with tempfile.TemporaryDirectory(prefix="rlmath_why_") as folder:
        config = _with_weights(step, Path(folder))
        yield f"weights version {step.row['weights_version']} from {_source(step)[0]}"
        found = _sample(config, step, Path(folder))
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
        difference = abs(float(found.log_probs.sum(dtype="float64")) - log_probs[1])
        yield "its log-probs are " + (
            "the same, bit by bit"
            if exact
            else f"the same up to {difference:.2g} nats in the sum: their last bits depend on what "
            "else is in an engine's batch"
        )


def _source(step: Step) -> tuple[Path, bool]:
    """Where the weights are, and whether that is a checkpoint.

    Raises:
        UserError: They are not kept.
    """
    versions = [version for version, _ in spans_of(step)]
    if len(versions) > 1:
        raise UserError(
            f"--regenerate: weights versions {', '.join(map(str, versions))} sampled parts of this "
            f"response (rollout.schedule={step.config.rollout.schedule.name}); only samples of one "
            "version are drawn again"
        )
    version, run_dir = int(step.row["weights_version"]), step.files.folder
    if version == 0:
        return Path(step.config.model.path), False
    checkpoints = run_dir / "checkpoints"
    checkpoint = checkpoints / f"step_{version:06d}"
    if checkpoint.is_dir():
        return checkpoint, True
    if step.files.is_finished and version == step.files.last_step:
        return run_dir / "hf", False
    kept = sorted(path.name for path in checkpoints.glob("step_*") if path.is_dir())
    raise UserError(
        f"--regenerate: the sample came from the weights after step {version}, and {checkpoints} "
        f"has {', '.join(kept) or 'no checkpoint'}; samples of the step after a checkpoint can be "
        "drawn again (runner.save_every, runner.keep_checkpoints)"
    )


def _with_weights(step: Step, folder: Path) -> Config:
    """The settings with ``model.path`` a folder of the weights, and one engine on this machine."""
    from rlmath.evaluation.source import with_checkpoint

    source, is_checkpoint = _source(step)
    config = step.config
    if is_checkpoint:
        ours = dataclasses.replace(config.eval, checkpoint=str(source))
        config = with_checkpoint(dataclasses.replace(config, eval=ours), folder / "model")
    else:
        model = dataclasses.replace(config.model, path=str(source))
        config = dataclasses.replace(config, model=model)
    return dataclasses.replace(
        config,
        runner=dataclasses.replace(config.runner, run_dir=str(folder)),
        cluster=dataclasses.replace(config.cluster, nodes=1, ray_address=None),
        rollout=dataclasses.replace(config.rollout, engines=1),
    )


def _sample(config: Config, step: Step, folder: Path) -> Sample:
    from rlmath.cluster.placement import placed
    from rlmath.cluster.session import ray_session
    from rlmath.config.arithmetic import resolve_layout
    from rlmath.config.schema import Device
    from rlmath.device import choose_platform
    from rlmath.rollout.pool import RolloutPool
    from rlmath.training.session import engine_spec

    request = Request(
        problem_id=step.address.problem,
        index=step.address.index,
        prompt_token_ids=prompt_tokens(step),
        max_tokens=max_response_tokens(step.config, admitted_in(step)),
        temperature=config.rollout.temperature,
        top_p=1.0,
        seed=int(step.row["seed"]),
        ignore_eos=config.rollout.ignore_eos,
    )
    platform = choose_platform(config.cluster.device.value, "any")
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
            (sample,) = pool.generate([request], lambda _: [])
    return sample
