"""Engines that do not start, stand still, or die are named, and nobody waits for them."""

import os
import signal
import threading
from dataclasses import replace

import psutil
import pytest
import ray
from reference import make_requests, random_prompts, send
from trainers import SenderTrainer, start_sender

from rlmath.engines.requests import EngineError, EngineStartError
from rlmath.rollout.pool import RolloutPool


def test_unreadable_model_is_named_and_leaves_no_process(ray_session, log_dir_spec, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    spec = replace(log_dir_spec, model_path=str(tmp_path))
    pool = RolloutPool(spec, num_engines=1, stall_timeout_s=60)
    with pytest.raises(EngineStartError, match=r"(?s)engine 0 could not start.*engine_0\.log"):
        pool.start()
    assert not pool.engines


def test_engines_that_hang_or_die_are_started_again(ray_session, log_dir_spec, reference, caplog):
    """Each sample comes once, the same as without the faults, from the weights in force; when no
    restarts are left, the engine is named with what it owes, and nobody waits for it."""

    def attention_scales_are_one(worker):
        """vLLM's random weights reach the buffers of attention too, which no sync brings."""
        buffers = dict(worker.get_model().named_buffers())
        scales = [one for name, one in buffers.items() if name.endswith("_scale")]
        return len(scales) > 0 and all(bool((one == 1).all()) for one in scales)

    prompts = random_prompts(4, 10)
    requests = make_requests(prompts, samples=8, max_tokens=400)
    own = SenderTrainer()
    # As at a resume: engines get all weights from the trainer, also those that start again.
    spec = replace(log_dir_spec, reads_weights=False)
    with RolloutPool(spec, num_engines=2, stall_timeout_s=8.0, max_restarts=2, trainer=own) as pool:
        own.pool = pool
        trainer = own.sender = start_sender(pool, reference)
        ray.get(trainer.set_tensors.remote(reference.perturb(3)))
        send(trainer, pool, verify_every=1)
        assert pool.call_workers(attention_scales_are_one) == [[True]] * 2
        samples = list(pool.generate(requests))
        assert reference.largest_difference(prompts, samples[:4], 1.0) < 1e-4
        undisturbed = by_key(samples)

        hangs, dies = (pid_of(process) for process in pool.processes)
        threading.Timer(0.2, os.kill, (hangs, signal.SIGSTOP)).start()
        threading.Timer(0.4, os.kill, (dies, signal.SIGKILL)).start()
        assert by_key(list(pool.generate(requests))) == undisturbed
        assert pool.restarts == 2
        assert not psutil.pid_exists(hangs)
        # New weights reach all of them.
        ray.get(trainer.set_tensors.remote(reference.perturb(4)))
        send(trainer, pool)
        again = by_key(pool.generate(requests))
        assert all(again[key] != undisturbed[key] for key in again)

        hangs = pid_of(pool.processes[0])
        threading.Timer(0.3, os.kill, (hangs, signal.SIGSTOP)).start()
        with pytest.raises(EngineError, match=r"engine 0 has produced no token for .*problem-\d"):
            list(pool.generate(requests))
        os.kill(hangs, signal.SIGCONT)
        assert by_key(pool.generate(requests)) == again
        said = caplog.text
        assert "engine 1 failed: its process ended" in said and "engine_1.log" in said


def by_key(samples):
    found = [
        ((s.problem_id, s.index), (tuple(s.token_ids.tolist()), s.text, s.weights_version))
        for s in samples
    ]
    assert len({key for key, _ in found}) == len(found)
    return dict(found)


def pid_of(process):
    place = process.place()
    return place.pid
