"""``rlmath bisect`` finds a difference that was planted in one of two runs, by name."""

import dataclasses
import json

import pytest
import torch

from rlmath.checks import attempts
from rlmath.cli import main
from rlmath.commands.bisect.compare import compare as compare_runs
from rlmath.monitor.digests import DIGESTS_FILE, comparable, details_path, read_digests
from rlmath.monitor.run_folder import RunFolder
from rlmath.monitor.run_settings import ATTEMPTS_FILE
from rlmath.training.digests import add_fingerprints, digest_values
from rlmath.weights.sequence_fingerprints import SequenceFingerprints
from tests.unit.commands.made_run import Run
from tests.unit.commands.report.run_maker import group

# Too slow to run after each change.
pytestmark = pytest.mark.process


@pytest.fixture
def base(tmp_path):
    return Run(tmp_path / "a").go().folder


def compare(a, b):
    return compare_runs(RunFolder(a), RunFolder(b))


def phase(found):
    return found.parting.step, found.parting.phase.name


def keys(found):
    return [item.b for item in found.parting.items]


def run_bisect(a, b, capsys, code=1):
    assert main(["bisect", str(a), str(b)]) == code
    return str(capsys.readouterr().out)


def test_equal_runs(base, tmp_path, capsys):
    again = Run(tmp_path / "b").go().folder
    found = compare(base, again)
    assert found.parting is None and found.settings == () and found.steps == (0, 1, 2, 3)
    assert "equal to the last bit: steps 0 to 3" in run_bisect(base, again, capsys, code=0)


def test_one_token_of_the_data(base, tmp_path, capsys):
    class Other(Run):
        def groups(self, step):
            found = super().groups(step)
            if step == 2:
                problem = dataclasses.replace(
                    found[1].problem, prompt="What is x?", prompt_token_ids=(1, 2, 4)
                )
                found[1] = dataclasses.replace(found[1], problem=problem)
            return found

    other = Other(tmp_path / "b").go().folder
    found = compare(base, other)
    assert phase(found) == (2, "prompts") and keys(found) == ["train.jsonl:21"]
    assert found.parting is not None and found.parting.equal == ("problems",)
    text = run_bisect(base, other, capsys)
    assert "equal to the last bit: steps 0 to 1" in text
    assert "the first is train.jsonl:21" in text and "'What is x?'" in text


def test_another_data_order(base, tmp_path, capsys):
    class Other(Run):
        def groups(self, step):
            return super().groups(step)[:: -1 if step == 3 else 1]

    other = Other(tmp_path / "b").go().folder
    found = compare(base, other)
    assert phase(found) == (3, "problems")
    assert "train.jsonl:30 in A and train.jsonl:32 in B" in run_bisect(base, other, capsys)


def test_another_seed_and_the_setting_that_made_it(base, tmp_path, capsys):
    class Other(Run):
        def groups(self, step):
            return [
                each(one, lambda sample: {"seed": sample.seed + 1}) for one in super().groups(1)
            ]

    other = Other(tmp_path / "b", "runner.seed=7").go().folder
    found = compare(base, other)
    assert [(one.key, one.a, one.b) for one in found.settings] == [("runner.seed", 0, 7)]
    assert phase(found) == (1, "seeds") and len(keys(found)) == 6
    assert "setting runner.seed: A 0, B 7" in run_bisect(base, other, capsys)


def test_one_setting_is_named_where_its_numbers_part(base, tmp_path):
    class Other(Run):
        def update(self, step):
            for tensor in self.weights.values():
                tensor += 0.5

    found = compare(base, Other(tmp_path / "b", "actor.optimizer.lr=1e-4").go().folder)
    assert [one.key for one in found.settings] == ["actor.optimizer.lr"]
    assert phase(found) == (1, "weights") and len(keys(found)) == 3


@pytest.mark.parametrize(
    ("field", "name"), [("token_ids", "tokens"), ("log_probs", "rollout_log_probs")]
)
def test_one_token_of_one_sample(field, name, base, tmp_path, capsys):
    class Other(Run):
        def groups(self, step):
            found = super().groups(step)
            if step != 2:
                return found

            def change(sample):
                values = getattr(sample, field).copy()
                values[2] += 1
                return {field: values} if sample.index == 0 else {}

            return [each(one, change) for one in found]

    other = Other(tmp_path / "b").go().folder
    found = compare(base, other)
    assert phase(found) == (2, name)
    assert keys(found) == [f"train.jsonl:2{i}/0" for i in range(3)]
    text = run_bisect(base, other, capsys)
    if field == "log_probs":
        assert "sum over its tokens: A -2.5, B -1.5 (by 1," in text


