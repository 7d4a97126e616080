from rlmath.commands.report.sample_sets import MAX_COLUMNS, MAX_PROBLEMS, heat_map, read_samples_of
from rlmath.monitor.run_folder import RunFolder


def test_a_small_page_has_the_same_problems_in_every_step(run_dir):
    run = RunFolder(run_dir)
    everything = read_samples_of(run, 10**9)
    assert not any(everything.left_out.values())
    some = read_samples_of(run, 15_000)
    of_step = [
        {row["problem_id"] for row in some.chosen if row["kind"] == "step" and row["step"] == step}
        for step in (1, 3)
    ]
    assert "train.jsonl:1" in of_step[0] & of_step[1]
    assert 0 < some.left_out["step"] < 36
    # Each file has at least one, and figures are over all.
    assert {row["step"] for row in some.chosen} == {0, 1, 2, 3, 4}
    assert some.figures == everything.figures and some.grades == everything.grades


def test_a_heat_map_of_many_steps_and_problems():
    steps = range(1, 3 * MAX_COLUMNS + 1)
    grades = {f"p{i}": {step: [1, 2] for step in steps if step % (i + 1) == 0} for i in range(200)}
    heat = heat_map(grades)
    assert len(heat["columns"]) == MAX_COLUMNS and heat["columns"][0] == [1, 3]
    assert len(heat["rows"]) == MAX_PROBLEMS
    assert heat["left_out"] == len(grades) - MAX_PROBLEMS
    assert heat["rows"][0] == {"id": "p0", "cells": [[c, 3, 6] for c in range(MAX_COLUMNS)]}
    assert heat_map({}) == {"columns": [], "rows": [], "left_out": 0}
