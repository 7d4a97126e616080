"""Reward servers that answer, fail, hang, drip and lie."""

import socket
import threading
import time

import pytest

from rlmath.rewards import RewardSettingError, get_reward
from tests.support.http_server import serve

FAST = {"timeout_s": 2.0, "retries": 1, "backoff_s": 0.01}


def lengths(exchange):
    exchange.reply({"rewards": [float(len(q)) for q in exchange.body["query"]]})


def test_request_and_reply():
    def answer(exchange):
        n = len(exchange.body["query"])
        exchange.reply(
            {"rewards": [0.5] * n, "scores": [1.0] * n, "extra_logs": {"tone": [2.0] * n, "x": 1}}
        )

    with serve(answer) as server, get_reward(server.url, headers={"X-Key": "k"}) as reward:
        got = reward(["b", "d"], prompts=["a", "c"], answers=[["1"], ["2", "3"]])
        assert got == [0.5, 0.5]
        assert server.requests == [
            {"query": ["ab", "cd"], "prompts": ["a", "c"], "labels": ["1", ["2", "3"]]}
        ]
        assert server.seen_headers[0]["X-Key"] == "k"
        figures = reward.drain_metrics()
        assert figures["scores"] == 1.0 and figures["tone"] == 2.0 and figures["x"] == 1.0
        assert (figures["calls"], figures["failed_calls"]) == (1.0, 0.0)
        assert reward([]) == []


def test_several_servers_share_the_work():
    with serve(lengths) as one, serve(lengths) as two:
        with get_reward(f"{one.url},{two.url}") as reward:
            assert reward(["a" * n for n in range(1, 8)]) == [float(n) for n in range(1, 8)]
            assert len(one.requests) == len(two.requests) == 1
        with get_reward("remote", urls=[one.url, two.url], batch_size=2) as reward:
            assert reward(["a" * n for n in range(1, 8)]) == [float(n) for n in range(1, 8)]
            assert max(len(r["query"]) for r in one.requests[1:] + two.requests[1:]) <= 2
        with get_reward("remote", urls=[one.url, two.url], needs_group=True) as reward:
            before = len(one.requests) + len(two.requests)
            assert reward(["a"] * 7) == [1.0] * 7
            assert len(one.requests) + len(two.requests) == before + 1


def test_servers_are_asked_at_once():
    barrier = threading.Barrier(2, timeout=10)

    def answer(exchange):
        barrier.wait()  # neither replies before both are asked
        lengths(exchange)

    with (
        serve(answer) as one,
        serve(answer) as two,
        get_reward(f"{one.url},{two.url}", timeout_s=15.0, retries=0) as reward,
    ):
        assert reward(["a", "b"]) == [1.0, 1.0]


def test_a_failing_server_is_tried_again():
    failures = [500, 503, 429]

    def answer(exchange):
        if failures:
            exchange.reply({"error": "busy"}, status=failures.pop())
        else:
            lengths(exchange)

    with serve(answer) as server, get_reward(server.url, retries=3, backoff_s=0.01) as reward:
        assert reward(["abc"]) == [3.0]
        figures = reward.drain_metrics()
        assert (figures["calls"], figures["retries"], figures["failed_calls"]) == (4.0, 3.0, 0.0)


def test_a_dead_server_is_replaced_by_the_next():
    with socket.create_server(("127.0.0.1", 0)) as free:
        dead = f"http://127.0.0.1:{free.getsockname()[1]}/"
    with serve(lengths) as server, get_reward(f"{dead},{server.url}", **FAST) as reward:
        assert reward(["a", "bb", "ccc"]) == [1.0, 2.0, 3.0]
        assert reward.drain_metrics()["retries"] >= 1.0


def as_json(value):
    return lambda exchange: exchange.reply(value)


