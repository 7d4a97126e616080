from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlmath.actor.frozen_weights import FrozenWeights
from rlmath.config.load import load
from rlmath.engines.requests import EngineError
from rlmath.engines.worker_state import parameter_sums
from rlmath.rollout.teacher import EngineTeacher, TeacherScores
from rlmath.training.checks.base import InvariantError
from rlmath.training.checks.still_teacher import EVERY, StillTeacher, moved_scores, moved_weights
from rlmath.training.checks.still_weights import different_copies, find_drift, find_moved
from rlmath.types import GradedSample, Group, Problem, Sample
from rlmath.weights.gather import WeightChanges

SAMPLE = Sample("p", 0, np.ones(3, np.int32), np.zeros(3, np.float32), "", "stop", ((0, 0),), 1, 0)
GROUP = Group(Problem("p", "?", (1,), ("2",)), (GradedSample(SAMPLE, 0.0, None, "ungraded"),))


class Server:
    """Counts what it scores."""

    def __init__(self):
        self.scored, self.offset = 0, 0.0

    def submit(self, sequence):
        self.scored += 1
        found = Future()
        found.set_result(np.full(3, -1.0 - self.offset, np.float32))
        return found


def now(teacher, step):
    run = SimpleNamespace(
        teacher=None if teacher is None else TeacherScores(teacher),
        config=load(["experiment=quickstart", "model.path=tiny", "runner.run_dir=r"]),
    )
    return SimpleNamespace(
        run=run, step=step, groups=[GROUP], batch=object(), monitor=None, result=None
    )


def test_engines_of_a_teacher_are_compared_every_16_steps():
    held = [[{"a": 1}, {"b": 3}], [{"a": 1}, {"b": 3}]]
    calls = []

    def sums(_):
        calls.append("asked")
        if len(calls) == 2:
            raise EngineError("it is started again")
        return [list(one) for one in held]

    teacher = EngineTeacher(SimpleNamespace(ask=sums), 10)
    check = StillTeacher()
    for step in range(5, 5 + EVERY + 1):
        check.before_update(now(teacher, step))
    assert len(calls) == 2
    check.before_update(now(teacher, 5 + 2 * EVERY))
    held[1][1] = {"b": 4}
    with pytest.raises(InvariantError, match=r"engine 1 of the teacher has other weights .* in b"):
        check.before_update(now(teacher, 5 + 3 * EVERY))
    assert moved_weights([[{"a": 1}]], [[{"a": 1}]]) == []
    assert "in a" in moved_weights([[{"a": 1}]], [[{}]])[0]


def test_checksums_are_of_every_parameter_of_any_type():
    model = torch.nn.Module()
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16), ("c", torch.float8_e4m3fn)):
        values = torch.full((4, 2), 1.5).to(dtype).t()
        model.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    model.register_parameter("d", torch.nn.Parameter(torch.empty(0)))
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    first = parameter_sums(worker)
    assert sorted(first) == ["a", "b", "c", "d"]
    model.b.data[1, 2] = 1.25
    assert moved_weights([[first]], [[parameter_sums(worker)]])[0].count("in b:") == 1


def test_server_scores_a_sequence_again():
    server, check = Server(), StillTeacher()
    for step in range(1, EVERY + 2):
        check.before_update(now(server, step))
        check.after_update(now(server, step))
    assert server.scored == 2
    server.offset = 0.5
    check.before_update(now(server, 1 + 2 * EVERY))
    with pytest.raises(InvariantError, match=r"differ by 0\.5 nats"):
        check.after_update(now(server, 1 + 2 * EVERY))


def test_scores_may_round_and_may_rule_out_tokens():
    first = np.array([-1.0, -np.inf, -2.0], np.float32)
    assert moved_scores("p/0", first, first + np.float32(0.05)) == []
    assert moved_scores("p/0", first, np.array([-1.0, -3.0, -2.0], np.float32))
    assert moved_scores("p/0", first, np.array([np.nan, -np.inf, -2.0], np.float32))


def test_run_without_a_teacher_is_not_looked_at():
    check = StillTeacher()
    assert check.before_update(now(None, 1)) == {} and check.after_update(now(None, 1)) == {}


def getters(tensors):
    return [(name, lambda one=one: one) for name, one in tensors]


def test_frozen_weights_that_move_are_named_within_the_round():
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [(f"t{i}", torch.randn(100, 50).to(dtype)) for i in range(4)]
        looking = FrozenWeights(getters(tensors), mib_per_step=0.0)
        assert [looking.find_changed() for _ in range(5)] == [[]] * 5
        tensors[3][1][7, 3] *= 2
        found = [looking.find_changed() for _ in range(4)]
        assert sorted(found) == [[], [], [], ["t3"]]
    everything = FrozenWeights(getters(tensors))
    tensors[0][1].mul_(0.5)
    tensors[2][1].mul_(0.5)
    assert everything.find_changed() == ["t0", "t2"]
    assert FrozenWeights([]).find_changed() == []


def test_moved_weights_are_named_with_their_rank():
    assert find_moved([[], []]) == []
    (sentence,) = find_moved([[], ["a", "b", "c", "d"]])
    assert "a on rank 1, b on rank 1, c on rank 1 and 1 more" in sentence


def test_copies_that_differ_are_named():
    alike = WeightChanges({"a": 1, "b": 2}, None)
    assert different_copies([alike, alike]) == []
    (sentence,) = different_copies([alike, alike, WeightChanges({"a": 1, "b": 3}, None)])
    assert "rank 2 holds other weights than rank 0 after the update, in b" in sentence


def test_differing_copies_of_weights_are_named():
    alike = WeightChanges({"a": 1}, None)
    assert find_drift([alike, alike]) == []
    other = WeightChanges({"a": 1}, None, "ranks 0 and 1 should hold the same norm and do not")
    (sentence,) = find_drift([alike, other])
    assert sentence.startswith("ranks 0 and 1 should hold the same norm")
