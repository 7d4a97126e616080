"""``rlmath why`` works out what became of a sample, with the numbers that the step used."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlmath.actor.settings import shard_settings
from rlmath.batching.from_groups import sampled_sequences
from rlmath.batching.shards import shards
from rlmath.cli import main
from rlmath.commands.why import regenerate
from rlmath.commands.why.batch import Address
from rlmath.model.parallel import Layout
from rlmath.model.tiny_tokenizer import fast_tokenizer
from rlmath.monitor.digests import details_path
from rlmath.rollout.ledger import LEDGER_FILE, Event, Ledger
from rlmath.rollout.seeds import request_seed
from rlmath.training.algorithm_settings import update_settings
from rlmath.types import Group
from tests.unit.commands.made_run import Run
from tests.unit.commands.report.run_maker import group

SAMPLE = "2/train.jsonl:21/1"


class Varied(Run):
    """Groups of four samples with other rewards; one, which is cut off, has none."""

    def groups(self, step: int) -> list[Group]:
        rewards = [[1.0, -1.0, 3.0, None], [0.5, -1.0, -1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]
        texts = [r"so \boxed{2}", r"\boxed{3}", "2", "I give up"]
        return [group(f"train.jsonl:{step}{i}", r, texts, step) for i, r in enumerate(rewards)]


def why(folder: Path, sample: str, capsys: Any, *more: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["why", str(folder), sample, *more]) == code
    found = capsys.readouterr()
    return str(found.out if code == 0 else found.err)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.advantage=grpo", "algorithm.advantage_options.leave_one_out=true"],
        ["algorithm.advantage=dr_grpo", "algorithm.aggregation=seq_sum_constant"],
        ["algorithm.advantage=gdpo", "reward.items=[{name: math, weight: 2}]"],
        ["algorithm.advantage=batch_std", "algorithm.truncated=mask"],
        ["algorithm.advantage=reinforce_pp"],
        ["algorithm.advantage=rloo", "algorithm.whiten_tokens=true"],
        ["algorithm.filter.mask_duplicates=true", "algorithm.aggregation=prompt_mean"],
    ],
)
def test_the_advantage_is_the_one_that_was_used(
    overrides: list[str], tmp_path: Path, capsys: Any
) -> None:
    run = Varied(tmp_path / "run", *overrides).go(last=2)
    for index in range(4):
        text = why(run.folder, f"2/train.jsonl:21/{index}", capsys)
        assert "equal to what the update used, bit by bit" in text


class Distilled(Varied):
    def of_teacher(self, step: int, tokens: int) -> dict[str, Any]:
        return {"teacher_log_probs": self.old_log_probs(step, tokens) - 0.5}


def test_what_a_teacher_adds_is_not_taken_for_an_error(tmp_path: Path, capsys: Any) -> None:
    """Its term is not kept token by token; and without rewards each sample takes part."""
    given = ("algorithm.distill_coef=2", "teacher.path=t")
    run = Distilled(tmp_path / "run", *given, "algorithm.advantage=teacher").go(last=2)
    for index in (1, 3):
        text = why(run.folder, f"2/train.jsonl:21/{index}", capsys)
        assert "NOT what" not in text and "it is not in the loss" not in text
        assert "algorithm.distill_coef=2: times the difference" in text
        with_teacher, with_policy = re.findall(r"is (\S+) with the teacher\s+and\s+(\S+) ", text)[0]
        tokens = int(re.findall(r"sum over its (\d+) tokens", text)[0])
        assert float(with_policy) - float(with_teacher) == pytest.approx(0.5 * tokens, rel=1e-3)


def test_another_advantage_than_the_one_used_is_said(tmp_path: Path, capsys: Any) -> None:
    run = Varied(tmp_path / "run").go(last=2)
    file = details_path(run.folder, 2)
    details = json.loads(file.read_text())
    place = details["keys"]["sequences"].index("train.jsonl:21/1")
    details["items"]["advantages"][place] = "00000000"
    file.write_text(json.dumps(details))
    assert "up to rounding" in why(run.folder, SAMPLE, capsys)
    details["numbers"]["advantages"][place] += 1.0
    file.write_text(json.dumps(details))
    assert "NOT what the update used" in why(run.folder, SAMPLE, capsys)
    file.unlink()
    assert "the step's file with digests is gone" in why(run.folder, SAMPLE, capsys)


def test_the_groups_numbers(tmp_path: Path, capsys: Any) -> None:
    run = Varied(tmp_path / "run", "algorithm.advantage=dr_grpo").go(last=2)
    text = why(run.folder, SAMPLE, capsys)
    assert "algorithm.advantage=dr_grpo: r - mean within each group" in text
    assert "4 scored samples, mean reward -0.125" in text
    assert "advantage: -0.875" in text
    assert re.search(r"→ +1  reward +-1  wrong", text)


def test_an_unscored_sample_has_no_part(tmp_path: Path, capsys: Any) -> None:
    text = why(Varied(tmp_path / "run").go(last=2).folder, "2/train.jsonl:20/3", capsys)
    assert "total: none" in text and "math: could not score it" in text
    assert "advantage: +0" in text and "it is not in the loss: nothing could score it" in text


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "prompt_mean"])
def test_the_weight_of_a_token_is_that_of_the_ranks(
    aggregation: str, tmp_path: Path, capsys: Any
) -> None:
    run = Varied(tmp_path / "run", f"algorithm.aggregation={aggregation}", "runner.seed=3")
    run.go(last=2)
    sequences = sampled_sequences(
        run.groups(2), truncated=run.config.algorithm.truncated, mask_duplicates=False
    )
    limit: Any = SimpleNamespace(max_tokens_per_microbatch=1000, share_prompts=False)
    update = update_settings(run.config, 0.0, 0.0)
    (shard,) = shards(sequences, shard_settings(limit, Layout(), update, seed=3 + 2))
    weight = float(shard.weights[shard.places.tolist().index(4 + 1)])
    text = why(run.folder, SAMPLE, capsys)
    assert f"each of its 6 tokens weighs {weight:.6g}" in text
    assert "minibatch" in text and "of 2" in text


def test_the_graders_way(tmp_path: Path, capsys: Any) -> None:
    run = Varied(tmp_path / "run").go(last=2)
    text = why(run.folder, "2/train.jsonl:21/0", capsys)
    assert "accepted '2': integer" in text
    assert "answer taken from: the last \\boxed{}" in text
    assert "against '2': correct; the layer exact decided: the same text" in text
    assert "graded again: the same verdict" in text
    other = why(run.folder, SAMPLE, capsys)
    # The made-up run says that the grader took 2 for its answer.
    assert "graded again: wrong, answer '3'" in other


def test_seed_engine_weights_and_end(tmp_path: Path, capsys: Any) -> None:
    text = why(Varied(tmp_path / "run").go(last=2).folder, "2/train.jsonl:20/3", capsys)
    assert f"seed {2**60 + 3}, but " in text  # The made-up run draws its seeds otherwise.
    assert "weights version 1 (those after step 1)" in text
    assert "finish reason length: it was cut off at the limit" in text


def test_the_prompts_tokens_are_those_of_the_engine(tmp_path: Path, capsys: Any) -> None:
    tokens = tuple(fast_tokenizer().encode("What is 1+1?", add_special_tokens=False).ids)

    class Tokenized(Varied):
        def groups(self, step: int) -> list[Group]:
            return [
                dataclasses.replace(
                    one,
                    problem=dataclasses.replace(
                        one.problem,
                        prompt="What is 1+1?",
                        prompt_token_ids=tokens if step == 1 else (1, 2),
                    ),
                )
                for one in super().groups(step)
            ]

    run = Tokenized(tmp_path / "run", "model.path=tiny").go(last=2)
    text = why(run.folder, "1/train.jsonl:10/0", capsys)
    assert str(list(tokens)) in text and "they are those that the engine got" in text
    assert "they are NOT those" in why(run.folder, "2/train.jsonl:20/0", capsys)


def test_a_dropped_group_and_one_that_is_carried_over(tmp_path: Path, capsys: Any) -> None:
    class Filtered(Varied):
        def dropped(self, step: int) -> dict[str, str]:
            return {f"train.jsonl:{step}2": "equal_rewards"}

        def trained(self, step: int) -> list[Group]:
            kept = super().trained(step)
            return kept[:1] if step == 1 else [*super().trained(step - 1)[1:], *kept]

    run = Filtered(tmp_path / "run").go(last=2)
    assert "the group: equal_rewards" in why(run.folder, "1/train.jsonl:12/0", capsys)
    # The step's sequences are of two files then.
    assert "bit by bit" in why(run.folder, SAMPLE, capsys)
    ledger = Ledger(run.folder / LEDGER_FILE)

    def event(kind: Event, *groups: int, **more: Any) -> list[dict[str, Any]]:
        return [{"event": kind, "group": group, **more} for group in groups]

    rows = [json.loads(line) for line in (run.folder / "samples/step_000001.jsonl").open()]
    seeds = {row["problem_id"]: row["seed"] for row in reversed(rows)}
    for number in (0, 1):
        problem = f"train.jsonl:1{number}"
        ledger.write(1, event(Event.admitted, number, problem=problem, seed=seeds[problem]))
    ledger.write(1, event(Event.finished, 0, 1) + event(Event.trained, 0))
    carried = why(run.folder, "1/train.jsonl:11/0", capsys)
    assert "none yet: the group is carried over, and no step up to 2" in carried
    assert "Weight in the loss" not in carried
    assert "trained on it" not in why(run.folder, "1/train.jsonl:10/0", capsys)
    # What a ledger does not say that was cut off by a crash, digests do.
    assert "bit by bit" in why(run.folder, "2/train.jsonl:20/0", capsys)
    ledger.write(2, event(Event.trained, 1))
    carried = why(run.folder, "1/train.jsonl:11/0", capsys)
    assert "the group was carried over: step 2 trained on it" in carried
    assert "bit by bit" in carried and "of the minibatch" in carried


def test_long_texts_are_cut(tmp_path: Path, capsys: Any) -> None:
    class Long(Varied):
        def groups(self, step: int) -> list[Group]:
            return [group("train.jsonl:9", [1.0, -1.0], ["x" * 5000, "\x1b[2J2"], step)]

    run = Long(tmp_path / "run").go(last=1)
    text = why(run.folder, "1/train.jsonl:9/0", capsys)
    assert "--whole shows them" in text and "x" * 1000 not in text
    assert "x" * 5000 in why(run.folder, "1/train.jsonl:9/0", capsys, "--whole")
    assert "\x1b" not in why(run.folder, "1/train.jsonl:9/1", capsys)


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        ("7/train.jsonl:21/0", "steps 1 to 2"),
        ("2/train.jsonl:21/9", "samples 0 to 3"),
        ("2/train.jsonl:99/0", "train.jsonl:20"),
        ("nothing", "STEP/PROBLEM/INDEX"),
    ],
)
def test_a_sample_that_is_not_there(sample: str, says: str, tmp_path: Path, capsys: Any) -> None:
    run = Varied(tmp_path / "run").go(last=2)
    assert says in why(run.folder, sample, capsys, code=2)


def test_a_sample_of_several_versions(tmp_path: Path, capsys: Any) -> None:
    run = Varied(tmp_path / "run").go(last=2)
    file = run.folder / "samples" / "step_000002.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["spans"] = [[0, 0], [1, 2]]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = why(run.folder, SAMPLE, capsys)
    assert "2 versions of the weights: 0 from token 0, 1 from token 2" in text
    seed = request_seed(0, 1, "train.jsonl:21", 1)
    assert f"{seed} is of runner.seed=0, step 1," in text
    assert "NOT what the update used" not in text


def test_each_version_continues_what_the_one_before_it_sampled(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Varied(tmp_path / "run").go(last=2)
    file = run.folder / "samples" / "step_000002.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["spans"] = [[0, 0], [1, 2], [3, 3]]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    asked: list[tuple[str, int, int | None]] = []

    def weights(step: Any, version: int, folder: Path) -> Any:
        return SimpleNamespace(path=version, origin=f"weights {version}")

    def sample(path: Any, step: Any, begun: Any, budget_tokens: int | None) -> Any:
        request = regenerate.request_of(step, begun, budget_tokens)
        assert (request.seed, request.index) == (step.row["seed"], 1)
        tokens = request.begun_tokens
        asked.append((path, tokens, request.budget_tokens))
        more = budget_tokens or 4
        return SimpleNamespace(
            token_ids=range(tokens + more), text="x", log_probs=np.zeros(tokens + more)
        )

    monkeypatch.setattr(regenerate, "prompt_tokens", lambda step: (1, 2))
    monkeypatch.setattr(regenerate, "_weights", weights)
    monkeypatch.setattr(regenerate, "_with_weights", lambda step, weights, folder: weights.path)
    monkeypatch.setattr(regenerate, "_sample", sample)
    monkeypatch.setattr(regenerate, "digest_tokens", lambda sample: "another")
    text = why(run.folder, SAMPLE, capsys, "--regenerate")
    assert asked == [(0, 0, 2), (1, 2, 1), (3, 3, None)]
    assert "weights version 1, from token 2: weights 1" in text
    assert "its 7 tokens are NOT the same" in text


def test_weights_that_are_not_kept(tmp_path: Path, capsys: Any) -> None:
    run = Varied(tmp_path / "run").go(last=2)
    text = why(run.folder, SAMPLE, capsys, "--regenerate", code=2)
    assert "the weights after step 1; there is no checkpoint of it" in text
    assert "its updates cannot be redone: step 1 would be redone after the initial weights" in text


def test_a_problems_id_may_hold_slashes() -> None:
    assert Address.parse("3/data/a.jsonl:4#2/0") == Address(3, "data/a.jsonl:4#2", 0)
