"""Seeds of requests: fixed for ever, and different for different samples."""

from rlmath.rollout.seeds import request_seed


def test_a_seed_is_the_same_in_every_process_and_version():
    assert request_seed(0, 1, "gsm8k_train.jsonl:7", 3) == 2929859214287509888


def test_request_seeds_are_distinct():
    seeds = {
        request_seed(run, step, problem, index)
        for run in range(3)
        for step in range(5)
        for problem in ("a:1", "a:11", "1/a:1", "b/1")
        for index in range(16)
    }
    assert len(seeds) == 3 * 5 * 4 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)