def test_the_token_is_named_where_it_is_kept(tmp_path, capsys):
    class Other(Run):
        def groups(self, step):
            def change(sample):
                tokens = sample.token_ids.copy()
                tokens[2] = 99
                return {"token_ids": tokens}

            # All of them, as only one sample of a step keeps its tokens.
            return [each(one, change) for one in super().groups(step)[:1]]

    class Base(Run):
        def groups(self, step):
            return super().groups(step)[:1]

    one, other = Base(tmp_path / "one").go().folder, Other(tmp_path / "b").go().folder
    assert "first at token 2 of the response: A token_ids 2" in run_bisect(one, other, capsys)


def test_a_reward_and_who_gave_it(base, tmp_path, capsys):
    class Other(Run):
        def groups(self, step):
            found = super().groups(step)
            if step == 3:
                id_ = found[2].problem.id
                found[2] = group(id_, [1.0, 1.0], ["2", "3"], step)
            return found

    other = Other(tmp_path / "b").go().folder
    found = compare(base, other)
    assert phase(found) == (3, "rewards") and keys(found) == ["train.jsonl:32/1"]
    text = run_bisect(base, other, capsys)
    assert "reward: A -1.0, B 1.0" in text and "status: A wrong, B correct" in text


def test_one_bit_of_the_actors_log_probs(base, tmp_path):
    class Other(Run):
        def old_log_probs(self, step, tokens):
            found = super().old_log_probs(step, tokens)
            if step == 2:
                found.view(torch.int32)[-1] ^= 1
            return found

    found = compare(base, Other(tmp_path / "b").go().folder)
    assert phase(found) == (2, "old_log_probs") and keys(found) == ["train.jsonl:22/1"]


def test_a_gradient_and_its_minibatch(base, tmp_path, capsys):
    class Other(Run):
        def gradient(self, step):
            first, second = super().gradient(step)
            return [first, second | ({"grad_norm": 0.2500001} if step == 3 else {})]

    other = Other(tmp_path / "b").go().folder
    found = compare(base, other)
    assert phase(found) == (3, "gradient") and keys(found) == ["minibatch 2"]
    assert "grad_norm: A 0.25, B 0.2500001 (by 1e-07" in run_bisect(base, other, capsys)


def test_a_gradient_and_its_tensors(base, tmp_path, capsys):
    """A gradient that no minibatch number tells, and one that one does."""

    class Other(Run):
        def gradients(self, step):
            changed = {"layer.1.weight": 5 << 40} if step == 2 else {}
            return super().gradients(step) | changed

    other = Other(tmp_path / "b").go().folder
    found = compare(base, other)
    assert phase(found) == (2, "gradient_tensors") and keys(found) == ["layer.1.weight"]

    class Both(Other):
        def gradient(self, step):
            return [{"grad_norm": 9.0 if step == 2 else one["grad_norm"], "loss": one["loss"]}
                    for one in super().gradient(step)]  # fmt: skip

    text = run_bisect(base, Both(tmp_path / "c").go().folder, capsys)
    assert "gradients of 1 of 3 tensors differ: layer.1.weight" in text


def test_the_value_model(tmp_path):
    class Valued(Run):
        bias = 1

        def train_on(self, monitor, step, groups):
            super().train_on(monitor, step, groups)
            own = {"value_head.weight": step << 40, "value_head.bias": self.bias << 40}
            digest_values(monitor.digests, [{"loss": 1.0 / step}], own)

    class Other(Valued):
        bias = 2

    a, b = Valued(tmp_path / "v").go().folder, Other(tmp_path / "w").go().folder
    found = compare(a, b)
    assert phase(found) == (1, "value_weights") and keys(found) == ["value_head.bias"]
    assert found.parting is not None and "value_gradient" in found.parting.equal


