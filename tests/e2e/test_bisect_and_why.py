"""Real runs are compared to the last bit, and a sample of one is explained."""

import json

import pytest

from rlmath.monitor.digests import read_details
from rlmath.monitor.token_files import read_tokens
from tests.e2e import golden_curve
from tests.e2e.runs import command_here, rlmath


@pytest.mark.long
def test_a_token_of_the_data_is_found_in_a_real_run(material, learning_run, tmp_path):
    """The first step of both is equal to the last bit, its update included. The second draws a
    problem of which one digit is another."""
    problem = json.loads(
        (learning_run / "samples" / "step_000002.jsonl").read_text().splitlines()[0]
    )
    rows = (material / "data" / "train.jsonl").read_text().splitlines()
    at = next(i for i, row in enumerate(rows) if json.loads(row)["prompt"] == problem["prompt"])
    row = json.loads(rows[at])
    digit = next(c for c in row["prompt"] if c.isdigit())
    row["prompt"] = row["prompt"].replace(digit, str((int(digit) + 1) % 10), 1)
    data = tmp_path / "data" / "train.jsonl"
    data.parent.mkdir()
    data.write_text("\n".join([*rows[:at], json.dumps(row), *rows[at + 1 :]]) + "\n")
    other = tmp_path / "other"
    run = rlmath("train", *golden_curve.beginning(material, other), f"data.train_paths=[{data}]")
    assert run.returncode == 0, run.stderr
    found = rlmath("bisect", str(learning_run), str(other), "--json")
    assert found.returncode == 1, found.stderr
    parting = json.loads(found.stdout)["parting"]
    assert (parting["step"], parting["phase"]) == (2, "prompts")
    assert parting["equal"] == ["problems"] and parting["differing_items"] == 1
    assert parting["items"][0]["a"] == parting["items"][0]["b"] == problem["problem_id"]


def test_why_shows_what_a_real_run_recorded(learning_run):
    rows = (learning_run / "samples" / "step_000002.jsonl").read_text().splitlines()
    row = json.loads(rows[5])
    address = f"2/{row['problem_id']}/{row['index']}"
    said = command_here("why", str(learning_run), address)
    assert f"seed {row['seed']}, engine 0, weights version 1" in said
    assert "the advantages: sum over its" in said
    # Token traces have the sequences of the step's digests.
    details = read_details(learning_run, 2)
    assert details is not None
    traced = list(read_tokens(learning_run, 2))
    assert len(traced) == 4
    for sample, values in traced:
        place = details["keys"]["sequences"].index(sample.key)
        for name in ("old_log_probs", "advantages"):
            noted = details["numbers"][name][place]
            assert noted == pytest.approx(float(values[name].sum(dtype="float64")), abs=1e-8)
