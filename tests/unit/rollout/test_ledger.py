import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlmath.checkpoint import CheckpointStore
from rlmath.engines.requests import Request
from rlmath.rollout.lag import LengthTotals
from rlmath.rollout.ledger import LEDGER_FILE, Event, Ledger, LedgerError, events
from rlmath.rollout.live_group import LiveGroup
from rlmath.training.checkpointing import Saver
from rlmath.types import GradedSample, Group, Problem, Sample
from tests.support import fake_engines
from tests.support.fake_engines import anywhere, sampler_of, through_a_checkpoint

SETTINGS = ("rollout.schedule=carry_over", "rollout.cut_after_tokens=8", "rollout.max_lag=3")


def sample(sampler, step, collector):
    return fake_engines.sample(sampler, step, collector, step, 0.9)[0]


def two_steps(folder, collector):
    """The ledger of a run's first two steps, and the sampler's state after them."""
    sampler = sampler_of(*SETTINGS, ledger=Ledger(folder / LEDGER_FILE))
    for step in (1, 2):
        sample(sampler, step, collector)
    return folder / LEDGER_FILE, through_a_checkpoint(sampler, folder)


def resume(path, state, after_step=2):
    sampler = sampler_of(*SETTINGS, ledger=Ledger(path, after_step))
    sampler.load_state_dict(state)
    return sampler