def test_one_bit_of_one_tensor(base, tmp_path, capsys):
    """After an update, and before the first."""

    class Later(Run):
        def update(self, step):
            super().update(step)
            if step == 2:
                self.weights["layer.1.weight"].view(torch.int32)[2, 1] ^= 1

    found = compare(base, Later(tmp_path / "b").go().folder)
    assert phase(found) == (2, "weights") and keys(found) == ["layer.1.weight"]
    first = Run(tmp_path / "c")
    first.weights["layer.2.weight"].view(torch.int32)[0, 0] ^= 1
    first.go()
    found = compare(base, first.folder)
    assert phase(found) == (0, "start_weights") and keys(found) == ["layer.2.weight"]
    text = run_bisect(base, first.folder, capsys)
    assert "they diverge at the start" in text and "layer.2.weight" in text


def test_a_rank_with_other_weights(base, tmp_path, capsys):
    class Other(Run):
        def update(self, step):
            super().update(step)
            copy = {name: tensor.clone() for name, tensor in self.weights.items()}
            drifted = {name: tensor + 1 for name, tensor in copy.items()}
            self.copies = [copy, drifted if step == 2 else copy]

    other = Other(tmp_path / "b").go().folder
    assert phase(compare(base, other)) == (2, "weights")
    assert "in B, these ranks hold other weights than rank 0: [2]" in run_bisect(
        base, other, capsys
    )


def test_a_step_that_is_done_again_replaces_its_line(base, tmp_path):
    """The run ended in step 3, and resumed from the checkpoint of step 1."""
    run = Run(tmp_path / "b")
    run.go(last=1)
    at_the_checkpoint = {name: tensor.clone() for name, tensor in run.weights.items()}
    run.weights["layer.0.weight"] += 5  # What comes of it is lost.
    run.go(first=2, last=2, resumed=True)
    run.weights = at_the_checkpoint
    run.go(first=2, resumed=True)
    assert [line["step"] for line in read_digests(run.folder)] == [0, 1, 2, 3]
    assert compare(base, run.folder).parting is None


def test_a_run_from_another_runs_checkpoint(base, tmp_path):
    run = Run(tmp_path / "b")
    run.update(1)
    run.go(first=2, resumed=True)
    found = compare(base, run.folder)
    assert found.parting is None and found.steps == (1, 2, 3) and found.only == ((0,), ())
    other = Run(tmp_path / "c").go(first=2, resumed=True).folder
    assert phase(compare(base, other)) == (1, "start_weights")


def test_a_run_that_starts_over_leaves_no_line_of_the_first(base):
    class Short(Run):
        def update(self, step):
            pass

    Short(base).go(last=1)
    assert [line["step"] for line in read_digests(base)] == [0, 1]
    assert len(list(read_digests(base / "set_aside_1"))) == 4


def test_without_the_steps_file_the_phase_is_known(base, tmp_path, capsys):
    class Other(Run):
        def update(self, step):
            self.weights["layer.0.weight"] += step

    other = Other(tmp_path / "b").go().folder
    details_path(other, 1).unlink()
    found = compare(base, other)
    assert phase(found) == (1, "weights") and keys(found) == []
    assert "runner.samples_keep_gib" in run_bisect(base, other, capsys)


def test_runs_without_digests_or_a_common_step(base, tmp_path, capsys):
    empty = tmp_path / "empty"
    (empty / "samples").mkdir(parents=True)
    assert main(["bisect", str(base), str(empty)]) == 2
    assert DIGESTS_FILE in capsys.readouterr().err
    (empty / DIGESTS_FILE).write_text('{"step": 9}\n{"step": 1')
    assert main(["bisect", str(base), str(empty)]) == 2
    assert "steps 0 to 3" in capsys.readouterr().err


def test_settings_of_another_folder_are_the_same():
    a, b = (
        {"runner.run_dir": f"runs/{name}", "model.path": f"runs/{name}/model", "x": "runs/a2"}
        for name in ("a", "b")
    )
    assert (
        comparable(a) == comparable(b) == {"model.path": "${runner.run_dir}/model", "x": "runs/a2"}
    )


