"""Rollout log-probs against the actor's, on tokens that the engine sampled."""

from __future__ import annotations

from rlmath.commands.selfcheck import parts
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record
from rlmath.rollout.weight_sync import sync_weights
from rlmath.training.gate import limits, measure_noise

SAMPLES = 32


def run(node: Node, record: Record) -> None:
    """Compare under the model's own weights, and under those of an update."""
    config = parts.settings(node, "run", gpus=min(node.gpus, 1))
    with parts.start(config, record) as (actor, pool):
        first = pool.weights_version
        for version in (first, first + 1):
            with record.phase(f"version {version}"):
                wanted = parts.requests(node, SAMPLES, step=version)
                batch = parts.as_batch(wanted, parts.sample(pool, wanted))
                pool.sleep()
                found = parts.mismatch(actor, batch)
                noise = measure_noise(actor, batch, seed=version)
                allowed = limits(config, noise)
                parts.update(actor, batch)
                sync_weights(actor, pool, version + 1)
            name = f"version {version}"
            mean = found["mean_exp_abs_diff"]
            record.figure(f"{name} tokens", int(batch.response_lengths.sum()))
            record.figure(
                f"{name} mean exp|Δ|", mean, limit=f"<= {allowed.mean_exp_abs:.7g}", key=True
            )
            record.figure(f"{name} mean |Δ|", found["mean_abs_diff"], "nats")
            record.figure(
                f"{name} max |Δ|", found["max_abs_diff"], "nats", limit=f"<= {allowed.max_abs:.3g}"
            )
            record.figure(f"{name} k3 estimate of the KL", found["k3"], "nats")
            record.require(
                mean <= allowed.mean_exp_abs and found["max_abs_diff"] <= allowed.max_abs,
                f"weights version {version}: mean exp|Δ| of rollout and actor log-probs is "
                f"{mean:.7g} (limit {allowed.mean_exp_abs:.7g}) and the largest |Δ| "
                f"{found['max_abs_diff']:.3g} nats (limit {allowed.max_abs:.3g}); rounding noise "
                f"of the actor is {1 + noise.excess:.7g} and {noise.max_abs:.3g}",
            )
