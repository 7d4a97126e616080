"""Which rank's error is raised, with Ray's calls in this process."""

import pytest
from ray.exceptions import RayActorError, RayTaskError

from rlmath.actor import rank_calls
from rlmath.actor.rank_calls import ActorError, RankCalls
from rlmath.errors import UserError


class Ref:
    """A call with its result, which is there from the ``at``-th look on."""

    def __init__(self, result, at=0):
        self.result, self.at = result, at


class Looks:
    """Ray, as far as results are waited for."""

    def __init__(self):
        self.number = 0

    def wait(self, refs, num_returns, timeout):
        done = [ref for ref in refs if ref.at <= self.number][:num_returns]
        self.number += 1
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref):
        if isinstance(ref.result, Exception):
            raise ref.result
        return ref.result


@pytest.fixture
def calls(monkeypatch, tmp_path):
    monkeypatch.setattr(rank_calls, "ray", Looks())
    (tmp_path / "actor_2.log").write_text("the last thing that rank 2 said\n")
    return RankCalls(str(tmp_path))


def failed(cause):
    return RayTaskError("update", "traceback", cause)


def test_results_are_in_order_of_rank_however_they_come(calls):
    seen = []
    refs = [Ref("a", at=3), Ref("b"), Ref("c", at=1)]
    assert calls.results(refs, "update", lambda *one: seen.append(one)) == ["a", "b", "c"]
    assert sorted(seen) == [(0, "a"), (1, "b"), (2, "c")] and seen[-1] == (0, "a")
    assert calls.progress() == (1, 0) and calls.waiting_on == ("", [])


def test_a_rank_that_died_comes_before_those_that_lost_it(calls):
    """Rank 0 fails first, in a collective with rank 2, whose death is known a moment later."""
    lost = failed(RuntimeError("Connection closed by peer"))
    refs = [Ref(lost), Ref("b", at=99), Ref(RayActorError(), at=1)]
    with pytest.raises(ActorError, match="Megatron rank 2 failed: its process ended") as found:
        calls.results(refs, "update")
    assert "the last thing that rank 2 said" in str(found.value)
    assert not found.value.raised


def test_without_a_death_the_first_to_fail_is_named(calls):
    refs = [Ref("a", at=9), Ref(failed(ValueError("no batch"))), Ref("c", at=9)]
    with pytest.raises(ActorError, match="Megatron rank 1 failed: ValueError: no batch") as found:
        calls.results(refs, "update")
    assert found.value.raised


def test_an_error_of_the_user_is_raised_as_it_is(calls):
    with pytest.raises(UserError, match=r"^layer 3 holds NaN$"):
        calls.results([Ref(failed(UserError("layer 3 holds NaN")))], "start")


def test_what_is_awaited_later_fails_the_next_call_and_only_that(calls):
    calls.await_later([Ref("a"), Ref(failed(OSError("no memory")))], "load_parameters")
    with pytest.raises(ActorError, match="rank 1 failed: OSError: no memory"):
        calls.results([Ref("x"), Ref("y")], "log_probs")
    assert calls.results([Ref("x"), Ref("y")], "log_probs") == ["x", "y"]
