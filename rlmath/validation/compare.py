"""Comparison of log-probs that Megatron, ``transformers`` and vLLM compute from the same weights.

Teacher-forced: the sequences are given, and each side scores every response token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.actor.model import ModelSettings
from rlmath.actor.policy import MegatronActor
from rlmath.actor.settings import ActorSettings
from rlmath.algorithms.mismatch import measure
from rlmath.device import Platform
from rlmath.errors import WeightsError
from rlmath.model.parallel import Layout
from rlmath.model.precision import log_prob_limit
from rlmath.model.spec import read_model_spec
from rlmath.types import TrainingBatch
from rlmath.validation.find_divergence import TOLERANCES, first_difference
from rlmath.validation.hf_log_probs import hf_log_probs
from rlmath.validation.hooks import hf_values, megatron_values
from rlmath.validation.processes import on_ranks


@dataclass(frozen=True)
class Comparison:
    """Two sides' log-probs of the same ``R`` tokens."""

    names: tuple[str, str]
    log_probs: tuple[Tensor, Tensor]  # [R] float32 each, in nats.
    places: list[tuple[int, int]]  # Sequence, and position in its response, of each token.
    tokens: Tensor  # [R] int64.

    def metrics(self) -> dict[str, float]:
        """``mean_exp_abs_diff`` and related metrics, and ``pearson``, the correlation."""
        first, second = (values.double() for values in self.log_probs)
        pearson = torch.corrcoef(torch.stack([first, second]))[0, 1]
        return {**measure(*self.log_probs).metrics(), "pearson": float(pearson)}

    def worst(self) -> str:
        """A description of the token on which the two sides differ most."""
        first, second = self.log_probs
        at = int((first - second).abs().argmax())
        sequence, position = self.places[at]
        return (
            f"sequence {sequence}, response position {position}, token {int(self.tokens[at])}: "
            f"{float(first[at]):.6f} and {float(second[at]):.6f}"
        )


@dataclass(frozen=True)
class AlignmentReport:
    comparisons: list[Comparison]
    limit: float  # Largest allowed mean_exp_abs_diff.
    difference: str | None

    @property
    def good(self) -> bool:
        """Whether every comparison is within the limit; NaN is not."""
        return self.good_with("megatron")

    def good_with(self, name: str) -> bool:
        """Whether Megatron's comparisons with this side are within the limit."""
        return all(
            c.metrics()["mean_exp_abs_diff"] <= self.limit
            for c in self.comparisons
            if name in c.names
        )

    def check(self) -> None:
        """Raise ``WeightsError`` unless every comparison is within the limit."""
        for comparison in self.comparisons:
            value = comparison.metrics()["mean_exp_abs_diff"]
            if not value <= self.limit:
                place = f"; they diverge at {self.difference}" if self.difference else ""
                raise WeightsError(
                    f"{' and '.join(comparison.names)}: mean exp|difference| of log-probs is "
                    f"{value:.6f}, above {self.limit:.6g}; worst at {comparison.worst()}{place}"
                )

    def table(self) -> str:
        lines = [
            f"{'':<24} {'mean exp|d|':>12} {'max |d|':>10} {'k3':>11} {'pearson':>9}  "
            f"(limit {self.limit:.6g})"
        ]
        for comparison in self.comparisons:
            m = comparison.metrics()
            lines.append(
                f"{' - '.join(comparison.names):<24} {m['mean_exp_abs_diff']:>12.7f} "
                f"{m['max_abs_diff']:>10.2e} {m['k3']:>11.2e} {m['pearson']:>9.6f}"
            )
            lines.append(f"    worst at {comparison.worst()}")
        if self.difference:
            lines.append(f"Megatron and transformers part at {self.difference}")
        return "\n".join(lines)

    def as_json(self) -> str:
        content: dict[str, Any] = {
            "limit": self.limit,
            "good": self.good,
            "difference": self.difference,
            "comparisons": [
                {"names": c.names, "worst": c.worst(), **c.metrics()} for c in self.comparisons
            ],
        }
        return json.dumps(content, indent=1)

    def plot(self, path: str | Path) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5 * len(self.comparisons), 5), layout="constrained")
        FigureCanvasAgg(figure)
        for number, comparison in enumerate(self.comparisons, 1):
            axes = figure.add_subplot(1, len(self.comparisons), number)
            first, second = comparison.log_probs
            low = float(min(first.min(), second.min()))
            axes.plot([low, 0], [low, 0], linewidth=0.5, color="gray")
            axes.scatter(first, second, s=4)
            axes.set_xlabel(f"log-prob, {comparison.names[0]}")
            axes.set_ylabel(f"log-prob, {comparison.names[1]}")
            axes.set_title(f"mean exp|d| = {comparison.metrics()['mean_exp_abs_diff']:.7f}")
        figure.savefig(path, dpi=120)


