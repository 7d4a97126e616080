"""Rewards that wait for others: batches, many calls in flight, and no thread that waits."""

import logging
import random
import socket
import threading
from concurrent.futures import CancelledError
from contextlib import contextmanager

import pytest

from rlmath.rewards import RewardMix, RewardSettingError, get_reward
from rlmath.rewards.batcher import Batcher
from rlmath.rewards.circuit_breaker import CircuitBreaker
from rlmath.rollout.collect import Collector
from rlmath.types import Problem
from tests.support.http_server import serve
from tests.support.samples import make_sample


def lengths(exchange):
    exchange.reply({"rewards": [float(len(q)) for q in exchange.body["query"]]})


def problem(number):
    return Problem(id=f"p{number}", prompt="", prompt_token_ids=(1,), answers=("1",))


def sample(number, index):
    return make_sample(f"p{number}", index, text="x" * (10 * number + index))


@contextmanager
def collect(*items, threads=1):
    with RewardMix.from_config(list(items)) as mix:
        collector = Collector(mix, threads)
        try:
            yield collector
        finally:
            collector.close()


def rewards_of(groups):
    return [[graded.reward for graded in group.samples] for group in groups]


WANTED = [[float(10 * number + index) for index in range(4)] for number in range(6)]


@pytest.mark.parametrize("needs_group", [False, True])
def test_samples_share_calls_and_keep_their_own_values(needs_group):
    samples = [sample(n, i) for n in range(6) for i in range(4)]
    random.Random(0).shuffle(samples)
    with serve(lengths) as server:
        item = {
            "name": "remote",
            "params": {"urls": server.url, "batch_size": 5, "needs_group": needs_group},
        }
        with collect(item) as collector:
            groups = collector.collect([problem(n) for n in range(6)], samples, 4).wait()
        sizes = sorted(len(request["query"]) for request in server.requests)
    assert rewards_of(groups) == WANTED
    assert sizes == [4] * 6 if needs_group else max(sizes) == 5 and sum(sizes) == 24


def test_one_thread_has_many_calls_in_flight():
    everyone = threading.Barrier(24, timeout=30)

    def answer(exchange):
        everyone.wait()  # No call is answered before all 24 are there.
        lengths(exchange)

    with serve(answer) as server:
        item = {"name": "remote", "params": {"urls": server.url, "batch_size": 1, "retries": 0}}
        with collect(item) as collector:
            samples = [sample(n, i) for n in range(6) for i in range(4)]
            grading = collector.collect([problem(n) for n in range(6)], samples, 4)
            assert rewards_of(grading.wait()) == WANTED
            assert grading.ungraded_samples() == []


COROUTINE = """
import asyncio

everyone = None

async def reward(completions, **kwargs):
    global everyone
    everyone = everyone or asyncio.Barrier({calls})
    await asyncio.wait_for(everyone.wait(), 30)
    return [float(len(c)) for c in completions]

reward.needs_group = {needs_group}
"""


@pytest.mark.parametrize(("needs_group", "calls"), [(False, 24), (True, 6)])
def test_coroutine_rewards_wait_side_by_side(tmp_path, needs_group, calls):
    file = tmp_path / f"coroutine_{needs_group}.py"
    file.write_text(COROUTINE.format(calls=calls, needs_group=needs_group))
    with collect({"name": str(file)}) as collector:
        samples = [sample(n, i) for n in range(6) for i in range(4)]
        groups = collector.collect([problem(n) for n in range(6)], samples, 4).wait()
    assert rewards_of(groups) == WANTED


def test_a_coroutine_function_that_is_not_thread_safe_has_one_call_at_a_time(tmp_path):
    file = tmp_path / "alone.py"
    file.write_text(
        "import asyncio\nrunning = 0\n"
        "async def reward(completions, **kwargs):\n"
        "    global running\n    running += 1\n    await asyncio.sleep(0.001)\n"
        "    alone, running = running == 1, running - 1\n"
        "    return [float(alone)] * len(completions)\n"
        "reward.needs_group = False\nreward.thread_safe = False\n"
    )
    with collect({"name": str(file)}, threads=4) as collector:
        samples = [sample(0, i) for i in range(4)]
        (group,) = collector.collect([problem(0)], samples, 4).wait()
    assert rewards_of([group]) == [[1.0] * 4]


