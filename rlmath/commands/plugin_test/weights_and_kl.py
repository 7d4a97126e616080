from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.algorithms.aggregation import AGGREGATIONS, denominator, sequence_weights
from rlmath.algorithms.kl import kl_estimate
from rlmath.commands.plugin_test.finding import Finding, differs, findings, not_finite, repeats

COUNTS, GROUPS = (3, 1, 0, 5, 2, 2, 4), (9, 9, 9, 2, 2, 5, 5)
LENGTH = 30
_OF_ORDER, _OF_DIFFERENCES, _STEP = 1e-12, 1e-6, 1e-6
FAR = 100.0


def check_aggregation(name: str) -> Iterator[Finding]:
    part = _Aggregation(name)
    return findings(
        {
            "weights are numbers from 0": part.numbers,
            "sequences without tokens make no difference": part.empty,
            "order of sequences makes no difference": part.order,
            "whole: parts of a minibatch add up": part.parts,
            "deterministic": repeats(part.run),
        }
    )


@dataclass(frozen=True)
class _Aggregation:
    name: str

    def run(self, rows: Tensor | None = None) -> Tensor:
        counts, groups = torch.tensor(COUNTS), torch.tensor(GROUPS)
        at = torch.arange(len(counts)) if rows is None else rows
        return sequence_weights(self.name, counts[at], groups[at], LENGTH)

    def total(self, rows: Tensor) -> float:
        return denominator(self.name, torch.tensor(COUNTS)[rows], torch.tensor(GROUPS)[rows])

    def numbers(self) -> Iterator[str]:
        found, has_tokens = self.run(), torch.tensor(COUNTS) > 0
        if found.shape != has_tokens.shape or found.dtype is not torch.float64:
            yield f"of {len(COUNTS)} sequences it is {list(found.shape)} {found.dtype}"
        elif (problem := not_finite(found)) or bool((found < 0).any()):
            yield f"weights {problem or found.tolist()}"
        elif not float(found[has_tokens].sum()) > 0:
            yield "all weights are 0"

    def empty(self) -> Iterator[str]:
        rows = (torch.tensor(COUNTS) > 0).nonzero().flatten()
        if problem := differs(self.run(rows), self.run()[rows], relative=_OF_ORDER):
            yield f"without a sequence that has no token in the loss, weights differ {problem}"

    def order(self) -> Iterator[str]:
        rows = torch.randperm(len(COUNTS), generator=torch.Generator().manual_seed(0))
        if problem := differs(self.run(rows), self.run()[rows], relative=_OF_ORDER):
            yield f"in another order weights differ {problem}"

    def parts(self) -> Iterator[str]:
        everything, groups = torch.arange(len(COUNTS)), torch.tensor(GROUPS)
        has_tokens = torch.tensor(COUNTS) > 0
        whole = self.run() * self.total(everything)
        for group in groups.unique():
            rows = ((groups == group) & has_tokens).nonzero().flatten()
            part = self.run(rows) * self.total(rows)
            if problem := differs(part, whole[rows], relative=_OF_ORDER):
                yield (
                    f"whole={AGGREGATIONS.traits(self.name).whole.name}: weights times it have to "
                    f"be the same in a part as in the whole minibatch; of group {int(group)} they "
                    f"differ {problem}"
                )


def check_kl_estimator(name: str) -> Iterator[Finding]:
    part = _Kl(name)
    return findings(
        {
            "0 where policy and reference agree": part.equal,
            "gradient": part.gradient,
            f"finite at differences of +-{FAR:g}": part.far,
            "each token for itself": part.elementwise,
            "deterministic": repeats(lambda: part.run(*(one.detach() for one in part.inputs()))),
        }
    )


@dataclass(frozen=True)
class _Kl:
    name: str

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        old = -3.0 * torch.rand(9, dtype=torch.float64, generator=draw) - 0.05
        shifts = torch.randn(2, 9, dtype=torch.float64, generator=draw)
        return (old + 0.3 * shifts[0]).requires_grad_(), old + 0.5 * shifts[1], old

    def run(self, log_probs: Tensor, reference: Tensor, old: Tensor) -> Tensor:
        return kl_estimate(self.name, log_probs, reference, old)

    def equal(self) -> Iterator[str]:
        log_probs, _, old = self.inputs()
        found = self.run(log_probs, log_probs.detach(), old).detach()
        if problem := differs(found, torch.zeros_like(old)):
            yield f"its value is not 0 {problem}"

    def gradient(self) -> Iterator[str]:
        log_probs, reference, old = self.inputs()
        (gradient,) = torch.autograd.grad(self.run(log_probs, reference, old).sum(), log_probs)
        with torch.no_grad():
            ends = [self.run(log_probs + step, reference, old) for step in (_STEP, -_STEP)]
        if problem := differs(
            gradient, (ends[0] - ends[1]) / (2 * _STEP), relative=_OF_DIFFERENCES
        ):
            yield f"of autograd and of finite differences differ, token {problem}"

    def far(self) -> Iterator[str]:
        for shift in (FAR, -FAR):
            old = self.inputs()[2].float()
            log_probs = (old + shift).requires_grad_()
            for reference in (old, old - 2 * shift):
                found = self.run(log_probs, reference, old)
                (gradient,) = torch.autograd.grad(found.sum(), log_probs)
                if problem := not_finite(torch.cat([found.detach(), gradient])):
                    yield f"at {shift:+g} nats value or gradient is not finite, {problem}"

    def elementwise(self) -> Iterator[str]:
        inputs = [one.detach() for one in self.inputs()]
        whole = self.run(*inputs)
        if whole.shape != inputs[0].shape:
            yield f"of {len(inputs[0])} tokens it has shape {list(whole.shape)}"
        alone = torch.cat([self.run(*(one[i : i + 1] for one in inputs)) for i in range(9)])
        if problem := differs(alone, whole, relative=_OF_ORDER):
            yield f"of one token alone it differs, token {problem}"
