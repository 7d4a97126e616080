"""vLLM's ``nccl`` trainer, with a bound on waiting for an engine that does not receive.

A broadcast of NCCL waits for every worker. If an engine dies in it, the kernel on the sender's GPU
spins forever, and vLLM's trainer checks the engines' answer only after the last message. Here an
error in the answer immediately aborts the communicator, which ends the kernel; so does a deadline,
for an engine that neither receives nor answers. The error then ends this rank's call, and the run
restarts as after the death of a rank.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

# Maximum duration of a weight sync: this, plus a second per GB.
DEADLINE_S, LEAST_BYTES_PER_S = 60.0, 1e9


class NcclTrainer(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
    """A trainer rank's end of the connection; extends vLLM's."""

    def send_weights(self) -> None:
        """Send the source's current weights to all engines. Collective over all ranks. Raises
        TimeoutError: the engines did not receive in time; Exception: an engine's error, on rank 0.
        """
        metadata = self.source.metadata()
        if self.is_sender:
            self.client.start_weight_update()
        self._send(metadata, metadata, calls=self.is_sender)

    def _send(
        self, metadata: list[ParamMeta], announced: Sequence[ParamMeta], *, calls: bool
    ) -> None:
        """Send once the engines are ready, then activate the weights.

        Args:
            metadata: Tensors that this rank sends or helps to gather.
            announced: Tensors announced to engines; their size bounds the time.
            calls: Whether this rank calls the engines.
        """
        num_bytes = sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in announced)
        watch = _Watch(self.model_update_group, num_bytes)
        executor = ThreadPoolExecutor(max_workers=1)
        try:
            with watch:
                received = None
                if calls:
                    info = NCCLWeightTransferUpdateInfo(
                        names=[meta.name for meta in announced],
                        dtype_names=[str(meta.dtype).removeprefix("torch.") for meta in announced],
                        shapes=[list(meta.shape) for meta in announced],
                    )
                    received = executor.submit(self.client.update_weights, asdict(info))
                    received.add_done_callback(watch.handle_answer)
                self._broadcast(_Watched(self.source, watch), metadata)
                if received is not None:
                    wait([received], watch.left_s())
                    if not received.done():
                        watch.expire()
                    watch.check()
                    received.result()
        finally:
            # If sending failed, the engines may never answer: joining the thread would hide it.
            executor.shutdown(wait=False)
        if calls:
            self.client.finish_weight_update()
        self._post_send_sync()


class _Watch:
    """Aborts a communicator on an error of the engines, or after the deadline. Entered once, around
    the sending; on exit its error replaces that of the aborted communicator.

    Args:
        group: vLLM's communicator; ``None`` if this rank has none, and nothing waits.
        num_bytes: Size of the weights to send.
    """

    def __init__(self, group: Any, num_bytes: int) -> None:
        self._group, self._num_bytes = group, num_bytes
        self._limit_s = DEADLINE_S + num_bytes / LEAST_BYTES_PER_S
        self._ends_s = time.monotonic() + self._limit_s
        self._error: BaseException | None = None
        self._timer = threading.Timer(self._limit_s, self.expire)
        self._timer.daemon = True

    def __enter__(self) -> _Watch:
        if self._group is not None:
            self._timer.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._timer.cancel()
        if error is None or isinstance(error, Exception):
            self.check()

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self._ends_s - time.monotonic())

    def handle_answer(self, answer: Future[Any]) -> None:
        """Handle the engines' answer as soon as it arrives."""
        if (error := answer.exception()) is not None:
            self._abort(error)

    def check(self) -> None:
        """Raise the error for which the communicator was aborted, if any."""
        if self._error is not None:
            raise self._error

    def expire(self) -> None:
        """Abort because the deadline has passed."""
        self._abort(
            TimeoutError(
                f"weights.transport=nccl: the engines did not receive {self._num_bytes / 1e9:.3g} "
                f"GB within {self._limit_s:.0f} s ({DEADLINE_S:g} s, and a second for each GB)"
            )
        )

    def _abort(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            if self._group is not None:
                self._group.destroy()  # Calls ncclCommAbort, also from other threads.


class _Watched(WeightSource):
    """A source that raises the error for which the communicator was aborted."""

    def __init__(self, source: WeightSource, watch: _Watch) -> None:
        self._source, self._watch = source, watch

    def metadata(self) -> list[ParamMeta]:
        return self._source.metadata()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        # References no tensor: its memory is freed when the consumer drops it.
        return map(self._check_pair, self._source)

    def _check_pair(self, pair: tuple[str, Tensor]) -> tuple[str, Tensor]:
        self._watch.check()
        return pair