@pytest.mark.parametrize(
    "answer",
    [
        as_json({"rewards": [1.0]}),
        as_json({"rewards": [1.0, 2.0, 3.0]}),
        as_json({"scores": [1.0, 2.0]}),
        as_json({"rewards": ["a", "b"]}),
        as_json({"rewards": None}),
        as_json({"rewards": [[1.0], [2.0]]}),
        as_json("good"),
        as_json(None),
        lambda exchange: exchange.raw(b"<html>not JSON</html>"),
        lambda exchange: exchange.raw(b"[" * 100_000),
        lambda exchange: exchange.raw(b""),
        lambda exchange: exchange.raw(b"\xff\xfe"),
        lambda exchange: exchange.reply({"rewards": [1.0, 2.0]}, status=400),
        lambda exchange: exchange.reply({"rewards": [1.0, 2.0]}, status=500),
        lambda exchange: exchange.raw(b"", status=302, headers={"Location": "/elsewhere"}),
        lambda exchange: exchange.connection.close(),
        lambda exchange: exchange.wfile.write(b"nonsense\r\n\r\n"),
    ]
)  # fmt: skip
def test_a_wrong_reply_is_a_counted_none(answer):
    with serve(answer) as server, get_reward(server.url, **FAST) as reward:
        assert reward(["a", "b"]) == [None, None]
        assert reward.drain_metrics()["failed_calls"] == 1.0


def test_a_request_that_the_server_calls_wrong_is_not_repeated():
    with serve(lambda exchange: exchange.reply({}, status=422)) as server:
        with get_reward(server.url, retries=3, backoff_s=0.01) as reward:
            assert reward(["a"]) == [None]
        assert len(server.requests) == 1


def test_single_values_that_are_no_number_are_none():
    def answer(exchange):
        exchange.raw(b'{"rewards": [1, NaN, Infinity, null, true]}')

    with serve(answer) as server, get_reward(server.url, **FAST) as reward:
        assert reward(["a"] * 5) == [1.0, None, None, None, 1.0]


def hang(exchange):
    time.sleep(30)


def drip(exchange):
    """A byte now and then keeps a socket's own limit from ever passing."""
    exchange.send_response(200)
    exchange.end_headers()
    for _ in range(300):
        exchange.wfile.write(b" ")
        exchange.wfile.flush()
        time.sleep(0.1)


def drip_with_length(exchange):
    exchange.send_response(200)
    exchange.send_header("Content-Length", "1000")
    exchange.end_headers()
    for _ in range(300):
        exchange.wfile.write(b" ")
        exchange.wfile.flush()
        time.sleep(0.1)


@pytest.mark.parametrize("answer", [hang, drip, drip_with_length])
def test_a_server_that_never_ends_is_cut_off(answer):
    settings = {"timeout_s": 0.4, "retries": 1, "backoff_s": 0.01}
    ended = threading.Event()

    def answer_and_end(exchange):
        answer(exchange)
        ended.set()

    with serve(answer_and_end) as server, get_reward(server.url, **settings) as reward:
        assert reward(["a", "b"]) == [None, None]
        assert not ended.is_set()
        assert reward.drain_metrics()["calls"] == 2.0


def test_all_attempts_together_have_a_limit():
    with serve(hang) as server:
        settings = {"timeout_s": 0.5, "retries": 100, "backoff_s": 0.01, "total_timeout_s": 1.2}
        with get_reward(server.url, **settings) as reward:
            assert reward(["a"]) == [None]
            assert reward.drain_metrics()["calls"] <= 3.0


def test_one_failed_part_does_not_spoil_the_others():
    def answer(exchange):
        if "bad" in exchange.body["query"]:
            exchange.reply({}, status=500)
        else:
            lengths(exchange)

    with serve(answer) as server, get_reward(server.url, batch_size=1, **FAST) as reward:
        assert reward(["a", "bad", "abc"]) == [1.0, None, 3.0]


def test_settings_that_cannot_work():
    for urls in ("", "ftp://host", "http://", "host:80"):
        with pytest.raises(RewardSettingError, match="no http:// or https:// address"):
            get_reward("remote", urls=urls)
    with pytest.raises(RewardSettingError, match="must be above 0"):
        get_reward("http://localhost", timeout_s=0)
    with pytest.raises(RewardSettingError, match="no setting retry"):
        get_reward("http://localhost", retry=1)
