import dataclasses
import pickle

import numpy as np
import pytest
import torch

from rlmath.algorithms.aggregation import AGGREGATIONS
from rlmath.algorithms.alignment import token_lags
from rlmath.algorithms.filters import TruncatedRule
from rlmath.batching import minibatches
from rlmath.batching.from_groups import sampled_sequences
from rlmath.batching.shards import ShardSettings, response_rows, shards
from rlmath.types import GradedSample, Group, Problem, Sample, TrainingBatch


def groups(count=6, size=4, longest=40):
    draw = np.random.default_rng(0)
    found = []
    for number in range(count):
        graded = []
        for index in range(size):
            length = int(draw.integers(1, longest))
            tokens = draw.integers(150_000, size=length, dtype=np.int32)
            log_probs = -draw.random(length, dtype=np.float32)
            sample = Sample(f"p{number}", index, tokens, log_probs, "", "stop", ((3, 0),), 0, 0)
            reward = None if draw.random() < 0.2 else float(index)
            graded.append(GradedSample(sample, reward, None, "ungraded"))
        prompt = tuple(range(2 + number))
        found.append(Group(Problem(f"p{number}", "?", prompt, ("1",)), tuple(graded)))
    return found


def sequences(**sizes):
    return sampled_sequences(groups(**sizes), truncated=TruncatedRule.keep, mask_duplicates=False)


def shards_of(batch, ranks, **settings):
    wanted = {"minibatches": 2, "seed": 5, "max_tokens_per_microbatch": 60} | settings
    return list(shards(batch, ShardSettings(ranks, **wanted)))


def test_a_copy_of_what_takes_no_part_is_no_copy():
    """The first could not be scored: a later one with the same tokens is trained on, and once."""
    (group,) = groups(count=1)
    same = group.samples[0].sample
    rewards = (None, 1.0, 1.0, None)
    samples = tuple(GradedSample(same, reward, None, "ungraded") for reward in rewards)
    given = [dataclasses.replace(group, samples=samples)] * 2
    found = sampled_sequences(given, truncated=TruncatedRule.keep, mask_duplicates=True)
    assert found.takes_part.tolist() == [False, True, False, False] * 2


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_sequence_is_in_one_shard_with_all_that_it_has(ranks):
    given = sequences()
    whole = given.select(range(len(given)))
    found = shards_of(given, ranks)
    assert sorted(p for one in found for p in one.places.tolist()) == list(range(len(given)))
    for shard in found:
        expected = whole.select(shard.places.tolist())
        for field in dataclasses.fields(TrainingBatch):
            mine, wanted = getattr(shard.batch, field.name), getattr(expected, field.name)
            assert mine is wanted is None or torch.equal(mine, wanted), field.name
        rows = response_rows(shard.places, whole.response_lengths)
        assert torch.equal(whole.engine_log_probs[rows], shard.batch.engine_log_probs)
        # The same sequences in a minibatch, whatever the ranks.
        cut = minibatches(given.group_ids.tolist(), 2, 5)
        for share, members in zip(shard.shares(), cut, strict=True):
            assert set(share.places.tolist()) <= set(members)
    # Ranks wait for each other in every micro-batch.
    assert len({tuple(len(counts) for counts in one.counts) for one in found}) == 1


@pytest.mark.parametrize("ranks", [1, 3])
def test_routes_stay_with_their_sequences(ranks):
    """Some samples have none; every route says whose it is, and of which token."""
    made = []
    for place, group in enumerate(groups()):
        graded = []
        for one in group.samples:
            tokens, routes = len(one.sample.token_ids) + 2 + place, None
            if one.sample.index != 2:
                routes = np.full((tokens - 1, 2, 2), 4 * place + one.sample.index, np.uint8)
                routes[:, 1, 1] = np.arange(tokens - 1)
            sample = dataclasses.replace(one.sample, routes=routes)
            graded.append(dataclasses.replace(one, sample=sample))
        made.append(dataclasses.replace(group, samples=tuple(graded)))
    given = sampled_sequences(made, truncated=TruncatedRule.keep, mask_duplicates=False)
    for shard in shards_of(given, ranks):
        again = pickle.loads(pickle.dumps(shard))
        for share in again.shares():
            routes, lengths = share.batch.routes, share.batch.route_lengths
            sizes = share.batch.sequence_lengths
            pieces = routes.split(lengths.tolist())
            for place, size, own in zip(share.places.tolist(), sizes, pieces, strict=True):
                assert len(own) == (0 if place % 4 == 2 else size - 1)
                assert (own[:, 0, 0] == place).all()
                assert torch.equal(own[:, 1, 1].long(), torch.arange(len(own)))
    assert shards_of(sequences(), 1)[0].batch.routes is None


