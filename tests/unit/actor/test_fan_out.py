"""What the driver sends in a step, with 8, 64 and 512 stand-in ranks: linear in the ranks.

The driver's side is the real one. Ray is a stand-in that calls at once and counts; a rank has its
own step around a stand-in model.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import OwnerDiedError

from rlmath.actor import group, rank_calls
from rlmath.actor.ahead import StepPass
from rlmath.actor.group import ActorError, ActorGroup
from rlmath.actor.rank_step import TokenSettings
from rlmath.actor.settings import StartedRank, UpdateResult, UpdateSettings
from rlmath.actor.step_parts import PartSettings
from rlmath.actor.token_values import TokenValues
from rlmath.actor.worker import ActorWorker
from rlmath.algorithms.advantages import SequenceAdvantages
from rlmath.algorithms.filters import TruncatedRule
from rlmath.algorithms.peers import Alone
from rlmath.batching.from_groups import SampledSequences, sampled_sequences
from rlmath.batching.from_sequences import batch_of_sequences
from rlmath.batching.shards import Shard
from rlmath.errors import LostArrays
from rlmath.model.parallel import Layout
from rlmath.monitor.array_figures import array_figures
from rlmath.rollout.held_arrays import bound, hold
from rlmath.types import GradedSample, Group, Problem, Sample, TrainingBatch
from rlmath.weights.sequence_fingerprints import SequenceFingerprints

TENSOR_PARALLEL, TOKENS = 2, 8192
UPDATE = UpdateSettings(minibatches=2)


class Model(Alone):
    """A rank's policy without a model."""

    is_last_stage = True

    def __init__(self, reports: bool) -> None:
        self.reports = reports

    def shard_log_probs(
        self, shard: Shard, reference: bool = False, keep_routes: bool = False
    ) -> TokenValues:
        values = shard.batch.engine_log_probs - float(reference)
        return TokenValues(torch.arange(values.numel()), values, values)

    def add_part(
        self, shard: Shard, settings: UpdateSettings, is_first: bool
    ) -> tuple[Any, TokenValues]:
        assert shard.batch.advantages is not None
        return Part(shard, shard.places), self.shard_log_probs(shard)

    def update_from_parts(
        self, parts: list[Any], settings: UpdateSettings, divisor: float, traced: Any
    ) -> UpdateResult:
        assert divisor == TOKENS
        traces: Any = [place for one in parts for place in one.places.tolist()]
        return UpdateResult([{"loss": 1.0}], {}, None, traces=tuple(traces))

    def begin_release(self, empty_cache: Any) -> None: ...

    def update_shard(
        self, shard: Shard, settings: UpdateSettings, traced: Collection[int] = ()
    ) -> UpdateResult:
        assert shard.batch.advantages is not None and shard.batch.old_log_probs is not None
        assert len(list(shard.shares())) == settings.minibatches
        return UpdateResult([{"loss": 1.0}], {}, None)


@dataclasses.dataclass
class Part:
    """What a model keeps of a part."""

    shard: Shard
    places: torch.Tensor

    def at(self, places: torch.Tensor) -> Part:
        return Part(self.shard, places[self.places])


