"""The routes of MoE layers from CPU engines, in the form in which vLLM returns them on CUDA.

vLLM 0.32 returns routed experts from its second model runner alone, which needs Triton. Two of its
parts do without: the capturer, which a router calls with a step's choices, and the scheduler's half
(``AuxOutputSchedulerConnector``), which says from which token on a request's rows are wanted and
takes them into its output. What is here is the worker's half. It keeps the rows of each place in
the KV cache, written by the forward pass that writes its keys and values. So the rows of a cached
prefix are there exactly as long as the prefix is, and a sequence that is computed again writes its
own.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

# Set to 1 in engines that return routes; their workers inherit it.
ROUTES_VARIABLE = "RLMATH_ROUTES"


def returns_routes() -> bool:
    """Whether this process has to patch vLLM."""
    return os.environ.get(ROUTES_VARIABLE) == "1"


class CapturedRoutes:
    """The rows of a worker. ``runner``: with its model and its KV cache."""

    def __init__(self, runner: CPUModelRunner) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )

        tables = runner.input_batch.block_table.block_tables
        if len(tables) != 1:
            raise ValueError(
                "actor.routing_replay=engine: the engine's model has several kinds of KV cache, "
                "in which a token has no one place; use old_log_probs"
            )
        config = runner.vllm_config
        most = config.scheduler_config.max_num_batched_tokens
        self._capturer = RoutedExpertsCapturer(most, config)
        bind_routed_experts_capturer(runner.model, self._capturer)
        (group,) = runner.kv_cache_config.kv_cache_groups
        slots = runner.kv_cache_config.num_blocks * group.kv_cache_spec.block_size
        dtype = np.dtype(self._capturer.output_dtype_name)
        # Untouched pages take no memory.
        self._rows = np.zeros((slots, *self._capturer.shape_per_token), dtype)

    def take(self, runner: CPUModelRunner, wanted: dict[str, int]) -> dict[str, AuxRequestOutput]:
        """Each request's routes from the forward pass that has just run. ``wanted``: by request,
        the first token whose row it has not had."""
        from vllm.distributed.aux_output_connector.connector import AuxRequestOutput

        batch = runner.input_batch
        table, starts = batch.block_table[0], runner.query_start_loc.np
        count, size = int(starts[batch.num_reqs]), table.block_size
        rows = self._capturer.snapshot_routing_data(count).numpy()
        self._rows[table.slot_mapping.cpu[:count].numpy()] = rows
        found = {}
        for row, request_id in enumerate(batch.req_ids):
            begin = int(batch.num_computed_tokens_cpu[row])
            first, end = int(starts[row]), int(starts[row + 1])
            start = wanted[request_id]
            if start >= begin:
                own = rows[first + start - begin : end]
            else:
                places = np.arange(start, begin + end - first)
                blocks = table.block_table.np[row, places // size].astype(np.int64)
                own = self._rows[blocks * size + places % size]
            found[request_id] = AuxRequestOutput(start, own)
        return found


@functools.cache  # vLLM may call plugins twice.
def install() -> None:
    """Have the model runners of this process return routes from now on."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    make_cache, execute, sample = (
        CPUModelRunner.initialize_kv_cache,
        CPUModelRunner.execute_model,
        CPUModelRunner.sample_tokens,
    )

    def initialize_kv_cache(self: Any, *arguments: Any, **options: Any) -> None:
        make_cache(self, *arguments, **options)
        self.captured_routes, self.taken_routes = CapturedRoutes(self), None

    def execute_model(self: Any, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        found = execute(self, scheduler_output, *arguments, **options)
        if scheduler_output.total_num_scheduled_tokens:
            wanted = scheduler_output.aux_output_connector_metadata.requests
            self.taken_routes = self.captured_routes.take(self, wanted)
        return found

    def sample_tokens(self: Any, *arguments: Any, **options: Any) -> Any:
        found = sample(self, *arguments, **options)
        found.aux_output_connector_output, self.taken_routes = self.taken_routes, None
        return found

    CPUModelRunner.initialize_kv_cache = initialize_kv_cache
    CPUModelRunner.execute_model = execute_model
    CPUModelRunner.sample_tokens = sample_tokens