@pytest.mark.parametrize("ranks", [1, 4])
def test_each_token_keeps_the_version_that_sampled_it(ranks):
    """From spans to the lags that a rank measures by, also where one rank has no mixed sample."""
    made, versions = [], []
    for number, group in enumerate(groups(count=4, size=2, longest=12)):
        graded = []
        for one in group.samples:
            length = len(one.sample.token_ids)
            cuts = sorted({0, min(1, length - 1), length // 2}) if number else [0]
            spans = tuple((5 + 2 * place, start) for place, start in enumerate(cuts))
            sample = dataclasses.replace(one.sample, spans=spans)
            graded.append(dataclasses.replace(one, sample=sample))
            versions.append([max(v for v, start in spans if start <= t) for t in range(length)])
        made.append(Group(group.problem, tuple(graded)))
    given = sampled_sequences(made, truncated=TruncatedRule.keep, mask_duplicates=False)
    seen = []
    for shard in shards_of(given, ranks, minibatches=1):
        batch = pickle.loads(pickle.dumps(shard)).batch
        expected = [12 - version for place in shard.places.tolist() for version in versions[place]]
        assert token_lags(batch, 12).tolist() == expected
        for place in range(len(batch)):
            part = batch.part(place, 1)
            wanted = [12 - version for version in versions[int(shard.places[place])]]
            assert token_lags(part, 12).tolist() == wanted
        seen.append(batch.token_ages is None)
    assert any(max(row) > min(row) for row in versions) and not all(seen)
    assert sequences().select([0, 1]).token_ages is None


@pytest.mark.parametrize("kind", AGGREGATIONS.names())
def test_a_tokens_weight_does_not_depend_on_the_ranks(kind):
    given = sequences()
    weights = []
    for ranks in (1, 2, 5):
        found = torch.full((int(given.response_lengths.sum()),), torch.nan)
        for shard in shards_of(given, ranks, aggregation=kind, constant_length=40):
            for share in shard.shares():
                found[response_rows(share.places, given.response_lengths)] = share.weights
        weights.append(found)
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    masked = ~given.select(range(len(given))).loss_mask
    assert masked.any() and not weights[0][masked].any() and weights[0][~masked].all()


def test_micro_batches_lie_side_by_side_and_are_the_same_for_log_probs_and_update():
    for shard in shards_of(sequences(), 2):
        shares = list(shard.shares())
        of_update = [
            share.places[list(one.sequences)].tolist()
            for share in shares
            for one in share.micro_batches
        ]
        whole = shard.whole()
        assert of_update == [
            shard.places[list(one.sequences)].tolist() for one in whole.micro_batches
        ]
        for share in (*shares, whole):
            lengths = share.batch.sequence_lengths
            for one in share.micro_batches:
                assert one.num_tokens == int(lengths[list(one.sequences)].sum())
            # No copy.
            start, end = shard.batch.tokens.data_ptr(), shard.batch.tokens.nbytes
            assert start <= share.batch.tokens.data_ptr() < start + end


@pytest.mark.parametrize("multiple_of", [1, 3])
@pytest.mark.parametrize("budget", [60, 150, 10**6])
def test_a_forward_pass_joins_micro_batches_over_minibatches(budget, multiple_of):
    found = shards_of(sequences(), 2, max_tokens_per_forward=budget, multiple_of=multiple_of)
    for shard in found:
        joined, whole = shard.forward_share().micro_batches, shard.whole().micro_batches
        # The same sequences in the same order, so that values are in the shard's.
        assert [i for one in joined for i in one.sequences] == list(range(len(shard.batch)))
        ends = [one.sequences[-1] for one in whole if one.sequences]
        assert {one.sequences[-1] for one in joined if one.sequences} <= {*ends}
        assert all(one.num_tokens <= max(budget, 60) for one in joined)
        assert len(joined) % multiple_of == 0
        assert pickle.loads(pickle.dumps(shard)).forward_counts == shard.forward_counts
    first, second = (one.forward_counts for one in found)
    assert len(first) == len(second) <= len(whole)
    assert len(first) == (multiple_of if budget > 1000 else len(first)) < len(whole) or budget == 60


def test_a_shard_travels_in_8_bytes_a_token_and_is_read_where_it_arrives():
    given = sequences(longest=2000)
    for shard in shards_of(given, 2, max_tokens_per_microbatch=4000):
        buffers = []
        body = pickle.dumps(shard, protocol=5, buffer_callback=buffers.append)
        arrived = [bytes(buffer) for buffer in buffers]  # Read-only, as Ray's.
        sent = len(body) + sum(map(len, arrived))
        assert sent <= 1.05 * 8 * int(shard.batch.tokens.numel())
        again = pickle.loads(body, buffers=arrived)
        for field in dataclasses.fields(TrainingBatch):
            mine, wanted = getattr(again.batch, field.name), getattr(shard.batch, field.name)
            assert mine is wanted is None or torch.equal(mine, wanted), field.name
        assert torch.equal(again.places, shard.places) and again.counts == shard.counts
        assert torch.equal(again.weights, shard.weights)
        places = [np.frombuffer(one, np.uint8).ctypes.data for one in arrived]
        assert again.batch.tokens.data_ptr() in places, "no copy"
