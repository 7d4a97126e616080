"""Faults in a running engine, and what the gate, the fingerprints and the comparison of constants
say of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rlmath.algorithms.alignment import Alignment
from rlmath.algorithms.mismatch import measure
from rlmath.commands.drill.in_engines import other_epsilon, other_rope, put_back
from rlmath.commands.selfcheck import parts
from rlmath.commands.selfcheck.node import Node
from rlmath.errors import WeightsError
from rlmath.model.spec import read_model_spec
from rlmath.rollout.weight_sync import compare_weights, sync_weights
from rlmath.training.checks.engine_constants import check_constants
from rlmath.training.gate import AlignmentError, Gate
from rlmath.training.opening import Running, open_training
from rlmath.types import TrainingBatch

SAMPLES = 32


def margins_of(name: str, folder: Path, dtype: str, made: str) -> list[dict[str, Any]]:
    """All rows of one model in one type.

    Args:
        name: In the rows.
        folder: Hugging Face folder of the model.
        dtype: ``model.dtype``.
        made: A folder for the run's files.
    """
    node = Node("cpu", 0, "", 0.0, str(folder), made)
    overrides = [f"model.dtype={dtype}", "actor.optimizer.lr=2e-4", "actor.tensor_parallel=2"]
    if read_model_spec(folder).experts:
        overrides.append("actor.sequence_parallel=true")
    config = parts.settings(node, f"{name}-{dtype}", 0, overrides)
    with open_training(config) as run:
        return list(Margins(name, node, dtype, run).rows())


# -- faults: each runs in a vLLM worker --------------------------------------------------------


def bit_flip(worker: Any) -> None:
    """The highest bit of one mantissa in a packed matrix of gate and up."""
    _change_feed_forward(worker, _flip)


def swap_gate_and_up(worker: Any) -> None:
    """Gate and up of one layer change places while the engine packs."""
    _change_feed_forward(worker, lambda w: w.roll(w.shape[0] // 2, 0))


def _flip(weight: torch.Tensor) -> torch.Tensor:
    integers, bit = (torch.int32, 22) if weight.element_size() == 4 else (torch.int16, 6)
    weight.view(integers)[3, 5] ^= 1 << bit
    return weight


def _change_feed_forward(worker: Any, change: Callable[[Any], Any]) -> None:
    """Change the second layer's matrix of gate and up, or those of all its experts."""
    modules = dict(worker.model_runner.get_model().named_modules())
    stem = "model.layers.1.mlp"
    if f"{stem}.gate_up_proj" in modules:
        _change_packed(worker, f"{stem}.gate_up_proj", change)
        return
    from vllm import _custom_ops as ops

    from rlmath.engines.transports.packed import unpack

    (module,) = (
        one
        for name, one in modules.items()
        if name.startswith(f"{stem}.experts") and hasattr(one, "w13_weight")
    )
    isa = module.quant_method.moe_kernel.fused_experts.isa

    def pack(one: Any) -> Any:
        return ops.cpu_prepack_moe_weight(one, isa)

    held = module.w13_weight.data
    experts = unpack(held, pack)
    assert experts is not None
    experts = torch.stack([change(one.clone()) for one in experts])
    held.copy_(pack(experts))


def _change_packed(worker: Any, name: str, change: Callable[[Any], Any]) -> None:
    from rlmath.engines.transports.cpu_load import _pack
    from rlmath.engines.transports.packed import columns_of, is_packed

    module = dict(worker.model_runner.get_model().named_modules())[name]
    if not is_packed(module, "weight"):
        # On a CPU without AVX-512 vLLM packs no bfloat16.
        module.weight.data.copy_(change(module.weight.data.clone()))
        return
    columns = columns_of(module, module.input_size_per_partition, module.weight.dtype)
    weight = torch.cat([part for _, part in columns], 1).contiguous().clone()
    with torch.inference_mode():
        _pack(module, "weight", [change(weight)])


# ----------------------------------------------------------------------------------------------


class Margins:
    """One model in one type, in ranks and an engine."""

    def __init__(self, name: str, node: Node, dtype: str, run: Running) -> None:
        self.name, self.node, self.dtype, self.run = name, node, dtype, run
        self.pool, self.actor = run.sampling.pool, run.actor
        self.spec = read_model_spec(run.config.model.path)
        self.step = 0

    def row(self, case: str) -> dict[str, Any]:
        """Findings of the three checks on the current engine."""
        self.step += 1
        wanted = parts.requests(self.node, SAMPLES, step=self.step)
        batch = parts.as_batch(wanted, parts.sample(self.pool, wanted))
        usual, entropy = self.actor.log_probs(batch)
        noisy, _ = self.actor.log_probs(batch, "noise", self.step)
        found, noise = measure(usual, batch.engine_log_probs), measure(usual, noisy)
        try:
            named = f"all {compare_weights(self.actor, self.pool)} equal"
        except WeightsError as error:
            named = str(error)
        constants = "equal"
        try:
            check_constants(self.pool, self.spec)
        except WeightsError as error:
            constants = str(error)
        excess = found.metrics()["mean_exp_abs_diff"] - 1
        noise_excess = noise.metrics()["mean_exp_abs_diff"] - 1
        row = {
            "model": self.name,
            "dtype": self.dtype,
            "case": case,
            "excess": excess,
            "max": found.abs_max,
            "noise_excess": noise_excess,
            "noise_max": noise.abs_max,
            "ratio": excess / noise_excess,
            "max_ratio": found.abs_max / noise.abs_max,
            "gate": self._gate(batch, usual, entropy),
            "fingerprints": named[:150],
            "constants": constants[:80],
        }
        print(json.dumps(row), flush=True)
        return row

    def _gate(self, batch: TrainingBatch, log_probs: torch.Tensor, entropy: torch.Tensor) -> str:
        """Verdict of a run's gate, with its own measurement of the noise."""
        alignment = Alignment.of_batch(batch, log_probs, entropy, self.pool.weights_version)
        try:
            found = Gate().check(self.run, alignment, batch, step=self.step, updated=False)
        except AlignmentError as error:
            return f"fails: {str(error)[-150:]}"
        rerouted = found.get("alignment/rerouted_tokens", 0.0)
        return f"passes without {rerouted:.0f} rerouted tokens" if rerouted else "passes"

    def update(self) -> None:
        """One optimizer step of the actor, which the engine does not get."""
        wanted = parts.requests(self.node, SAMPLES, step=1000 + self.step)
        batch = parts.as_batch(wanted, parts.sample(self.pool, wanted))
        parts.update(self.actor, batch)

    def sync(self) -> None:
        sync_weights(self.actor, self.pool, self.pool.weights_version + 1)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Healthy weights at three versions, then each fault."""
        self.sync()
        yield self.row("healthy")
        for _ in range(2):
            self.update()
            self.sync()
            yield self.row("healthy, updated")
        for fault in (other_epsilon, other_rope):
            self.pool.call_workers(fault)
            yield self.row(str(fault.__doc__))
            self.pool.call_workers(put_back)
        for fault in (bit_flip, swap_gate_and_up):
            self.pool.call_workers(fault)
            yield self.row(str(fault.__doc__))
            self.sync()
        self.update()
        yield self.row("stale: one update of lr 2e-4 did not arrive")