class Network:
    """Ray's calls, made at once, and what they carry."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.put_bytes, self.call_bytes = 0, 0

    def put(self, value: Any) -> Any:
        data = pickle.dumps(value)
        self.calls["put"] += 1
        self.put_bytes += len(data)
        return SimpleNamespace(value=pickle.loads(data))

    def wait(
        self, refs: list[Any], num_returns: int, timeout: float
    ) -> tuple[list[Any], list[Any]]:
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref: Any) -> Any:
        return ref.value

    def worker(self, rank: int) -> Any:
        one = ActorWorker.__new__(ActorWorker)
        one.actor, one.value_model = Model(rank % TENSOR_PARALLEL == 0), None  # type: ignore
        one.platform = SimpleNamespace(
            release_cached_memory=lambda: None, take_peak_bytes=lambda: rank
        )
        one._peaks = {}

        def method(name: str) -> Any:
            def remote(*arguments: Any) -> Any:
                self.calls[name] += 1
                given = [getattr(a, "value", a) for a in arguments]
                if name != "begin_step":  # Whose argument is in shared memory.
                    self.call_bytes += len(pickle.dumps(given))
                return _Answer(getattr(one, name)(*given))

            def remote_twice(*arguments: Any) -> Any:
                return [_Answer(value) for value in remote(*arguments).value]

            return SimpleNamespace(
                remote=remote, options=lambda num_returns: SimpleNamespace(remote=remote_twice)
            )

        return _Methods(method)


class _Answer:
    def __init__(self, value: Any) -> None:
        self.value = value


class _Methods:
    def __init__(self, method: Any) -> None:
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return self._method(name)


def begun(
    network: Network, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[ActorGroup, TrainingBatch, torch.Tensor]:
    """Ranks, and ``TOKENS`` tokens with their log-probs."""
    monkeypatch.setattr(group, "ray", network)
    monkeypatch.setattr(rank_calls, "ray", network)
    layout = Layout(TENSOR_PARALLEL, 1, ranks // TENSOR_PARALLEL)
    settings: Any = SimpleNamespace(max_tokens_per_microbatch=64, share_prompts=False)
    actor = ActorGroup(settings, layout, device="cpu", seed=0, num_threads=1, log_dir="")
    actor._workers = [network.worker(rank) for rank in range(ranks)]
    actor._dp = [rank // TENSOR_PARALLEL for rank in range(ranks)]
    batch = batch_of_sequences([((1,) * 3, (2,) * 13)] * (TOKENS // 16))
    log_probs = torch.linspace(-3, 0, batch.engine_log_probs.numel())
    return actor, dataclasses.replace(batch, engine_log_probs=log_probs), log_probs


def step(ranks: int, monkeypatch: pytest.MonkeyPatch, passes: int = 0) -> Network:
    """A step of ``TOKENS`` tokens on ``ranks`` ranks, with log-probs from ``passes`` passes that
    were begun before it."""
    network = Network()
    actor, batch, log_probs = begun(network, ranks, monkeypatch)
    ahead = []
    for number in range(passes):
        places = tuple(range(number, len(batch), passes))
        ahead.append(StepPass(places, actor.begin_log_probs(batch.select(places), True)))
    actor.begin_step(batch, UPDATE, seed=0)
    alignment = actor.step_log_probs(now=0, ahead=ahead, with_reference=bool(passes))
    assert sorted(alignment.places.tolist()) == list(range(len(batch)))
    advantages = SequenceAdvantages(torch.arange(len(batch)).float())
    finished = actor.step_finish(TokenSettings(), advantages)
    assert finished.any_advantage
    # Of every sequence in its place, whichever rank has it.
    values = {
        "old_log_probs": log_probs,
        "advantages": torch.repeat_interleave(advantages.values, 13),
    }
    if passes:
        values["ref_log_probs"] = log_probs - 1.0
    whole = SequenceFingerprints.of(torch.arange(len(batch)), batch.response_lengths, values)
    assert torch.equal(finished.fingerprints.places, whole.places)
    for name in values:
        assert torch.equal(finished.fingerprints.bits[name], whole.bits[name])
    result, again = actor.step_update(UPDATE, now=0)
    assert result.minibatches == [{"loss": 1.0}] and again is None
    # Of the rank that has most.
    phases = ("between_updates", "log_probs", "update")
    assert actor.take_peaks() == dict.fromkeys(phases, ranks - 1)
    return network


def test_a_step_grows_with_the_ranks_and_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {ranks: step(ranks, monkeypatch) for ranks in (8, 64, 512)}
    methods = ("begin_step", "step_log_probs", "step_finish", "update", "take_peaks")
    for ranks, network in of.items():
        # One object for each data-parallel rank, which its tensor ranks share.
        expected = {"put": ranks // TENSOR_PARALLEL} | dict.fromkeys(methods, ranks)
        assert network.calls == expected
    # All shards together are the step, whatever the ranks; each has a kilobyte besides.
    overhead = (of[512].put_bytes - of[8].put_bytes) / (256 - 4)
    assert overhead < 2500
    assert of[512].call_bytes < 64 * of[8].call_bytes


def test_values_computed_ahead_come_to_the_ranks_whose_shards_have_the_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``step`` compares the values of every sequence. With 512 ranks most have none of a
    pass."""
    for ranks in (8, 512):
        network = step(ranks, monkeypatch, passes=5)
        assert network.calls["log_probs_ahead"] == 5 * ranks
        assert network.calls["step_log_probs"] == ranks


def test_parts_of_a_step_are_those_of_the_step_in_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = {}
    for ranks in (8, 512):
        network = of[ranks] = Network()
        actor, batch, log_probs = begun(network, ranks, monkeypatch)
        settings = PartSettings(UpdateSettings(), TokenSettings(), False, False, now=0)
        parts = []
        # Those of a step that is not finished are forgotten.
        for number in (9, 0, 1, 2, 3, 4):
            places = tuple(range(number % 5, len(batch), 5))
            own = SequenceAdvantages(torch.tensor(places).float())
            given = batch.select(places)
            made = actor.begin_part(given, settings, own, is_first=number in (9, 0))
            parts += [StepPass(places, made)] if number < 9 else []
        found = actor.part_figures(parts)
        assert found.alignment.loss.tokens == TOKENS // 16 * 13
        prints = found.tokens.fingerprints
        values = torch.arange(len(batch)).float()
        whole = {
            "old_log_probs": log_probs,
            "advantages": torch.repeat_interleave(values, batch.response_lengths),
        }
        wanted = SequenceFingerprints.of(values.long(), batch.response_lengths, whole)
        assert torch.equal(prints.places, wanted.places)
        for name in whole:
            assert torch.equal(prints.bits[name], wanted.bits[name])
        result = actor.update_from_parts(parts, UpdateSettings(), float(TOKENS))
        assert sorted(result.traces) == list(range(len(batch))) and actor.changed  # type: ignore
        assert network.calls["add_part"] == 6 * ranks
        assert network.calls["put"] == 6 * ranks // TENSOR_PARALLEL
    assert of[512].call_bytes < 64 * of[8].call_bytes


