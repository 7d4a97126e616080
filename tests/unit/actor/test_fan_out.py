"""Bytes that the driver sends in a step, with 8, 64 and 512 fake ranks: linear in the ranks.

The driver's side is the real one. Ray is a fake that calls at once and counts; a rank has its
own step around a fake model.
"""

import dataclasses
import pickle
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from rlmath.actor import group, rank_calls
from rlmath.actor.group import ActorGroup
from rlmath.actor.plan import StepPlan
from rlmath.actor.settings import UpdateResult
from rlmath.actor.token_values import TokenValues
from rlmath.actor.worker import ActorWorker
from rlmath.algorithms.advantages import SequenceAdvantages
from rlmath.algorithms.peers import Alone
from rlmath.batching.from_sequences import batch_of_sequences
from rlmath.model.parallel import Layout
from rlmath.weights.sequence_fingerprints import SequenceFingerprints

TENSOR_PARALLEL, TOKENS = 2, 8192
PLAN = StepPlan(passes=("old",), minibatches=2)


class Model(Alone):
    """A rank's policy without a model."""

    is_last_stage = True

    def __init__(self, reports):
        self.reports = reports

    def shard_log_probs(self, shard, name="policy", seed=0):
        values = shard.batch.engine_log_probs
        return TokenValues(torch.arange(values.numel()), values, values)

    def begin_release(self, empty_cache): ...

    def update_shard(self, shard, plan):
        assert shard.batch.advantages is not None and shard.batch.old_log_probs is not None
        assert len(list(shard.shares())) == plan.minibatches
        return UpdateResult([{"loss": 1.0}], {}, None)


class Network:
    """Ray's calls, made at once, and what they carry."""

    def __init__(self):
        self.calls: Counter[str] = Counter()
        self.put_bytes, self.call_bytes = 0, 0

    def put(self, value):
        data = pickle.dumps(value)
        self.calls["put"] += 1
        self.put_bytes += len(data)
        return SimpleNamespace(value=pickle.loads(data))

    def wait(self, refs, num_returns, timeout):
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref):
        return ref.value

    def worker(self, rank):
        one = ActorWorker.__new__(ActorWorker)
        one.actor, one.value_model = Model(rank % TENSOR_PARALLEL == 0), None
        one.platform = SimpleNamespace(
            release_cached_memory=lambda: None, take_peak_bytes=lambda: rank
        )
        one._peaks = {}

        def method(name):
            def remote(*arguments):
                self.calls[name] += 1
                given = [getattr(a, "value", a) for a in arguments]
                if name != "run_part":  # Whose shard is in shared memory.
                    self.call_bytes += len(pickle.dumps(given))
                return _Answer(getattr(one, name)(*given))

            return SimpleNamespace(remote=remote)

        return _Methods(method)


class _Answer:
    def __init__(self, value):
        self.value = value


class _Methods:
    def __init__(self, method):
        self._method = method

    def __getattr__(self, name):
        return self._method(name)


def begin(network, ranks, monkeypatch):
    """Ranks, and ``TOKENS`` tokens with their log-probs."""
    monkeypatch.setattr(group, "ray", network)
    monkeypatch.setattr(rank_calls, "ray", network)
    layout = Layout(TENSOR_PARALLEL, 1, ranks // TENSOR_PARALLEL)
    settings = SimpleNamespace(
        max_tokens_per_microbatch=64, max_tokens_per_forward=64, share_prompts=False
    )
    actor = ActorGroup(settings, layout, device="cpu", seed=0, num_threads=1, log_dir="")
    actor._workers = [network.worker(rank) for rank in range(ranks)]
    actor._dp = [rank // TENSOR_PARALLEL for rank in range(ranks)]
    batch = batch_of_sequences([((1,) * 3, (2,) * 13)] * (TOKENS // 16))
    log_probs = torch.linspace(-3, 0, batch.engine_log_probs.numel())
    batch = dataclasses.replace(batch, engine_log_probs=log_probs, advantages=None)
    return actor, batch, log_probs


def step(ranks, monkeypatch):
    network = Network()
    actor, batch, log_probs = begin(network, ranks, monkeypatch)
    alignment = actor.run_part(batch, PLAN)
    assert sorted(alignment.places.tolist()) == list(range(len(batch)))
    advantages = SequenceAdvantages(torch.arange(len(batch)).float())
    report = actor.finish_step(PLAN, advantages)
    finished, result = report.tokens, report.policy
    assert finished is not None and finished.any_advantage and report.values is None
    # Every sequence is in its place, whichever rank has it.
    values = {
        "old_log_probs": log_probs,
        "advantages": torch.repeat_interleave(advantages.values, 13),
    }
    whole = SequenceFingerprints.of(torch.arange(len(batch)), batch.response_lengths, values)
    assert torch.equal(finished.fingerprints.places, whole.places)
    for name in values:
        assert torch.equal(finished.fingerprints.bits[name], whole.bits[name])
    assert result.minibatches == [{"loss": 1.0}] and result.alignment is None
    # Peaks are of the rank that has most.
    phases = ("between_updates", "log_probs", "update")
    assert actor.take_peaks() == dict.fromkeys(phases, ranks - 1)
    return network


def test_a_step_grows_with_the_ranks_and_no_faster(monkeypatch):
    of = {ranks: step(ranks, monkeypatch) for ranks in (8, 64, 512)}
    methods = ("run_part", "finish_step", "take_peaks")
    for ranks, network in of.items():
        # One object for each data-parallel rank, which its tensor ranks share.
        expected = {"put": ranks // TENSOR_PARALLEL} | dict.fromkeys(methods, ranks)
        assert network.calls == expected
    # All shards together are the step, whatever the ranks; each has a kilobyte besides.
    overhead = (of[512].put_bytes - of[8].put_bytes) / (256 - 4)
    assert overhead < 2500
    assert of[512].call_bytes < 64 * of[8].call_bytes


@pytest.mark.parametrize(
    ("method", "arguments"), [("finish_step", (PLAN,)), ("renew_reference", (1.0, False))]
)
def test_model_changing_calls_set_changed_first(method, arguments):
    """A run that is cut short in it must not save the step before: the ranks would write what it
    made of them."""
    actors = ActorGroup.__new__(ActorGroup)
    actors.changed = False
    seen = []

    def ranks(*_):
        seen.append(actors.changed)
        raise InterruptedError

    actors._all = ranks
    actors._workers, actors._dp, actors._shares = [], [], []
    actors._calls = SimpleNamespace(results=ranks)
    with pytest.raises(InterruptedError):
        getattr(actors, method)(*arguments)
    assert seen == [True]
