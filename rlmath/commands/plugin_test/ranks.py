"""An update with the parts of a plug-in on tiny real ranks, in several layouts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rlmath.actor.group import ActorGroup
from rlmath.actor.model import ModelSettings
from rlmath.actor.plan import StepPlan
from rlmath.actor.settings import ActorSettings
from rlmath.algorithms.advantages import AdvantageSettings, sequence_advantages
from rlmath.algorithms.correction import CorrectionConfig
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.cluster.session import ray_session
from rlmath.commands.plugin_test.finding import Finding
from rlmath.config.schema import ClusterConfig, OptimizerConfig
from rlmath.model.parallel import Layout
from rlmath.model.tiny import make_tiny_model
from rlmath.types import TrainingBatch

# With the tokens of a micro-batch.
_ALONE = Layout(), 64
LAYOUTS = {
    "tensor 2 x data 2, micro-batches of 64 tokens": (Layout(2, 1, 2), 64),
    "pipeline 2 x context 2, micro-batches of 32 tokens": (Layout(1, 2, 1, context_parallel=2), 32),
}
_SEQUENCES, _GROUP, _MINIBATCHES = 8, 4, 2
# Tolerances of float32 sums in another order.
_RELATIVE, _ABSOLUTE = 1e-4, 1e-6


@dataclass(frozen=True)
class Update:
    """An update with a part of a plug-in, and rlmath's defaults for the rest."""

    plan: StepPlan
    advantage: AdvantageSettings = field(default_factory=AdvantageSettings)


def check_ranks(updates: dict[str, Update], folder: Path) -> Iterator[tuple[str, Finding]]:
    """Compare an update's metrics over layouts and micro-batches."""
    model = folder / "model"
    if not (model / "config.json").is_file():
        make_tiny_model(model, seed=0)
    batch = made_batch()
    with ray_session(ClusterConfig(object_store_mib=80)):
        order = torch.randperm(_SEQUENCES, generator=torch.Generator().manual_seed(0)).tolist()
        whole = {
            name: dataclasses.replace(one, plan=dataclasses.replace(one.plan, minibatches=1))
            for name, one in updates.items()
        }
        with _ranks(_ALONE, model, folder / "alone") as group:
            alone = _update_twice(group, batch, updates)
            wanted = _update_twice(group, batch, whole)
            moved = _update_twice(group, batch.select(order), whole)
        problems: dict[str, list[str]] = {name: [] for name in updates}
        for number, (case, layout) in enumerate(LAYOUTS.items()):
            with _ranks(layout, model, folder / str(number)) as group:
                found = _update_twice(group, batch, updates)
            for name in updates:
                problems[name] += _differences(case, found[name][0], alone[name][0])
    for name, (first, again) in alone.items():
        yield name, Finding("equal over layouts and micro-batches", "; ".join(problems[name]))
        said = _differences(f"sequences in the order {order}", moved[name][0], wanted[name][0])
        yield name, Finding("equal over the order of a minibatch", "; ".join(said))
        repeated = "; ".join(_differences("a second update", again, first, 0.0, 0.0))
        yield name, Finding("an update repeats to the last bit", repeated)


def made_batch() -> TrainingBatch:
    """Two groups of four sequences of random tokens, some of which are masked. Engine and trainer
    are apart."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.full((_SEQUENCES,), 5)
    responses = torch.tensor([3, 11, 6, 9, 14, 4, 8, 5])
    tokens, total = int((prompts + responses).sum()), int(responses.sum())
    rewards = torch.rand(_SEQUENCES, generator=draw)
    log_probs = -5.0 - torch.rand(total, generator=draw)
    mask = torch.rand(total, generator=draw) > 0.1
    return TrainingBatch(
        tokens=torch.randint(4, 100, (tokens,), generator=draw, dtype=torch.int32),
        prompt_lengths=prompts,
        response_lengths=responses,
        weights_versions=torch.zeros(_SEQUENCES, dtype=torch.int64),
        group_ids=torch.arange(_SEQUENCES) // _GROUP,
        rewards=rewards,
        loss_mask=mask,
        engine_log_probs=log_probs + 0.3 * torch.randn(total, generator=draw),
        old_log_probs=log_probs,
        ref_log_probs=log_probs + 0.05,
    )


def update_with(
    *,
    loss: str | None = None,
    advantage: str | None = None,
    correction: str | None = None,
    aggregation: str | None = None,
    kl_estimator: str | None = None,
) -> Update:
    objective = ObjectiveSettings(kl_coef=0.1)
    if loss is not None:
        objective = dataclasses.replace(objective, loss=loss)
    if kl_estimator is not None:
        objective = dataclasses.replace(objective, kl_estimator=kl_estimator)
    made = StepPlan(
        objective=objective,
        minibatches=_MINIBATCHES,
        constant_length=30,
        aggregation=aggregation or StepPlan.aggregation,
        correction=None if correction is None else CorrectionConfig(correction),
    )
    return Update(made, AdvantageSettings(advantage or AdvantageSettings.name))


@contextlib.contextmanager
def _ranks(layout: tuple[Layout, int], model: Path, logs: Path) -> Iterator[ActorGroup]:
    """Ranks of a layout, with the tokens of a micro-batch; their weights stay as they are."""
    settings = ActorSettings(
        model_path=str(model),
        model=ModelSettings(torch.float32, sequence_parallel=layout[0].tensor_parallel > 1),
        optimizer=OptimizerConfig(lr=0.0, warmup_steps=0),
        temperature=1.0,
        max_tokens_per_microbatch=layout[1],
        max_sequence_length=64,
        reference="none",
    )
    group = ActorGroup(settings, layout[0], device="cpu", seed=0, num_threads=1, log_dir=str(logs))
    with contextlib.ExitStack() as stack:
        stack.callback(group.shutdown)
        group.launch()
        group.wait_until_ready()
        yield group


def _update_twice(
    group: ActorGroup, batch: TrainingBatch, updates: dict[str, Update]
) -> dict[str, tuple[list[dict[str, float]], list[dict[str, float]]]]:
    """Metrics of each minibatch of each update, done twice."""
    return {
        name: (_minibatches(group, batch, update), _minibatches(group, batch, update))
        for name, update in updates.items()
    }


def _minibatches(group: ActorGroup, batch: TrainingBatch, update: Update) -> list[dict[str, float]]:
    advantages = sequence_advantages(
        batch.rewards, batch.group_ids, batch.loss_token_counts, update.advantage
    )
    group.run_part(batch, update.plan)
    result = group.finish_step(update.plan, advantages).policy
    assert result is not None
    return result.minibatches


def _differences(
    case: str,
    found: list[dict[str, float]],
    wanted: list[dict[str, float]],
    relative: float = _RELATIVE,
    absolute: float = _ABSOLUTE,
) -> list[str]:
    """The first metric of a minibatch that differs."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for key in sorted(other):
            if not abs(one[key] - other[key]) <= absolute + relative * abs(other[key]):
                return [
                    f"{case}: {key} of minibatch {number} is {one[key]:.9g}, not {other[key]:.9g}"
                ]
    return []