class Block:
    """What stands for Ray's reference to a block."""

    def __init__(self, value: Any) -> None:
        self.value = value


def of_samples(log_probs: torch.Tensor, places: Sequence[int], stay: bool) -> SampledSequences:
    """Sequences of ``begun``, as samples, of which all but the first may stay with an engine."""
    groups = []
    for place in places:
        own = log_probs.numpy()[13 * place : 13 * place + 13]
        sample = Sample(f"p{place}", 0, np.full(13, 2, np.int32), own, "", "stop", ((0, 0),), 0, 4)
        if stay and place:
            (light,), block = hold([dataclasses.replace(sample, figures=array_figures(sample))])
            (sample,) = bound([light], Block(block))
        graded = GradedSample(sample, 1.0, True, "correct")
        groups.append(Group(Problem(f"p{place}", "?", (1,) * 3, ("1",)), (graded,)))
    return sampled_sequences(groups, truncated=TruncatedRule.keep, mask_duplicates=False)


@pytest.mark.parametrize("ranks", [8, 64])
def test_passes_and_parts_get_arrays_that_stay_with_the_engines(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, also where most ranks have no sequence of a pass."""
    network = Network()
    actor, batch, log_probs = begun(network, ranks, monkeypatch)
    settings = PartSettings(UpdateSettings(), TokenSettings(), False, False, now=0)
    places = tuple(range(0, len(batch), 40))
    advantages = SequenceAdvantages(torch.tensor(places).float())
    found = []
    for stay in (False, True):
        sequences = of_samples(log_probs, places, stay)
        made = actor.begin_log_probs(sequences, True)
        part = StepPass(places, actor.begin_part(sequences, settings, advantages, is_first=True))
        values = {i: ref.value for i, ref in actor._values_by_rank(made).items()}
        found.append((made, values, actor.part_figures([part]).tokens.fingerprints))
        assert len(made.arrays) == len(part.made.arrays) == stay * (len(places) - 1)
    (made, values, prints), (of_held, others, others_prints) = found
    for rank, own in values.items():
        assert torch.equal(made.places[rank], of_held.places[rank])
        for one, other in zip(own, others[rank], strict=True):
            np.testing.assert_array_equal(one, other)
    assert torch.equal(prints.places, others_prints.places)
    assert prints.bits.keys() == others_prints.bits.keys()
    assert all(torch.equal(prints.bits[name], others_prints.bits[name]) for name in prints.bits)
    # A block that its node took along is told of its sample, whatever the ranks were asked.

    def gone(*_: Any) -> None:
        raise ActorError("Megatron rank 3 failed") from OwnerDiedError("00ff", None, "")

    monkeypatch.setattr(actor._calls, "results", gone)
    for call in (lambda: actor._values_by_rank(of_held), lambda: actor.part_figures([part])):
        with pytest.raises(LostArrays, match=r"sample 0 of problem p40 \(engine 4\)"):
            call()
    with pytest.raises(ActorError):
        actor._values_by_rank(made)


@pytest.mark.parametrize(("ranks", "lines"), [(1, 1), (2, 2), (512, 8)])
def test_a_start_says_who_has_its_weights(
    ranks: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, said = Network(), []
    monkeypatch.setattr(group, "ray", network)
    monkeypatch.setattr(rank_calls, "ray", network)
    actor = ActorGroup.__new__(ActorGroup)
    actor.layout, actor._calls = Layout(data_parallel=ranks), rank_calls.RankCalls("")
    actor._starting = [_Answer(StartedRank(rank, 3 * 2**20, 0.25)) for rank in range(ranks)]
    actor.wait_until_ready(said.append)
    assert len(said) == lines
    assert said[-1] == (
        f"{ranks} of {ranks} ranks have their weights (rank {ranks - 1}: 3.0 MiB, read in 0.2 s)"
    )


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("step_update", (UPDATE, 1)),
        ("step_update_values", (None,)),
        ("renew_reference", (1.0, False)),
    ],
)
def test_what_changes_a_model_says_so_before(method: str, arguments: tuple[Any, ...]) -> None:
    """A run that is cut short in it must not save the step before: the ranks would write what it
    made of them."""
    actors = ActorGroup.__new__(ActorGroup)
    actors.changed = False
    seen = []

    def ranks(*_: Any) -> Any:
        seen.append(actors.changed)
        raise InterruptedError

    actors._all = ranks  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        getattr(actors, method)(*arguments)
    assert seen == [True]


def test_a_pass_is_done_when_each_rank_has_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Network):
        left = 2

        def wait(
            self, refs: list[Any], num_returns: int, timeout: float
        ) -> tuple[list[Any], list[Any]]:
            assert timeout == 0, "whoever looks does not wait"
            assert num_returns == len(refs)
            done = len(refs) - self.left
            return refs[:done], refs[done:]

    network = Late()
    actor, batch, _ = begun(network, 8, monkeypatch)
    made = actor.begin_log_probs(batch)
    assert not actor.is_done(made)
    network.left = 0
    assert actor.is_done(made)
