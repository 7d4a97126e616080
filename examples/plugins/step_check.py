"""A step check: warn when a sample repeats its prompt.

rlmath train experiment=quickstart plugins='[examples/plugins/step_check.py]'
"""

from __future__ import annotations

from rlmath.training.checks.base import STEP_CHECKS, BeforeUpdate, Metrics, StepCheck


@STEP_CHECKS.register("echo")
class Echo(StepCheck):
    """Counts responses that have their whole prompt in them."""

    def before_update(self, now: BeforeUpdate) -> Metrics:
        """Read the step's samples; nothing is changed."""
        pairs = [(group.problem, one) for group in now.groups for one in group.samples]
        echoes = [problem.id for problem, one in pairs if problem.prompt in one.sample.text]
        if echoes:
            said = f"{len(echoes)} responses repeat their prompt, the first of {echoes[0]}"
            now.monitor.warn(f"step {now.step}: {said}")
        return {"checks/echoes": float(len(echoes))}
