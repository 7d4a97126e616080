"""The invariants of a policy loss, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from rlmath.algorithms.aggregation import sequence_weights
from rlmath.algorithms.losses import LOSSES, LossInputs, LossOutput, get_loss
from rlmath.commands.plugin_test.finding import Finding, differs, findings, not_finite, repeats
from rlmath.utils.setting import Options

LENGTHS = (7, 1, 12, 4)
_STEP = 1e-6
# Tolerances of central differences in float64, and of sums in another order.
_OF_DIFFERENCES, _OF_ORDER = 1e-6, 1e-12
FAR = 100.0


def check_loss(name: str) -> Iterator[Finding]:
    part = _Part(name, LOSSES.options(name)())
    return findings(
        {
            "result has one number per token": part.shapes,
            "gradient": part.gradient,
            "masked tokens are not read": part.masked_tokens,
            "policy gradient at ratio 1": part.first_minibatch,
            f"finite at log-ratios of +-{FAR:g}": part.far,
            "equal over micro-batches": part.micro_batches,
            "metrics do not depend on the data": part.metric_names,
            "deterministic": repeats(lambda: part.loss_and_gradient(made_inputs())),
            "inputs are left alone": part.inputs_unchanged,
        }
    )


def made_inputs(seed: int = 0, spread: float = 0.3) -> LossInputs:
    """Inputs of four sequences with token log-ratios around ``spread`` nats."""
    draw = torch.Generator().manual_seed(seed)
    counts = torch.tensor(LENGTHS)
    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), counts)
    tokens = int(counts.sum())
    old = -3.0 * torch.rand(tokens, dtype=torch.float64, generator=draw) - 0.05
    shift = spread * torch.randn(tokens, dtype=torch.float64, generator=draw)
    mask = torch.rand(tokens, generator=draw) > 0.25
    mask[ids == 1] = True  # A sequence of one token has it.
    of_loss = torch.zeros(len(LENGTHS), dtype=torch.int64).index_add(0, ids, mask.long())
    weights = sequence_weights("seq_mean_token_mean", of_loss, torch.arange(len(LENGTHS)) // 2)
    advantages = torch.tensor([1.3, -0.7, -1.1, 0.4], dtype=torch.float64)
    return LossInputs(
        log_probs=(old + shift).requires_grad_(),
        old_log_probs=old,
        engine_log_probs=old + 0.01 * shift,
        advantages=advantages[ids],
        mask=mask,
        weights=weights[ids],
        sequence_ids=ids,
        num_sequences=len(LENGTHS),
    )


@dataclasses.dataclass(frozen=True)
class _Part:
    name: str
    options: Options

    def run(self, inputs: LossInputs) -> LossOutput:
        return get_loss(self.name)(inputs, self.options)

    def loss_and_gradient(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        loss = self.run(inputs).loss
        if not loss.requires_grad:
            raise ValueError("the loss has no gradient: nothing in it depends on log_probs")
        return loss.detach(), torch.autograd.grad(loss, inputs.log_probs)[0]

    def shapes(self) -> Iterator[str]:
        for lengths, inputs in ((sum(LENGTHS), made_inputs()), (0, _select(made_inputs(), []))):
            found = self.run(inputs)
            if found.token_losses.shape != (lengths,):
                yield f"{lengths} tokens: the loss has shape {list(found.token_losses.shape)}"
            elif found.loss.dtype is not torch.float64:
                yield f"of float64 log-probs the loss is {found.loss.dtype}"

    def gradient(self) -> Iterator[str]:
        inputs = made_inputs(seed=3)
        _, gradient = self.loss_and_gradient(inputs)
        if problem := not_finite(gradient):
            yield f"gradient {problem}"
        if LOSSES.traits(self.name).stops_gradient:
            return
        wanted = torch.zeros_like(gradient)
        with torch.no_grad():
            for token in range(len(gradient)):
                ends = []
                for sign in (1.0, -1.0):
                    moved = inputs.log_probs.detach().clone()
                    moved[token] += sign * _STEP
                    ends.append(self.run(dataclasses.replace(inputs, log_probs=moved)).loss)
                wanted[token] = (ends[0] - ends[1]) / (2 * _STEP)
        if problem := differs(gradient, wanted, relative=_OF_DIFFERENCES):
            yield (
                f"of autograd and of finite differences differ, token {problem}; where the loss "
                "stops a gradient by intent, declare LossTraits(stops_gradient=True)"
            )

    def masked_tokens(self) -> Iterator[str]:
        inputs = made_inputs()
        clean = self.loss_and_gradient(_with_masked(inputs, 0.0))
        for value in (torch.nan, torch.inf, -1e30):
            found = self.loss_and_gradient(_with_masked(inputs, value))
            for what, got, wanted in zip(("loss", "gradient"), found, clean, strict=True):
                if problem := differs(got, wanted):
                    yield f"with {value} planted at masked tokens the {what} differs {problem}"

    def first_minibatch(self) -> Iterator[str]:
        inputs = made_inputs(spread=0.0)
        _, gradient = self.loss_and_gradient(inputs)
        wanted = -(inputs.token_weights() * inputs.token_advantages())
        for sign, word in ((1.0, "positive"), (-1.0, "negative")):
            which = inputs.mask & (inputs.advantages * sign > 0)
            factors = gradient[which] / wanted[which]
            low, high = float(factors.min()), float(factors.max())
            if low < 0 or high - low > _OF_DIFFERENCES * max(abs(high), 1.0):
                yield (
                    f"old and current policy are equal, so a token's gradient has to be -weight x "
                    f"advantage times one factor that is not negative; for {word} advantages the "
                    f"factors are {low:.9g} to {high:.9g}"
                )
        if not gradient.any():
            yield "the gradient is 0 for all tokens"

    def far(self) -> Iterator[str]:
        for shift in (FAR, -FAR):
            inputs = made_inputs()
            log_probs = (inputs.old_log_probs + shift).requires_grad_()
            for dtype in (torch.float64, torch.float32):
                cast = _cast(dataclasses.replace(inputs, log_probs=log_probs), dtype)
                for what, values in zip(
                    ("loss", "gradient"), self.loss_and_gradient(cast), strict=True
                ):
                    if problem := not_finite(values):
                        yield f"at a log-ratio of {shift:+g} in {dtype} the {what} is not finite, "
                        f"token {problem}"

    def micro_batches(self) -> Iterator[str]:
        inputs = made_inputs()
        whole = self.loss_and_gradient(inputs)
        for cut in ([[0], [1], [2], [3]], [[2, 0], [3, 1]], [[3, 2, 1, 0]]):
            loss, gradient = torch.zeros_like(whole[0]), torch.zeros_like(whole[1])
            for sequences in cut:
                part = _select(inputs, sequences)
                found = self.loss_and_gradient(part)
                loss, rows = loss + found[0], _rows(inputs, sequences)
                gradient[rows] = found[1]
            for what, got, wanted in (("loss", loss, whole[0]), ("gradient", gradient, whole[1])):
                if problem := differs(got, wanted, relative=_OF_ORDER):
                    yield f"in micro-batches of the sequences {cut} the {what} differs {problem}"

    def metric_names(self) -> Iterator[str]:
        wanted = set(self.run(made_inputs()).metric_sums)
        for words, inputs in (
            ("no tokens", _select(made_inputs(), [])),
            ("a log-ratio of 0", made_inputs(spread=0.0)),
            ("log-ratios of 3", made_inputs(spread=3.0)),
        ):
            found = set(self.run(inputs).metric_sums)
            if found != wanted:
                yield f"with {words} it counts {sorted(found)}, else {sorted(wanted)}"

    def inputs_unchanged(self) -> Iterator[str]:
        inputs, kept = made_inputs(), made_inputs()
        self.loss_and_gradient(inputs)
        for field in dataclasses.fields(inputs):
            now, before = getattr(inputs, field.name), getattr(kept, field.name)
            if isinstance(now, Tensor) and (problem := differs(now.detach(), before.detach())):
                yield f"inputs.{field.name} is changed {problem}"


def _replace(inputs: LossInputs, change: partial[Tensor], **more: int) -> LossInputs:
    values = {one.name: getattr(inputs, one.name) for one in dataclasses.fields(inputs)}
    changed = {name: change(one) for name, one in values.items() if isinstance(one, Tensor)}
    changed["log_probs"] = changed["log_probs"].detach().requires_grad_()
    return dataclasses.replace(inputs, **changed, **more)  # type: ignore[arg-type]


def _cast(inputs: LossInputs, dtype: torch.dtype) -> LossInputs:
    def cast(values: Tensor) -> Tensor:
        return values.to(dtype) if values.is_floating_point() else values

    return _replace(inputs, partial(cast))


def _with_masked(inputs: LossInputs, value: float) -> LossInputs:
    def plant(values: Tensor) -> Tensor:
        return torch.where(inputs.mask, values, value) if values.is_floating_point() else values

    return _replace(inputs, partial(plant))


def _rows(inputs: LossInputs, sequences: list[int]) -> Tensor:
    rows = [(inputs.sequence_ids == one).nonzero().flatten() for one in sequences]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *rows])


def _select(inputs: LossInputs, sequences: list[int]) -> LossInputs:
    rows = _rows(inputs, sequences)
    selected = _replace(inputs, partial(lambda values: values[rows]))
    lengths = torch.tensor([LENGTHS[one] for one in sequences], dtype=torch.int64)
    ids = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    return dataclasses.replace(selected, sequence_ids=ids, num_sequences=len(sequences))
