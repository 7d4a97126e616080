"""The checks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlmath.errors import UserError

_CHECKS = "rlmath.commands.selfcheck.checks"


@dataclass(frozen=True)
class Check:
    name: str
    title: str  # Subject of the check, in a line.
    advice: str  # How to fix a failure of which nothing more exact is known.
    limit_s: float  # Seconds after which it is ended.
    target: str  # MODULE:FUNCTION that is called with a Node and a Record.


def _check(name: str, title: str, advice: str, limit_s: float = 300.0) -> Check:
    return Check(name, title, advice, limit_s, f"{_CHECKS}.{name}:run")


CHECKS = (
    _check(
        "environment",
        "driver, GPUs, topology, versions",
        "Run `rlmath doctor`; set up again with `bash launchers/setup.sh cuda`.",
        # The doctor waits 120 s for an import of Transformer Engine.
        240.0,
    ),
    _check(
        "actor",
        "Megatron against transformers: TP 1 and 2, packed sequences, CP 2",
        "Run rlmath validate on the same model: it names the first layer that "
        "differs. Do not train before it agrees.",
    ),
    _check(
        "update",
        "memory and time of updates and log-probs against the plan, MFU, launches",
        "See the check's log for the operator that runs out of memory or is slow; Transformer "
        "Engine has to be installed (check environment).",
        200.0,
    ),
    _check(
        "parallel",
        "gradient norm of an update at DP 2, TP 2, PP 2 and CP 2, all-reduce bandwidth",
        "Do not train on several GPUs before it agrees. NCCL_DEBUG=INFO in the environment makes "
        "the check's log say which links NCCL uses.",
    ),
    _check(
        "engines",
        "engines at TP 1 and 2 beside a rank, their GPUs, KV cache, two starts",
        "See the engine's log; lower rollout.gpu_memory_utilization if memory does not suffice.",
        480.0,
    ),
    _check(
        "sleep",
        "memory of sleeping engines over twenty cycles",
        "Use cluster.placement=separate until sleeping engines give their memory back.",
    ),
    _check(
        "weight_sync",
        "weights of versions 1, 2 and 3 in the engines, by each transport",
        "Do not train: engines would sample from other weights than the actor's. Try another "
        "weights.transport (cluster.placement=separate gives nccl, colocated gives ipc).",
        420.0,
    ),
    _check(
        "alignment",
        "rollout log-probs against the actor's on sampled tokens",
        "Do not train: run rlmath validate on the same model, and try "
        "precision.lm_head_dtype=float32.",
    ),
    _check(
        "checkpoint",
        "a checkpoint saved and loaded beside engines, bit by bit",
        "Keep runs short until it passes: a run could not be resumed. See the check's log for the "
        "rank that failed; leave more memory with a lower rollout.gpu_memory_utilization.",
        # It writes and reads 18 bytes a parameter twice; one write took 48 s at 0.5 GiB/s.
        600.0,
    ),
    _check(
        "throughput",
        "decoding against vLLM's own loop, rates of weight syncs and of a checkpoint",
        "See the engine's log for the attention backend, CUDA graphs and the scheduler that vLLM "
        "took.",
        280.0,
    ),
    _check(
        "training",
        "two steps of the whole loop",
        "See logs/ in the check's folder: the failing rank or engine has the reason in its log.",
        420.0,
    ),
)

# Names for several checks. Those of speed take eight minutes at most.
GROUPS = {"speed": ("update", "throughput")}


def select(names: str | None) -> Sequence[Check]:
    """The checks of ``--only``, in the usual order; all of them for ``None``. ``names``: names of
    checks or groups, separated by commas. Raises UserError: there is no check of a name."""
    if names is None:
        return CHECKS
    given = [name.strip() for name in names.split(",") if name.strip()]
    wanted = [name for one in given for name in GROUPS.get(one, (one,))]
    known = {check.name for check in CHECKS}
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        problem = f"no check {', '.join(unknown)}" if unknown else "no check is named"
        there = ", ".join([*GROUPS, *(check.name for check in CHECKS)])
        raise UserError(f"--only {names}: {problem}; there are {there}")
    return [check for check in CHECKS if check.name in wanted]
