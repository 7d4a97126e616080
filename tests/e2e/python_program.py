"""A script that drives runs from Python; test_python_run.py starts it in a folder with material."""

import json
import os
import signal
import sys
from pathlib import Path

from rlmath import Run
from rlmath.training.checks.base import StepCheck

SETTINGS = (
    "experiment=quickstart",
    "model.path=material/model",
    "runner.steps=4",
    "runner.save_every=1",
    "eval.every=0",
    "algorithm.prompts_per_step=8",
    "algorithm.group_size=4",
    "actor.tensor_parallel=1",
    "runner.check_export_sequences=0",
)


def variety(completions, **columns):
    """A random model gets rewards that differ."""
    if Path("interrupt").exists():  # In the middle of a step, as a user would.
        Path("interrupt").unlink()
        os.kill(os.getpid(), signal.SIGINT)
    return [len(set(text)) / 10 for text in completions]


def plain(inputs, options):
    return -inputs.token_advantages() * inputs.log_ratio().exp(), {}


class Rows:
    """Without end; a run that resumes continues with the next one."""

    def __init__(self):
        self.row = 0

    def __iter__(self):
        while True:
            self.row += 1
            prompt = f"<|user|>What is {self.row} + 7?<|assistant|>"
            yield {"prompt": prompt, "solutions": [str(self.row + 7)]}

    def state_dict(self):
        return {"row": self.row}

    def load_state_dict(self, state):
        self.row = state["row"]


class Longest(StepCheck):
    def before_update(self, now):
        samples = [one for group in now.groups for one in group.samples]
        return {"checks/longest": float(max(len(one.sample.text) for one in samples))}


def main():
    found = {}
    held_out = [{"prompt": "<|user|>What is 1 + 7?<|assistant|>", "solutions": ["8"]}]
    given = {"rewards": [variety], "eval_data": held_out}
    run = Run.from_config(
        *SETTINGS, "runner.run_dir=mine", data=Rows(), loss=plain, step_checks=[Longest], **given
    )
    run.save("saved/start")
    numbers = []
    for step in run:
        numbers.append((step.number, len(step.groups), step.metrics["timing/step"] > 0))
        if step.number == 2:
            break
    found["accuracy"] = run.evaluate()["accuracy"]
    found["sampled"] = run.sample(["1+1=", "2+2="], samples=2, max_tokens=4)
    numbers.append(next(run).number)
    found["numbers"] = numbers
    run.save("saved/now")
    Path("interrupt").touch()
    try:
        next(run)
    except KeyboardInterrupt:
        found["interrupted"] = run.number
    found["command"] = run.command
    run.close()
    print(json.dumps(found), file=sys.stderr)


if __name__ == "__main__":
    main()
