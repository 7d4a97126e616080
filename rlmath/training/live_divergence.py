"""Find the layer in which ranks and engine diverge, when the gate fails with equal weights.

Both run a sequence of the batch again, with hooks on their modules. The actor runs it once more
with every activation rounded otherwise, and the first value that is several times as far from the
engine's as that moves it names the layer and the parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlmath.config.actor import Fp8
from rlmath.config.rollout import KvCacheDtype, Quantization
from rlmath.config.schema import Device
from rlmath.engines.layer_values import Values
from rlmath.model.spec import read_model_spec
from rlmath.validation.engine_values import engine_values
from rlmath.validation.find_divergence import beyond_rounding
from rlmath.validation.hooks import megatron_values

if TYPE_CHECKING:
    from rlmath.training.opening import Running

# First tokens of a sequence to compare, since layer values of each go to one process.
MAX_TOKENS = 128
# Multiple of the largest difference of a value that rounding makes.
FACTOR = 6.0
NOISE_SEED = 2**21


def where_they_part(run: Running, tokens: list[int]) -> str:
    """A sentence that names the layer, or says why none is named. ``run``: with idle engines that
    hold the actor's weights. ``tokens``: a sequence, prompt first."""
    reason = _cannot(run)
    if reason is None:
        try:
            return _compare(run, tokens[:MAX_TOKENS])
        except Exception as error:
            # The other failure is the one to report.
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return (
        f"The layer is unknown ({reason}); rlmath validate on the model's folder "
        "names the first one that differs."
    )


def _cannot(run: Running) -> str | None:
    """Why values inside of the engines cannot be compared; ``None``: they can."""
    config, spec = run.config, run.sampling.pool.spec
    if spec.device == Device.cuda.value and not spec.enforce_eager:
        return "compiled engines cannot be inspected; rollout.enforce_eager=true makes it possible"
    if spec.adapters is not None:
        return "the engines compute adapters apart from the base model"
    in_fp8 = config.rollout.kv_cache_dtype is KvCacheDtype.fp8
    if in_fp8 or config.rollout.quantization is not Quantization.none:
        return "the engines compute in FP8"
    if config.actor.fp8 is not Fp8.none:
        return "the actor computes in FP8, and engines do not"
    if run.layout.actor.context_parallel > 1:
        return "context-parallel ranks have parts of a sequence"
    return None


def _compare(run: Running, tokens: list[int]) -> str:
    spec = read_model_spec(run.config.model.path)
    theirs = engine_values(run.sampling.pool, tokens, spec.layers)
    if theirs is None:
        return (
            "The layer is unknown (the engines are sampling); rlmath validate on the "
            "model's folder names the first one that differs."
        )
    ours = run.actor.call(_Values(tokens))[0]
    rounded = run.actor.call(_Values(tokens, NOISE_SEED))[0]
    first, worst = beyond_rounding(ours, rounded, theirs, spec, FACTOR)
    looked_at = f"on the first {len(tokens)} tokens of that sequence"
    if first is None:
        return (
            f"Values in all layers agree {looked_at} (at most {worst.ratio:.1f} times the rounding "
            f"noise, in {worst.place}). So something after the layers differs, such as the "
            "temperature, or the difference appears only in longer sequences."
        )
    return (
        f"They diverge first in {first.place}: {looked_at} its values differ by {first.ratio:.3g} "
        "times the rounding noise."
    )


class _Values:
    """The actor's values of a sequence; a class, so that it can go to the ranks."""

    def __init__(self, tokens: list[int], noise_seed: int | None = None) -> None:
        self.tokens, self.noise_seed = tokens, noise_seed

    def __call__(self, worker: Any) -> Values | None:
        """Collective; on rank 0 the values, of all ranks."""
        found = megatron_values(worker.actor, self.tokens, self.noise_seed)
        return found if worker.rank == 0 else None