def test_an_error_in_a_coroutine_is_the_groups(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("async def reward(completions, **kwargs):\n    return [1 / 0]\n")
    with collect({"name": str(file)}) as collector:
        grading = collector.collect([problem(0)], [sample(0, 0)], 1)
        with pytest.raises(Exception, match=r"broken\.py:2"):
            grading.wait()


def test_a_server_that_dies_is_left_alone_and_tried_again(caplog):
    def refuse(exchange):
        exchange.reply({}, status=503)

    with (
        serve(refuse) as server,
        get_reward(
            "remote",
            urls=server.url,
            retries=0,
            batch_size=1,
            max_concurrent_calls=1,
            breaker_failures=3,
            breaker_cooldown_s=1000.0,
        ) as reward,
    ):
        assert reward(["a"] * 10) == [None] * 10
        assert len(server.requests) == 3
        with caplog.at_level(logging.WARNING):
            figures = reward.drain_metrics()
        assert figures["failed_calls"] == 10 and figures["servers_down"] == 1
        (line,) = caplog.messages
        assert "10 completions are unscored" in line
        # The cooldown is over, and the server is there again.
        server.answer = lengths
        reward._breakers[0]._closed_at = 0.0
        assert reward(["a"]) == [1.0] and reward(["ab", "b"]) == [2.0, 1.0]
        assert reward.drain_metrics()["servers_down"] == 0


def test_a_breaker_lets_one_call_try():
    now = [0.0]
    breaker = CircuitBreaker(2, 10.0, clock=lambda: now[0])
    breaker.record_failure()
    breaker.record_success()
    breaker.record_failure()
    assert breaker.allows() and not breaker.is_open
    breaker.record_failure()
    assert breaker.is_open and not breaker.allows()
    now[0] = 10.0
    assert breaker.allows() and not breaker.allows(), "one call tries, the others wait"
    breaker.record_failure()
    assert not breaker.allows()
    now[0] = 20.0
    assert breaker.allows()
    breaker.record_success()
    assert breaker.allows() and breaker.allows()


def test_servers_are_probed_before_a_run():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Bound, but nobody listens.
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}/x"
        with (
            RewardMix.from_config([{"name": "remote", "params": {"urls": dead}}]) as mix,
            pytest.raises(RewardSettingError, match=r"no reward server can be reached.*/x"),
        ):
            mix.probe()
        with serve(lengths) as server, get_reward(f"{dead},{server.url}") as reward:
            reward.probe()
            assert server.requests == [], "a probe scores nothing"


def test_batches_by_count_and_by_window():
    sent = []
    arrived = threading.Event()

    def send(batch):
        sent.append(batch)
        arrived.set()

    batcher = Batcher(3, 1000.0, send)
    batcher.add([1, 2])
    assert sent == []
    batcher.add([3, 4, 5, 6, 7])
    assert sent == [[1, 2, 3], [4, 5, 6]]
    batcher.flush()
    batcher.flush()
    assert sent[2:] == [[7]]
    batcher.add([8])
    assert batcher.close() == [8]
    assert not batcher.add([9])
    batcher.flush()
    assert len(sent) == 3
    arrived.clear()
    quick = Batcher(3, 0.01, send)
    quick.add([10])
    assert arrived.wait(30) and sent[3:] == [[10]]
    quick.close()


def test_closing_leaves_nobody_waiting():
    release = threading.Event()

    def answer(exchange):
        release.wait(30)
        lengths(exchange)

    with serve(answer) as server:
        reward = get_reward(
            "remote", urls=server.url, batch_size=1, max_concurrent_calls=1, retries=0
        )
        calls = [reward.submit([text]) for text in "abc"]
        threading.Timer(0.2, release.set).start()
        reward.close()
        assert all(call.done() or call.cancelled() for call in calls)
        with pytest.raises(CancelledError):
            reward.submit(["d"]).result(timeout=30)
