from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmath.algorithms.correction import CorrectionConfig, correct
from rlmath.commands.plugin_test.finding import Finding, differs, findings, not_finite, repeats

LENGTHS = (5, 1, 8, 3)
FAR = 100.0
_OF_ORDER = 1e-12


def check_correction(name: str) -> Iterator[Finding]:
    part = _Part(CorrectionConfig(name))
    return findings(
        {
            "weights are numbers from 0": part.numbers,
            "1 where engine and trainer agree": part.equal,
            f"finite at log-ratios of +-{FAR:g}": part.far,
            "each sequence for itself": part.alone,
            "deterministic": repeats(lambda: part.weights(*part.inputs())),
        }
    )


@dataclass(frozen=True)
class _Part:
    settings: CorrectionConfig

    def inputs(self, spread: float = 0.02) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        lengths, tokens = torch.tensor(LENGTHS), sum(LENGTHS)
        engine = -3.0 * torch.rand(tokens, dtype=torch.float64, generator=draw)
        trainer = engine + spread * torch.randn(tokens, dtype=torch.float64, generator=draw)
        return trainer, engine, torch.rand(tokens, generator=draw) > 0.2, lengths

    def weights(self, trainer: Tensor, engine: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        return correct(trainer, engine, mask, lengths, self.settings).weights

    def numbers(self) -> Iterator[str]:
        for spread in (0.02, 1.0):
            trainer, engine, mask, lengths = self.inputs(spread)
            found = self.weights(trainer, engine, mask, lengths)
            if found.shape != mask.shape:
                yield f"of {mask.numel()} tokens it is {list(found.shape)}"
            elif (problem := not_finite(found)) or bool((found < 0).any()):
                yield f"weights {problem or found.tolist()}"

    def equal(self) -> Iterator[str]:
        _, engine, mask, lengths = self.inputs()
        if problem := differs(self.weights(engine, engine, mask, lengths), mask.double()):
            yield f"of equal log-probs the weight is not 1, token {problem}"

    def far(self) -> Iterator[str]:
        _, engine, mask, lengths = self.inputs()
        for shift in (FAR, -FAR):
            if problem := not_finite(self.weights(engine + shift, engine, mask, lengths)):
                yield f"at a log-ratio of {shift:+g} a weight is not finite, token {problem}"

    def alone(self) -> Iterator[str]:
        trainer, engine, mask, lengths = self.inputs()
        whole = self.weights(trainer, engine, mask, lengths)
        ends = torch.cumsum(lengths, 0).tolist()
        for index, end in enumerate(ends):
            rows = slice(end - LENGTHS[index], end)
            found = self.weights(
                trainer[rows], engine[rows], mask[rows], lengths[index : index + 1]
            )
            if problem := differs(found, whole[rows], relative=_OF_ORDER):
                yield f"of sequence {index} alone the weights differ, token {problem}"
