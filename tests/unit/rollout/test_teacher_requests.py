"""A teacher on a server: what is sent, what is read, what is tried again, and what ends the run.

The server is this test's own, with planted numbers in the form of vLLM's
(``tests/engine/test_teacher_server.py`` asks a real one)."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from rlmath.config.load import load
from rlmath.errors import UserError
from rlmath.rollout import teacher as teacher_module
from rlmath.rollout import teacher_server
from rlmath.rollout.teacher import EngineTeacher, TeacherError, TeacherScores, ToScore
from rlmath.rollout.teacher_server import ServerTeacher
from rlmath.training.engine_settings import server_teacher
from tests.support.http_server import serve
from tests.support.samples import make_group, make_sample


def log_prob(place, token):
    return -0.25 * place - 0.001 * token


def answer(exchange):
    """As the server's ``plan`` says, in order: a status, seconds to wait, ``ids`` (other tokens),
    ``short`` (too few) or ``none`` (not a number); then all right."""
    server = exchange.server
    if exchange.command == "GET":
        exchange.reply({"data": server.models}, 200 if exchange.path == "/v1/models" else 404)
        return
    with server.lock:
        what = server.plan.pop(0) if server.plan else None
    if isinstance(what, float):
        time.sleep(what)
    if isinstance(what, int):
        exchange.reply({"error": "planted"}, what)
        return
    ids = [token + (what == "ids") for token in exchange.body["prompt"]]
    entries = [None]
    entries += [{str(t): {"logprob": log_prob(i, t), "rank": 1}} for i, t in enumerate(ids)][1:]
    if what == "none":
        entries[-1][str(ids[-1])]["logprob"] = float("nan")
    exchange.reply({"choices": [{"prompt_logprobs": entries[: -1 if what == "short" else None]}]})


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(teacher_server, "_FIRST_WAIT_S", 0.01)
    monkeypatch.delenv(teacher_server.KEY_VARIABLE, raising=False)
    with serve(answer, "/v1") as made:
        made.plan, made.models = [], [{"id": "teacher", "max_model_len": 64}]
        made.lock = threading.Lock()
        yield made


def teacher(server, **options):
    given = {"connections": 2, "timeout_s": 5.0, "attempts": 3}
    found = ServerTeacher(server.url, None, **{"sequence_tokens": 20, **given, **options})
    found.probe()
    return found


def sequences(count=3):
    made = []
    for i in range(count):
        sample = make_sample(f"p{i}", tokens=range(10 * i, 10 * i + 2 + i))
        made.append(ToScore(f"p{i}/0", (7, 8, 9)[: 1 + i], sample))
    return made


def group(count):
    """One of each sequence."""
    return [make_group([one.sample], [None], one.prompt_token_ids) for one in sequences(count)]


def score(teacher, count):
    try:
        return TeacherScores(teacher).take(group(count))
    finally:
        teacher.close()


def expected_log_probs(one):
    prompt = len(one.prompt_token_ids)
    return [log_prob(prompt + i, t) for i, t in enumerate(one.sample.token_ids.tolist())]


def test_token_ids_go_and_their_log_probs_come_in_order(server):
    given = sequences(5)
    found = score(teacher(server, connections=4), 5)
    for one, log_probs in zip(given, found, strict=True):
        assert log_probs.dtype == np.float32
        assert log_probs.tolist() == pytest.approx(expected_log_probs(one))
    (first,) = (body for body in server.requests if body["prompt"] == [7, 0, 1])
    assert first == {
        "model": "teacher",
        "prompt": [7, 0, 1],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }
    assert [one.get("Authorization") for one in server.seen_headers] == [None] * 5


def test_a_run_asks_the_server_of_its_settings(server):
    given = ["experiment=quickstart", "model.path=tiny", "algorithm.distill_coef=1"]
    of_server = [f"teacher.url={server.url}", "teacher.path=t", "teacher.served_model=teacher"]
    config = load([*given, *of_server])
    # 64 prompt + 64 response + 1 token.
    with pytest.raises(UserError, match=r"takes 64 tokens there.* make 129"):
        found = server_teacher(config)
        found.probe()
    server.models = [{"id": "other"}, {"id": "teacher", "max_model_len": 129}]
    found = server_teacher(config)
    found.probe()
    assert found.submit(sequences(1)[0]).result(5).tolist() == pytest.approx(
        expected_log_probs(sequences(1)[0])
    )
    assert server.requests[0]["model"] == "teacher"
    found.close()
    assert server_teacher(load([*given, "teacher.path=t"])) is None


def test_a_key_is_sent_where_there_is_one(server, monkeypatch):
    monkeypatch.setenv(teacher_server.KEY_VARIABLE, "secret")
    score(teacher(server), 1)
    assert [one["Authorization"] for one in server.seen_headers] == ["Bearer secret"]


@pytest.mark.parametrize("trouble", [503, 429, 1.0])
def test_transient_server_errors_are_retried(server, trouble):
    server.plan = [trouble, trouble]
    given = sequences(1)
    (found,) = score(teacher(server, timeout_s=0.3), 1)
    assert found.tolist() == pytest.approx(expected_log_probs(given[0]))
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("plan", "attempts", "parts"),
    [
        ([503] * 9, 3, ["3 of teacher.attempts=3 attempts", "status 503"]),
        ([400], 1, ["1 of teacher.attempts=3 attempts", "status 400"]),
        (["ids"], 1, ["do not match the tokens that were sent"]),
        (["short"], 1, ["2 entries for 3 tokens"]),
        (["none"], 1, ["invalid log-probabilities"]),
    ],
)
def test_a_sample_without_a_score_ends_the_attempt(server, plan, attempts, parts):
    server.plan = plan
    with pytest.raises(TeacherError) as caught:
        score(teacher(server), 1)
    for part in ["p0/0", *parts]:
        assert part in str(caught.value)
    assert len(server.requests) == attempts
    # An answer that the server would repeat is an error again in the run's next attempt.
    assert caught.value.raised == (attempts == 1)


def test_a_server_that_does_not_fit_is_refused_before_anything_starts(server):
    with pytest.raises(UserError, match=r"takes 64 tokens there.* make 65.*--max-model-len 65"):
        teacher(server, sequence_tokens=65)
    server.models = [{"id": "a"}, {"id": "b"}]
    with pytest.raises(UserError, match=r"teacher.served_model: .* has a, b; give one"):
        teacher(server)
    ServerTeacher(
        server.url, "b", sequence_tokens=9, connections=1, timeout_s=1, attempts=1
    ).probe()
    with pytest.raises(UserError, match=r"served_model=c: .* has a, b"):
        ServerTeacher(
            server.url, "c", sequence_tokens=9, connections=1, timeout_s=1, attempts=1
        ).probe()
    gone = ServerTeacher(
        f"{server.url}/x", None, sequence_tokens=9, connections=1, timeout_s=1, attempts=1
    )
    with pytest.raises(UserError, match=r"returned no list of models .*404.* its /v1"):
        gone.probe()


def test_the_watchdog_sees_what_is_waited_for(server):
    server.plan = [0.6]
    waiting = teacher(server)
    probe = waiting.watchdog_probe()
    before = probe.progress()
    call = waiting.submit(sequences(1)[0])
    deadline = time.monotonic() + 5
    while not (lines := probe.waiting_on()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lines == [f"sample p0/0 at {server.url}, attempt 1"]
    call.result(5)
    assert probe.progress() != before and probe.waiting_on() == []


def test_a_group_is_scored_once_and_when_it_is_sampled(server):
    scores = TeacherScores(teacher(server))
    first, second, third = group(3)
    scores.submit(first)
    scores.submit(first)
    scores.submit(third)
    # The second was sampled before this start of the run; the third is left to the next step.
    found = scores.take([first, second])
    assert [one.tolist() for one in found] == [
        pytest.approx(expected_log_probs(one)) for one in sequences(3)[:2]
    ]
    assert scores.take([third])[0].tolist() == pytest.approx(expected_log_probs(sequences(3)[2]))
    assert len(server.requests) == 3
    scores.teacher.close()


def test_an_end_does_not_wait_for_the_next_attempt(server, monkeypatch):
    monkeypatch.setattr(teacher_server, "_FIRST_WAIT_S", 60.0)
    server.plan = [503]
    waiting = teacher(server)
    call = waiting.submit(sequences(1)[0])
    while not server.requests:
        time.sleep(0.01)
    waiting.close()
    with pytest.raises(TeacherError, match="the run has ended"):
        call.result(5)


def test_an_engine_that_hangs_does_not_keep_a_run_that_ends(monkeypatch):
    """It is ended after the teacher."""
    hangs, end = threading.Event(), threading.Event()

    def generate(_, more):
        more(True)
        hangs.set()
        assert end.wait(30)
        yield from ()

    monkeypatch.setattr(teacher_module, "CLOSE_WAIT_S", 0.1)
    pool = SimpleNamespace(generate=generate)
    made = EngineTeacher(pool, vocabulary=1000)
    made.submit(sequences(1)[0])
    assert hangs.wait(10)
    made.close()
    assert not end.is_set()
    end.set()
