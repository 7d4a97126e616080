"""Routes from vLLM's rows to a sample, and with it to a checkpoint and back."""

import array
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rlmath.engines.requests import Request
from rlmath.engines.routes import RouteSpec
from rlmath.engines.running_request import RunningRequest
from rlmath.engines.step_loop import StepLoop
from rlmath.rollout.group_state import sample_from_state, sample_to_state
from rlmath.types import Sample

SPEC = RouteSpec((0, 2), experts=8, experts_per_token=2)


def rows(count, seed=0, dtype=np.uint8):
    """As vLLM gives them: layer 1 has no experts."""
    draw = np.random.default_rng(seed)
    found = draw.random((count, 3, 8)).argsort(-1)[..., :2].astype(dtype)
    found[:, 1] = 0
    return found


def test_route_rows_of_all_steps_follow_the_begun_part():
    first, more = rows(5), [rows(1, 1), rows(1, 2)]
    prompt_and_two = SPEC.assemble(None, [first, *more], 8)
    assert prompt_and_two is not None and prompt_and_two.dtype == np.uint8
    assert np.array_equal(prompt_and_two, np.concatenate([first, *more])[:, [0, 2]])
    continued = SPEC.assemble(prompt_and_two, [rows(4, 3)], 12)
    assert continued is not None and np.array_equal(continued[:7], prompt_and_two)
    assert np.array_equal(continued[7:], rows(4, 3)[:, [0, 2]])
    # Cut before the engine computed anything.
    assert SPEC.assemble(prompt_and_two, [], 8) is prompt_and_two
    assert SPEC.assemble(None, [], 5) is None


@pytest.mark.parametrize("tokens", [5, 6, 9])
def test_rows_of_another_number_of_tokens_are_nobodys(tokens):
    begun = rows(3)[:, [0, 2]]
    assert SPEC.assemble(begun, [rows(4)], tokens) is begun
    assert SPEC.assemble(None, [rows(7)], tokens) is None


def test_many_experts_need_two_bytes():
    spec = RouteSpec((0, 2), experts=300, experts_per_token=2)
    given = rows(3, dtype=np.uint16)
    given[:, 2, 0] += 290
    found = spec.assemble(None, [given], 4)
    assert found is not None and found.dtype == np.int16
    assert np.array_equal(found, given[:, [0, 2]])


def test_rows_that_are_no_routes_are_an_error():
    for given in (rows(3)[:, :2], rows(3)[..., :1], rows(3).reshape(3, -1)):
        with pytest.raises(RuntimeError, match=r"shape .* needs \[3, 2\]"):
            SPEC.assemble(None, [given], 4)
    never_captured = rows(3)
    never_captured[:, 2] = 0
    with pytest.raises(RuntimeError, match="2 different experts of 8"):
        SPEC.assemble(None, [never_captured], 4)
    beyond = rows(3)
    beyond[-1, 0, 1] = 8
    with pytest.raises(RuntimeError, match="2 different experts of 8"):
        SPEC.assemble(None, [beyond], 4)
    for wraps in (257, -1):  # 1 and 255 as uint8.
        beyond = rows(3, dtype=np.int32)
        beyond[0, 2] = (3, wraps)
        with pytest.raises(RuntimeError, match=f"{wraps}.*2 different experts of 8"):
            SPEC.assemble(None, [beyond], 4)


def test_a_layer_in_which_all_tokens_have_expert_0_alone_has_no_routes():
    spec = RouteSpec((0, 2), experts=8, experts_per_token=1)
    given = rows(300)[..., :1]
    assert spec.assemble(None, [given], 301) is not None
    given[:, 2] = 0
    assert spec.assemble(None, [given[:5]], 6) is not None, "a few tokens may all go there"
    with pytest.raises(RuntimeError, match=r"expert 0 for all 300 tokens in layers \[2\]"):
        spec.assemble(None, [given], 301)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_an_engine_tells_once_of_rows_of_another_number_of_tokens(more, capsys):
    loop = StepLoop(cast(Any, SimpleNamespace(routes=SPEC)), 0)
    request = Request("p", 0, (1, 2, 3), 4, 1.0, 1.0, seed=0, wants_routes=True)
    tokens = array.array("i", [5, 6, 7, 8])
    running = RunningRequest(request, token_ids=tokens, routes=[rows(6 + more)])
    cut = replace(running, routes=[])
    assert loop._routes(cut, is_cut=True) is None
    found = [loop._routes(running, is_cut=False) for _ in range(2)]
    said = capsys.readouterr().err
    if more:
        assert found == [None, None]
        assert said.count("warning") == 1
        assert f"p, sample 0: vLLM returned routes for {6 + more} tokens, but 6 went" in said
    else:
        assert [len(one) for one in found] == [6, 6] and not said


def test_samples_that_want_no_routes_have_none():
    loop = StepLoop(cast(Any, SimpleNamespace(routes=SPEC)), 0)
    request = Request("p", 0, (1, 2, 3), 4, 1.0, 1.0, seed=0)
    tokens = array.array("i", [5, 6, 7, 8])
    running = RunningRequest(request, token_ids=tokens, routes=[rows(6)])
    assert loop._routes(running, is_cut=False) is None


def test_a_checkpoint_keeps_the_routes_of_unfinished_samples():
    tokens, log_probs = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)
    plain = Sample("p", 0, tokens, log_probs, "", "cut", ((1, 0),), 7, 0)
    routed = replace(plain, routes=rows(5).astype(np.int16))
    assert routed != plain and routed != replace(routed, routes=rows(5, 1).astype(np.int16))
    for sample in (plain, routed):
        again = sample_from_state(json.loads(json.dumps(sample_to_state(sample))))
        assert again == sample
    assert again.routes is not None and again.routes.dtype == np.int16