def test_a_run_resumes_without_the_ledgers_last_lines(collector, tmp_path, capsys):
    path, state = two_steps(tmp_path, collector)
    whole = path.read_bytes()
    straight = resume(path, state)
    expected = [anywhere(sample(straight, step, collector)) for step in (3, 4)]
    assert not capsys.readouterr().err
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    lost = 0
    for end in (0, ends[0], ends[len(ends) // 3], ends[-9], ends[-2], ends[-1] - 20):
        for rest in (b"", bytes(100)):  # A crash leaves zeros where data did not reach the disk.
            path.write_bytes(whole[:end] + rest)
            sampler = resume(path, state)
            assert f"of the {state['ledger_events']} that the checkpoint" in capsys.readouterr().err
            assert [anywhere(sample(sampler, step, collector)) for step in (3, 4)] == expected
            # It is a ledger like any other from then on.
            assert Ledger(path, 4).balance == sampler.ledger.balance
            lost += sampler.ledger.balance.ended[Event.lost]
            resume(path, through_a_checkpoint(sampler, tmp_path), 4)
            assert not capsys.readouterr().err
    assert lost
    path.unlink()
    resume(path, state)
    assert "it has 0 events" in capsys.readouterr().err


def test_a_group_that_is_missing_in_a_complete_ledger_is_an_error(collector, tmp_path):
    path, state = two_steps(tmp_path, collector)
    lost = state["live"].pop()["ordinal"]
    with pytest.raises(LedgerError, match=rf"lost: \[{lost}\]"):
        resume(path, state)


def test_a_new_run_counts_on_nothing_of_an_earlier_one(collector, tmp_path, capsys):
    """A run began here from another run's checkpoint; then one starts over, and one begins from a
    checkpoint again."""
    (tmp_path / "other").mkdir()
    _, state = two_steps(tmp_path / "other", collector)
    path = tmp_path / LEDGER_FILE
    held = resume(path, state, 0).ledger.balance.live
    assert held and {event["step"] for event in events(path)} == {0}
    again = resume(path, state, 0)
    assert again.ledger.balance.live == held == {event["group"] for event in events(path)}
    sample(again, 3, collector)
    new = sampler_of(*SETTINGS, ledger=Ledger(path, 0))
    sample(new, 1, collector)
    assert Ledger(path, 1).balance == new.ledger.balance
    assert not capsys.readouterr().err


def test_a_ledger_of_other_groups_is_void(collector, tmp_path, capsys):
    path, state = two_steps(tmp_path, collector)
    path.unlink()
    other = Ledger(path)
    admitted = [{"event": Event.admitted, "group": one, "problem": "d:0"} for one in range(90)]
    other.write(1, [*admitted, *({"event": Event.trained, "group": one} for one in range(90))])
    state["ledger_events"] = 1000
    sampler = resume(path, state)
    sample(sampler, 3, collector)
    assert Ledger(path, 3).balance == sampler.ledger.balance
    assert "it has 180 events of the 1000" in capsys.readouterr().err


def test_a_checkpoint_is_there_after_the_lines_that_it_counts_are_on_the_disk(
    collector, tmp_path, monkeypatch
):
    path = tmp_path / LEDGER_FILE
    on_disk = {}
    fsync, rename = os.fsync, Path.rename
    renamed = []

    def noted_fsync(handle):
        fsync(handle)
        on_disk[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def noted_rename(self, target):
        if self.suffix == ".partial":
            assert on_disk.get(path.stat().st_ino) == path.stat().st_size
            assert tmp_path.stat().st_ino in on_disk, "nor is the file's name lost"
            renamed.append(target.name)
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    ranks = SimpleNamespace(
        changed=False,
        save_checkpoint=lambda folder, in_background: (folder / "tensors").write_bytes(b"1"),
        checkpoint_written=lambda wait: True,
    )
    sampler = sampler_of(*SETTINGS, ledger=Ledger(path))
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    for step, in_background in ((1, False), (2, True)):
        saver = Saver(store, ranks, {"sampler": sampler}, in_background)
        sample(sampler, step, collector)
        saver.step_done(step, {})
        saver.save()
        saver.poll(wait=True)
        saver.close()
    assert renamed == ["step_000001", "step_000002"]


def test_a_long_ledger_takes_little_memory(tmp_path):
    """A run of 10,000 steps has millions of events; as objects they take 700 bytes each."""
    path = tmp_path / "ledger.jsonl"
    groups = 20_000
    lines = [
        {"step": 1 + group // 100, "event": event, "group": group}
        for group in range(groups)
        for event in ("admitted", "finished", "trained")
    ]
    lines.insert(30_000, {"step": 90, "event": "resumed"})
    again = [line for line in lines[:30_000] if line["step"] > 90]
    lines[30_001:30_001] = again
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "ev')
    whole = sum(len(json.dumps(line)) + 1 for line in lines)
    tracemalloc.start()
    ledger = Ledger(path, after_step=150)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 60 * 3 * groups
    assert ledger.balance.admitted == ledger.balance.ended["trained"] == 15_000
    assert ledger.balance.next_ordinal == 15_000 and not ledger.balance.live
    text = path.read_text()
    assert text[whole:] == '{"step": 150, "event": "resumed"}\n'
    assert len(events(path)) == 3 * 15_000


def response(tokens, finish_reason="stop"):
    ids = np.zeros(tokens, np.int32)
    return Sample("p", 0, ids, np.zeros(tokens, np.float32), "", finish_reason, ((0, 0),), 0, 0)


def group_of(*tokens):
    graded = [GradedSample(response(count), 1.0, True, "correct") for count in tokens]
    return Group(Problem("p", "", (1,), ()), tuple(graded))


def test_the_length_bias_counts_what_is_unfinished_with_the_tokens_so_far():
    totals = LengthTotals()
    totals.add([group_of(10, 30)], [group_of(10)])
    # 60 tokens over 2 finished responses.
    assert totals.bias([response(20, "cut")]) == {"rollout/length_bias": 10 / 30 - 1}
    assert totals.bias([response(20)]) == {"rollout/length_bias": 10 / 20 - 1}


def test_no_length_bias_before_any_response_is_known_to_be_finished():
    totals = LengthTotals()
    totals.add([], [group_of(10)])
    assert totals.bias([response(20, "cut")]) == {}
    assert totals.bias([replace(response(20), index=1)])["rollout/length_bias"] == pytest.approx(
        -0.5
    )


def test_a_response_that_engines_continue_counts_with_what_it_had():
    """With ``continuous`` all of them are running when a step takes its groups."""
    problem = Problem("p", "", (1,), ())
    requests = tuple(Request("p", i, (1,), 64, 1.0, 1.0, seed=i) for i in range(3))
    live = LiveGroup(0, 1, problem, requests)
    live.add(response(8))
    live.add(replace(response(20, "cut"), index=1))
    assert live.unfinished == 2
    (continued,) = live.take_cut(None)
    assert continued.begun_tokens == 20 and not live.cut
    assert sorted(len(one.token_ids) for one in live.known_samples()) == [8, 20]
    live.add(replace(response(30), index=1))
    assert sorted(len(one.token_ids) for one in live.known_samples()) == [8, 30]
    assert live.unfinished == 1
