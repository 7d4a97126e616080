"""vLLM's sampling on CPU without the parts that a rollout does not need.

vLLM 0.32 draws each token's seed from the request's ``torch.Generator``, one call after another:
a tenth of the time of a small model's step. Here the seed is a hash of the request's own seed and
the number of its drawn tokens, so tokens depend on nothing else either. vLLM also computes each
token's rank, which reads the whole vocabulary; here ranks are computed only if needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from rlmath.utils.seed_stream import SeedStream, SeedStreams

_vllm_forward_cpu = TopKTopPSampler.forward_cpu
_vllm_gather_logprobs = Sampler.gather_logprobs


# A request keeps its generator, and so its stream, when it is put aside and taken up again.
_streams: WeakKeyDictionary[Generator, SeedStream] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Batch:
    """The requests of a step. Most steps have those of the one before."""

    rows: list[Generator | None]
    streams: SeedStreams


_batch: _Batch | None = None


def forward_cpu(
    self: TopKTopPSampler,
    logits: Tensor,
    generators: dict[int, Generator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Sampled tokens ``[n]``, and the values from which log-probs are read; see vLLM's method.

    Args:
        logits: ``[n, v]``, at the sampling temperature.
        generators: Generators of the rows whose requests have a seed.
        k: Top-k of each row; p: top-p; ``None``: all tokens.
    """
    if self.use_fp64_gumbel:
        return _vllm_forward_cpu(self, logits, generators, k, p)
    logits = apply_top_k_top_p(logits, k, p)
    returned: Tensor | None = None
    if self.logprobs_mode == "processed_logits":
        returned = logits
    elif self.logprobs_mode == "processed_logprobs":
        returned = logits.log_softmax(dim=-1, dtype=torch.float32)
    seeds = _seeds([generators.get(row) for row in range(logits.shape[0])])
    sampled: Tensor = torch.ops._C.fused_gumbel_argmax(logits.float(), seeds)
    return sampled, returned


def _seeds(rows: list[Generator | None]) -> Tensor:
    """``[n]`` int64, the next seed of each row."""
    global _batch
    if _batch is None or _batch.rows != rows:
        if _batch is not None:
            _batch.streams.put_back()
            _batch = None
        streams = [_stream(one) for one in rows if one is not None]
        if len(streams) < len(rows):
            return torch.tensor([_seed(one) for one in rows])
        _batch = _Batch(rows, SeedStreams(streams))
    return torch.from_numpy(_batch.streams.next())


def _seed(generator: Generator | None) -> int:
    if generator is None:
        return int(torch.randint(0, 2**63 - 1, ()))
    return _stream(generator).next()


def _stream(generator: Generator) -> SeedStream:
    stream = _streams.get(generator)
    if stream is None:
        stream = _streams[generator] = SeedStream(generator.initial_seed())
    return stream


def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
    """Log-probs of the sampled tokens; see vLLM's method.

    If only the sampled tokens are wanted, ranks are 0 instead of computed.

    Args:
        logprobs: ``[n, v]``.
        num_logprobs: How many of the likeliest tokens are wanted as well.
        token_ids: ``[n]`` int64, the sampled tokens.
    """
    if num_logprobs:
        return _vllm_gather_logprobs(logprobs, num_logprobs, token_ids)
    column = token_ids.unsqueeze(-1)
    ranks = torch.zeros_like(token_ids)
    return LogprobsTensors(column.to(torch.int32), logprobs.gather(-1, column), ranks)


def install() -> None:
    """Patch vLLM's sampling in this process; engines that exist already are unchanged."""
    TopKTopPSampler.forward_cpu = forward_cpu  # type: ignore[method-assign]
    Sampler.gather_logprobs = staticmethod(gather_logprobs)  # type: ignore[method-assign]
