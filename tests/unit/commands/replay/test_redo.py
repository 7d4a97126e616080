import copy
from pathlib import Path
from types import SimpleNamespace

from rlmath.commands.replay.choices import read_choices
from rlmath.commands.replay.redo import _parts
from rlmath.config.load import load, to_plain

LAYOUT = {"device": "cpu", "threads": 2, "data_parallel": 1}


def source(changed_at, layouts):
    """Steps 3 to 6 of a run that resumed with other settings, or elsewhere."""
    plain = to_plain(load(["experiment=quickstart", "model.path=tiny", "runner.run_dir=r"]))

    def settings(step):
        found = copy.deepcopy(plain)
        for first, changes in changed_at.items():
            for key, value in changes.items() if step >= first else ():
                *sections, name = key.split(".")
                inner = found
                for one in sections:
                    inner = inner[one]
                inner[name] = value
        return found

    headers = {step: {"layout": {**LAYOUT, **layouts.get(step, {})}} for step in range(3, 7)}
    run = SimpleNamespace(folder=Path("r"), settings_of=settings)
    return SimpleNamespace(step=6, steps=(3, 4, 5, 6), run=run, headers=headers)


def parts(changed, layouts):
    return list(_parts(source(changed, layouts), read_choices([]), Path("f")))


def test_ranks_stay_while_nothing_of_theirs_changes():
    changes = {5: {"eval.every": 7, "runner.resume": "auto", "reward.num_workers": 3}}
    assert [steps for _, steps in parts(changes, {})] == [[3, 4, 5, 6]]


def test_redo_with_other_settings_needs_new_ranks():
    found = parts({5: {"actor.optimizer.lr": 0.5}, 6: {"runner.steps": 999}}, {})
    assert [steps for _, steps in found] == [[3, 4], [5], [6]]
    assert [config.actor.optimizer.lr == 0.5 for config, _ in found] == [False, True, True]
    assert found[2][0].runner.steps == 999  # Where a decaying learning rate ends.


def test_another_machine_is_other_ranks():
    """The threads of an operator, and data-parallel ranks that follow from the GPUs."""
    layouts = {step: {"threads": 5, "data_parallel": 4} for step in (4, 5, 6)}
    found = parts({}, layouts)
    assert [steps for _, steps in found] == [[3], [4, 5, 6]]
    assert [config.actor.num_threads for config, _ in found] == [2, 5]
    assert [config.actor.data_parallel for config, _ in found] == [1, 4]
