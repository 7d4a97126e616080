"""Engines that do not start, stand still, or die are named, and nobody waits for them."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray
from reference import make_requests, random_prompts

from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.requests import EngineError, EngineSpec, EngineStartError


def test_a_model_that_cannot_be_read_is_said_and_nothing_is_left(
    ray_session: None, log_dir_spec: EngineSpec, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    spec = replace(log_dir_spec, model_path=str(tmp_path))
    pool = RolloutPool(spec, num_engines=1, stall_timeout_s=60)
    with pytest.raises(EngineStartError, match=r"(?s)engine 0 could not start.*engine_0\.log"):
        pool.start()
    assert not pool.engines


def test_an_engine_that_stands_still_or_dies_is_named(
    ray_session: None, log_dir_spec: EngineSpec
) -> None:
    with RolloutPool(log_dir_spec, num_engines=1, stall_timeout_s=3.0) as pool:
        process = psutil.Process(ray.get(pool.engines[0].process_id.remote()))
        requests = make_requests(random_prompts(2, 10), samples=16, max_tokens=480)

        process.suspend()
        try:
            began = time.monotonic()
            with pytest.raises(EngineError, match=r"engine 0 has given no token for .*problem-0"):
                list(pool.generate(requests))
            assert time.monotonic() - began < 15
        finally:
            process.resume()
        assert len(list(pool.generate(make_requests(random_prompts(2, 10), samples=2)))) == 4

        threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
        with pytest.raises(EngineError, match=r"(?s)engine 0 failed.*engine_0\.log"):
            list(pool.generate(requests))