def compare_on_ranks(
    folder: str | Path,
    batch: TrainingBatch,
    layout: Layout,
    dtype: torch.dtype,
    others: dict[str, Tensor] | None = None,
    sequence_parallel: bool = False,
) -> AlignmentReport:
    """Compare Megatron, with a process for each rank, with ``transformers`` and further sides.
    ``dtype``: type of Megatron's weights and activations; ``transformers`` has float32. Raises
    UserError: a rank failed, or cannot have its part of the model."""
    settings = ActorSettings(
        model_path=str(folder),
        # Whole logits, which a hook can read.
        model=ModelSettings(dtype, sequence_parallel=sequence_parallel, logits="whole"),
        optimizer=None,
        temperature=1.0,
        max_tokens_per_microbatch=4096,
        max_sequence_length=read_model_spec(folder).max_positions,
    )
    return on_ranks(layout, _compare_on_rank, (settings, layout, batch, others))


def _compare_on_rank(
    platform: Platform,
    settings: ActorSettings,
    layout: Layout,
    batch: TrainingBatch,
    others: dict[str, Tensor] | None,
) -> AlignmentReport | None:
    actor = MegatronActor(settings, layout, platform)
    return compare(actor, settings.model_path, batch, others)


def compare(
    actor: MegatronActor,
    folder: str | Path,
    batch: TrainingBatch,
    others: dict[str, Tensor] | None = None,
) -> AlignmentReport | None:
    found, noisy = gathered_log_probs(actor, batch), gathered_log_probs(actor, batch, "noise")
    dtype, report = actor.settings.model.dtype, None
    if dist.get_rank() == 0:
        excess = measure(found, noisy).metrics()["mean_exp_abs_diff"] - 1
        limit = log_prob_limit(dtype is torch.float32, actor.spec.experts > 0, excess)
        sides = {"transformers": hf_log_probs(folder, batch, 1.0)} | (others or {})
        comparisons = [
            comparison(("megatron", name), found, values, batch) for name, values in sides.items()
        ]
        report = AlignmentReport(comparisons, limit, None)
    # All ranks take part in the search.
    search = [report is not None and not report.good_with("transformers")]
    dist.broadcast_object_list(search, src=0)
    if not search[0]:
        return report
    first = batch.tokens[: int(batch.sequence_lengths[0])].tolist()
    ours = megatron_values(actor, first)
    if report is None:
        return None
    place = first_difference(ours, hf_values(folder, first), actor.spec, dtype)
    alike = f"no layer: all values are within {TOLERANCES[dtype]:g} of the largest"
    return replace(report, difference=place or alike)


def comparison(
    names: tuple[str, str], first: Tensor, second: Tensor, batch: TrainingBatch
) -> Comparison:
    """Two sides' log-probs ``[R]`` of the batch's response tokens."""
    return Comparison(names, (first, second), *_responses(batch))


def gathered_log_probs(actor: MegatronActor, batch: TrainingBatch, name: str = "policy") -> Tensor:
    """Log-probs ``[R]`` of the batch by a forward pass of this name, on every rank, from those that
    report. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, actor.log_probs(batch, name))
    result = torch.full((int(batch.response_lengths.sum()),), torch.nan)
    for values in gathered:
        if values is not None:
            result[values.response_rows] = values.log_probs
    return result


def _responses(batch: TrainingBatch) -> tuple[list[tuple[int, int]], Tensor]:
    places: list[tuple[int, int]] = []
    tokens = []
    start = 0
    lengths = zip(batch.prompt_lengths.tolist(), batch.sequence_lengths.tolist(), strict=True)
    for sequence, (prompt, size) in enumerate(lengths):
        tokens.append(batch.tokens[start + prompt : start + size])
        places += [(sequence, position) for position in range(size - prompt)]
        start += size
    return places, torch.cat(tokens)
