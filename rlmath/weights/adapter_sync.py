"""Weight sync of adapters (LoRA), for engines that compute them beside the base model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from rlmath.config.weights import BUCKET_MIB
from rlmath.model.lora import Lora
from rlmath.model.rank_layout import ParallelRank
from rlmath.model.spec import ModelSpec
from rlmath.weights.adapters import local_adapters
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.slices import WeightSlice


class AdapterSource:
    """The adapters to send, and the expected fingerprints of engines after a weight sync.

    Construction is collective over ``parallel.group``. ``gatherer``: gathers every ``A``, and
    ``alpha / rank`` times every ``B``, rounded once.

    Args:
        model_chunks: As for ``BucketGatherer``, with their adapters.
        read: As for ``BucketGatherer``.
        bucket_size_mib: As for ``BucketGatherer``.
    """

    def __init__(
        self,
        model_chunks: Sequence[nn.Module],
        spec: ModelSpec,
        parallel: ParallelRank,
        lora: Lora,
        read: Callable[[Tensor], Tensor] | None = None,
        bucket_size_mib: float = BUCKET_MIB,
    ) -> None:
        own = local_adapters(model_chunks, spec, parallel, lora)
        of_b = {id(one.tensor) for one in own if one.name.endswith(".b")}

        def scale(parameter: Tensor, values: Tensor, dim: int, start: int) -> Tensor:
            if id(parameter) not in of_b:
                return values
            return (values.float() * lora.scale).to(values.dtype)

        self.gatherer = BucketGatherer(
            model_chunks, spec, parallel, bucket_size_mib, read=read, merge=scale, adapters=lora
        )
        # The base model is not sent, but engines must still have it.
        self._base = BucketGatherer(model_chunks, spec, parallel, read=read)

    def fingerprints(self, part: WeightSlice | None = None) -> dict[str, int]:
        """Fingerprints of the base model and of the adapters as sent. Collective over the group.
        ``part``: only this slice of the base model, in addition to the adapters; ``None``: all."""
        return self._base.fingerprints(part) | self.gatherer.fingerprints()
