"""Fingerprints of what a vLLM worker holds, by the names of the Hugging Face folder.

The fingerprint of a tensor is the sum of its parts' (``rlmath.weights.fingerprint``), so each
worker counts what it holds, at its place in the whole, and the workers' sums add up.

A CPU worker packs matrices into a form of oneDNN's and keeps no tensor that could be read. For
these stands what the transport handed to vLLM: a fault between there and the packed form is left
to the comparison of log-probs. Experts are counted as they arrived as well; where the transport has
no place for that (vLLM's own, on GPUs) nothing is known of them, and their fingerprint is ``None``.
"""

from __future__ import annotations

from typing import Any

from rlmath.weights.fingerprint import add, fingerprint
from rlmath.weights.transports.engine_parts import expert_names, parts_of


def worker_fingerprints(
    worker: Any,
) -> tuple[dict[str, int], dict[str, int], dict[str, None]]:
    """Runs in a vLLM worker.

    Returns:
        This worker's shares of what the engine holds; what it was given in the last update, if that
        one was to be verified; and the tensors that cannot be read.
    """
    model = worker.model_runner.get_model()
    held: dict[str, int] = {}
    for part in parts_of(model):
        values = part.held()
        if part.key == "bias":
            # Where a CPU has matrix units, vLLM widens biases to float32.
            values = values.to(worker.model_config.dtype)
        if values.numel() and not part.replica:
            of_part = fingerprint(values, part.dim, part.start)
            held[part.name] = add(held.get(part.name, 0), of_part)
    unread = dict.fromkeys(expert_names(model))
    received = getattr(worker.weight_transfer_engine, "received", {})
    return held, dict(received), unread


def engine_fingerprints(
    workers: list[tuple[dict[str, int], dict[str, int], dict[str, None]]],
) -> dict[str, int | None]:
    """One engine's fingerprints from its workers': what is held where that can be read."""
    total: dict[str, int] = {}
    for held, _, _ in workers:
        for name, value in held.items():
            total[name] = add(total.get(name, 0), value)
    # Every worker is given whole tensors.
    _, received, unread = workers[0]
    return unread | received | total
