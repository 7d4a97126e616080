"""An engine scores sequences that another model sampled: its log-probs of exactly their tokens."""

import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from reference import VOCABULARY, Reference

from rlmath.cluster.processes import send_signal
from rlmath.config.alignment import AlignmentConfig
from rlmath.model.tiny import make_tiny_model
from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.teacher import EngineTeacher, TeacherError, ToScore
from rlmath.training.checks.base import InvariantError
from rlmath.training.checks.still_teacher import EVERY, StillTeacher
from rlmath.types import Sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Another model than the other tests' engines have."""
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), seed=5)


@pytest.fixture(scope="module")
def teacher(ray_session, engine_spec, folder):
    spec = replace(engine_spec, model_path=str(folder), role="teacher", prefix_caching=False)
    with RolloutPool(spec, num_engines=1, stall_timeout_s=120, max_restarts=1) as pool:
        teacher = EngineTeacher(pool, VOCABULARY)
        yield teacher
        teacher.close()


def sequences(count):
    """Sequences of many lengths; the longest takes all that an engine has. No model
    would take their tokens; several begin alike."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        prompt = tuple(int(x) for x in np.random.default_rng(i // 4).integers(32, 127, 130))
        length = 512 - 1 - len(prompt) if i == 3 else int(rng.integers(1, 60))
        tokens = rng.integers(0, 257, length).astype(np.int32)
        log_probs = np.zeros(length, np.float32)
        sample = Sample(f"p{i // 4}", i % 4, tokens, log_probs, "", "stop", ((7, 0),), i, 0)
        made.append(ToScore(f"p{i // 4}/{i % 4}", prompt, sample))
    return made


def score(teacher, given):
    return [one.result(60) for one in [teacher.submit(one) for one in given]]


def expected_scores(reference, given):
    return [
        reference.log_probs(one.prompt_token_ids, one.sample, temperature=1.0).numpy()
        for one in given
    ]


def test_log_probs_are_those_of_transformers_for_these_tokens(teacher, folder):
    given = sequences(24)
    found, wanted = score(teacher, given), expected_scores(Reference(folder), given)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, atol=1e-4)
    # One after another, as many at once, and in another order: the same bits.
    alone = [score(teacher, [one])[0] for one in given[:6]]
    backwards = score(teacher, given[::-1])[::-1]
    for together, apart, turned in zip(found, alone, backwards, strict=False):
        assert together.tobytes() == apart.tobytes() == turned.tobytes()


def look(check, teacher, step):
    """The check before the update of a step."""
    config = SimpleNamespace(alignment=AlignmentConfig())
    run = SimpleNamespace(config=config, teacher=SimpleNamespace(teacher=teacher))
    check.before_update(SimpleNamespace(run=run, batch=object(), step=step, monitor=None))


def scaling_a_norm(factor):
    """For a vLLM worker, which cannot import this file: something trains the frozen model."""

    def scale(worker):
        parameters = dict(worker.model_runner.get_model().named_parameters())
        with torch.no_grad():
            parameters["model.norm.weight"].mul_(factor)

    return scale


def test_teacher_whose_weights_move_is_named(teacher):
    check = StillTeacher()
    look(check, teacher, step=1)
    look(check, teacher, step=1 + EVERY)
    teacher.pool.call_workers(scaling_a_norm(2.0))
    try:
        look(check, teacher, step=2 + EVERY)  # It looks at every 16th.
        with pytest.raises(InvariantError, match=r"step 33: engine 0 of the teacher .*model\.norm"):
            look(check, teacher, step=1 + 2 * EVERY)
    finally:
        teacher.pool.call_workers(scaling_a_norm(0.5))
    look(check, teacher, step=1 + 3 * EVERY)


def test_next_engine_scores_requests_of_a_dead_one(teacher):
    given = sequences(8)
    before = score(teacher, given)
    place = ray.get(teacher.pool.engines[0].place.remote())
    send_signal([place], signal.SIGKILL)
    after = score(teacher, given)
    assert teacher.pool.restarts == 1
    assert [one.tobytes() for one in before] == [one.tobytes() for one in after]


@pytest.mark.long
def test_two_ranks_of_an_engine_score_alike(ray_session, engine_spec, folder):
    """The others prove one rank; vLLM's workers send what they scored through shared memory."""
    spec = replace(engine_spec, model_path=str(folder), role="wide_teacher", tensor_parallel=2)
    given = sequences(8)
    with RolloutPool(spec, num_engines=1, stall_timeout_s=120) as pool:
        teacher = EngineTeacher(pool, VOCABULARY)
        found = score(teacher, given)
        teacher.close()
    for one, other in zip(found, expected_scores(Reference(folder), given), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_unreadable_and_late_scores_are_errors(teacher):
    (one,) = sequences(1)
    beyond = replace(one.sample, token_ids=np.array([1, VOCABULARY], np.int32))
    future = teacher.submit(replace(one, sample=beyond))
    with pytest.raises(TeacherError, match=f"p0/0 has token {VOCABULARY}"):
        future.result(5)
    teacher.close()
    with pytest.raises(TeacherError, match="has ended"):
        teacher.submit(one).result(5)