def test_bisect_names_other_software_versions(base, tmp_path, monkeypatch, capsys):
    here = attempts.software_versions()
    assert {"python", "torch", "megatron-core", "machine"} <= set(here)
    monkeypatch.setattr(
        attempts, "software_versions", lambda: {**here, "torch": "2.99", "gpus": "H100"}
    )
    other = Run(tmp_path / "b").go().folder
    found = compare(base, other)
    assert [(one.key, one.b) for one in found.made_with] == [("gpus", "H100"), ("torch", "2.99")]
    text = run_bisect(base, other, capsys, code=0)
    assert "gpus differs: A none, B H100" in text
    # A run of an earlier version has not noted it.
    file = other / ATTEMPTS_FILE
    line = json.loads(file.read_text())
    del line["made_with"]
    file.write_text(json.dumps(line) + "\n")
    assert compare(base, other).made_with == ()


def test_a_file_with_other_contents_is_named(tmp_path, monkeypatch, capsys):
    def go(name, files):
        monkeypatch.setattr(attempts, "contents", lambda _: files)
        return Run(tmp_path / name).go().folder

    a = go("one", {"contents of train.jsonl": "1a", "contents of mine.py": "2b"})
    b = go("two", {"contents of train.jsonl": "3c", "contents of yours.py": "4d"})
    assert "contents of train.jsonl differ: A 1a, B 3c" in run_bisect(a, b, capsys, code=0)
    assert [one.key for one in compare(a, b).files] == ["contents of train.jsonl"]


def test_bisect_json_output(base, tmp_path, capsys):
    class Other(Run):
        def gradient(self, step):
            return [{"grad_norm": 1.0}]

    other = Other(tmp_path / "b").go().folder
    capsys.readouterr()
    assert main(["bisect", str(base), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["parting"]["step"] == 1 and found["parting"]["phase"] == "gradient"
    assert found["parting"]["items"][1] == {
        "place": 1,
        "a": "minibatch 2",
        "b": None,
        "numbers": [{"grad_norm": 0.25, "loss": 0.2}, None],
    }


def test_digests_do_not_depend_on_who_has_which_sequence():
    lengths = torch.tensor([3, 0, 1, 4])
    values = torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7])
    whole = SequenceFingerprints.of(torch.arange(4), lengths, {"x": values})
    parts = [
        SequenceFingerprints.of(
            torch.tensor([3, 1]), torch.tensor([4, 0]), {"x": torch.tensor([4.0, 5, 6, 7])}
        ),
        SequenceFingerprints.of(
            torch.tensor([0, 2]), torch.tensor([3, 1]), {"x": torch.tensor([0.0, 1, 2, 3])}
        ),
    ]
    joined = SequenceFingerprints.join(parts)
    assert torch.equal(joined.places, whole.places)
    assert torch.equal(joined.bits["x"], whole.bits["x"])
    assert whole.sums["x"].tolist() == [3.0, 0.0, 3.0, 22.0]


def test_order_length_and_each_bit_of_a_sequence_count():
    def bits(*values):
        lengths = torch.tensor([len(values)])
        found = SequenceFingerprints.of(
            torch.zeros(1, dtype=torch.int64), lengths, {"x": torch.tensor(values)}
        )
        return int(found.bits["x"])

    assert len({bits(), bits(0.0), bits(0.0, 0.0), bits(1.0, 2.0), bits(2.0, 1.0)}) == 5
    assert bits(0.0) == bits(-0.0)
    assert bits(float("nan")) == bits(float("nan"))


def test_odd_number_of_results_with_the_log_probs_of_the_update():
    """Without a pass before, they come with the update and are added to the step's keys."""
    from rlmath.monitor.digests import StepDigests

    digests = StepDigests()
    digests.add("groups", "sequences", ["p/0", "p/1"], ["0", "1"])
    found = SequenceFingerprints.of(
        torch.tensor([0, 1]), torch.tensor([1, 1]), {"old_log_probs": torch.tensor([-1.0, -2.0])}
    )
    add_fingerprints(digests, digests.keys["sequences"], found)
    assert digests.numbers["old_log_probs"] == [-1.0, -2.0]
    assert digests.keys["sequences"] == ["p/0", "p/1"]


def each(one, change):
    """The group with changed samples."""
    samples = [
        dataclasses.replace(
            graded, sample=dataclasses.replace(graded.sample, **change(graded.sample))
        )
        for graded in one.samples
    ]
    return dataclasses.replace(one, samples=tuple(samples))
