"""Samples that a run finds again after it died: the same to the last bit, or not at all."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.simulation.virtual_engines import VirtualPool
from rlmath.config.load import load
from rlmath.config.rollout import RolloutConfig
from rlmath.config.schema import Device
from rlmath.engines.requests import Request
from rlmath.rollout.journal import FOLDER, SampleJournal
from rlmath.training.gate import AlignmentError
from rlmath.training.group_source import GroupSource, weights_digest
from rlmath.training.step import forgetting_misaligned
from rlmath.types import Sample


@pytest.fixture
def journal(tmp_path):
    made = SampleJournal(tmp_path / FOLDER, keep_gib=1)
    yield made
    made.close()


def request(index=0, **changes):
    plain = Request(f"p{index // 4}", index % 4, (1, 2, 3 + index), 64, 1.0, 1.0, seed=index)
    return replace(plain, **changes)


def answer(of, length=5):
    draw = np.random.default_rng(of.seed)
    begun = of.begun_tokens
    tokens, log_probs = draw.integers(0, 2**17, length, np.int32), -draw.random(length, np.float32)
    log_probs[0] = -np.inf
    spans = ((3, 0),)
    if of.begun is not None:
        tokens = np.concatenate([of.begun.token_ids, tokens])
        log_probs = np.concatenate([of.begun.log_probs, log_probs])
        spans = (*of.begun.spans, (4, begun))
    # Half a surrogate, as a byte-level tokenizer may give.
    return Sample(
        of.problem_id, of.index, tokens, log_probs, "a\n\ud800 é", "cut", spans, of.seed, 1
    )


def write_answers(journal, requests):
    with journal.step(3, "w") as step:
        for one in requests:
            step.keep(one, answer(one))


def test_samples_come_back_bit_for_bit_and_once(journal):
    requests = [request(i) for i in range(20)]
    write_answers(journal, requests)
    with journal.step(3, "w") as step:
        for one in reversed(requests):
            assert step.find(one) == answer(one)
            assert step.find(one) is None
        assert step.reused == 20


def test_begun_samples_are_in_the_request_and_not_written_again(journal, tmp_path):
    long = replace(answer(request()), token_ids=np.arange(9000, dtype=np.int32))
    long = replace(long, log_probs=-np.random.default_rng(0).random(9000, np.float32))
    continued = request(begun=long, budget_tokens=7)
    write_answers(journal, [continued])
    assert (tmp_path / FOLDER / "step_000003.bin").stat().st_size < 1000
    moved = replace(long, log_probs=long.log_probs * 2)
    with journal.step(3, "w") as step:
        assert step.find(replace(continued, begun=moved)) is None
        assert step.find(replace(continued, begun=None)) is None
        assert step.find(continued) == answer(continued)


def test_routes_are_kept_with_the_tokens_that_they_are_of(journal, tmp_path):
    def with_routes(sample, count):
        routes = np.random.default_rng(1).integers(0, 256, (count, 3, 2)).astype(np.uint8)
        return replace(sample, routes=routes)

    one = request(0)
    continued = request(1, begun=with_routes(answer(request(1)), 7))
    found = {0: with_routes(answer(one), 7), 1: with_routes(answer(continued), 12)}
    with journal.step(3, "w") as step:
        step.keep(one, found[0])
        step.keep(continued, found[1])
    data = (tmp_path / FOLDER / "step_000003.bin").read_bytes()
    assert found[0].routes is not None and found[0].routes.tobytes() in data, "not compressed"
    bare = replace(continued, begun=replace(continued.begun, routes=None))
    with journal.step(3, "w") as step:
        assert step.find(one) == found[0]
        assert step.find(bare) is None, "its routes would follow upon others"
        assert step.find(continued) == found[1]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 9},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"max_tokens": 65},
        {"budget_tokens": 8},
        {"ignore_eos": True},
        {"prompt_token_ids": (1, 2)},
        {"problem_id": "q"},
        {"wants_routes": True},
        {"index": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_request_finds_nothing(journal, change):
    write_answers(journal, [request()])
    with journal.step(3, "w") as step:
        assert step.find(request(**change)) is None
        assert step.find(request()) is not None


def test_samples_cut_before_their_first_token_are_not_kept(journal):
    """It tells nothing; and the same request, asked again in its step, would find it."""
    whole = answer(request())
    tokens = np.empty(0, np.int32), np.empty(0, np.float32)
    empty = replace(whole, token_ids=tokens[0], log_probs=tokens[1], spans=())
    continued = request(1, begun=whole)
    with journal.step(3, "w") as step:
        step.keep(request(), empty)
        step.keep(continued, whole)
    with journal.step(3, "w") as step:
        assert step.find(request()) is None and step.find(continued) is None


def test_samples_of_other_weights_or_of_unknown_ones_are_not_used(journal):
    write_answers(journal, [request()])
    for weights in ("other", None):
        with journal.step(3, weights) as step:
            assert step.find(request()) is None
    with journal.step(4, "w") as step:
        assert step.find(request()) is None


@pytest.mark.parametrize("seed", range(12))
def test_a_file_that_ends_anywhere_or_is_damaged_gives_what_is_whole(journal, tmp_path, seed):
    requests = [request(i) for i in range(8)]
    write_answers(journal, requests)
    path = tmp_path / FOLDER / "step_000003.bin"
    data, draw = bytearray(path.read_bytes()), random.Random(seed)
    if seed % 2:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    else:
        del data[draw.randrange(len(data)) :]
    path.write_bytes(data)
    with journal.step(3, "w") as step:
        found = [step.find(one) for one in requests]
        for one, sample in zip(requests, found, strict=True):
            assert sample is None or sample == answer(one)
            if sample is None:
                step.keep(one, answer(one))
    assert None in found
    with journal.step(3, "w") as step:
        assert [step.find(one) for one in requests] == [answer(one) for one in requests]


def test_files_go_when_a_checkpoint_covers_them_or_the_limit_is_reached(tmp_path):
    folder = tmp_path / FOLDER
    made = SampleJournal(folder, keep_gib=1500 / 2**30)
    for number in range(1, 6):
        with made.step(number, "w") as step:
            for index in range(4):
                step.keep(request(index), answer(request(index)))
    names = sorted(path.name for path in folder.iterdir())
    assert names[-1] == "step_000005.bin" and 2 <= len(names) < 5
    made.drop(up_to=4)
    assert [path.name for path in folder.iterdir()] == ["step_000005.bin"]
    made.close()
    off = SampleJournal(tmp_path / "none", keep_gib=0)
    write_answers(off, [request()])
    off.close()
    assert not (tmp_path / "none").exists()


def test_a_full_disk_costs_the_journal_and_not_the_run(journal, capsys):
    with open("/dev/full", "wb") as full, journal.step(3, "w") as step:
        step._file = full
        for index in range(3):
            step.keep(request(index), answer(request(index)))
    said = capsys.readouterr().err
    assert "No space left on device" in said and said.count("\n") == 1


def test_a_step_looks_at_the_files_of_the_step_before_alone(tmp_path, monkeypatch):
    made = SampleJournal(tmp_path / FOLDER, keep_gib=1)
    looked = []
    stat = Path.stat

    def count_stat(path, **given):
        if path.name.startswith("step_"):
            looked.append(path.name)
        return stat(path, **given)

    for number in range(1, 7):
        with made.step(number, "w") as step:
            step.keep(request(0), answer(request(0)))
    size = sum(one.stat().st_size for one in (tmp_path / FOLDER).iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", count_stat)
        made._limit(tmp_path / FOLDER / "step_000007.bin")
    assert {one.split(".")[0] for one in looked} == {"step_000006"}
    # And what it counted is what there is.
    assert made._total == size
    made.drop(up_to=4)
    assert made._total == sum(one.stat().st_size for one in (tmp_path / FOLDER).iterdir())
    made.close()


def test_samples_that_failed_the_gate_are_not_found_again(journal):
    write_answers(journal, [request()])
    run = SimpleNamespace(config=SimpleNamespace(rollout=RolloutConfig()))
    monitor = None
    source = GroupSource(run, cast(Any, SimpleNamespace(journal=journal)), monitor)
    with pytest.raises(ValueError), forgetting_misaligned(source, 3):
        raise ValueError("of something else")
    with journal.step(3, "w") as step:
        assert step.find(request()) is not None
    with pytest.raises(AlignmentError), forgetting_misaligned(source, 3):
        raise AlignmentError("stale")
    with journal.step(3, "w") as step:
        assert step.find(request()) is None


def test_a_generation_asks_engines_only_for_what_is_missing(journal):
    requests = [request(i) for i in range(12)]
    write_answers(journal, requests[:5])
    pool = VirtualPool(2, lambda _: 50)
    asked = []

    def more(idle):
        if idle and not asked:
            asked.append(requests[4])  # Of the journal, when engines have nothing left to do.
            return [requests[4], requests[11]]
        return []

    with journal.step(3, "w") as step:
        one = pool.begin(requests[:4] + requests[5:11], journal=step)
        samples = list(one.samples(more))
    assert sorted((s.problem_id, s.index) for s in samples) == sorted(r.key for r in requests)
    assert sum(one.finished) == 7 and step.reused == 5
    # Samples of engines are there the next time.
    with journal.step(3, "w") as step:
        assert all(step.find(one) is not None for one in requests)


def test_samples_of_engines_that_compute_otherwise_are_not_found(tmp_path):
    """A run that is continued with other settings of its engines samples again."""
    (tmp_path / "config.json").write_text("{}")
    given = [f"model.path={tmp_path}", "data.train_paths=[x]", f"runner.run_dir={tmp_path}"]
    log = SimpleNamespace(digest_log=SimpleNamespace(weights_after=lambda _: "weights"))

    def digest_of(*overrides):
        layout = SimpleNamespace(engine_tensor_parallel=1, device=Device.cpu)
        run = SimpleNamespace(config=load([*given, *overrides]), layout=layout)
        return weights_digest(run, log, version=3)

    others = [
        "model.dtype=float32",
        "rollout.quantization=fp8",
        "rollout.kv_cache_dtype=fp8",
        "actor.lora.rank=8",
    ]
    assert digest_of("runner.steps=7") == digest_of("model.dtype=bfloat16", "runner.steps=8")
    digests = [digest_of(), *(digest_of(one) for one in others)]
    assert None not in digests and len(set(digests)) == len(digests)
