"""A run of 8, 64 and 512 stub ranks and as many stub engines: no part of a step grows faster than
they do.

Ray is real, and so is what runs on the driver, in a rank and in an engine, but for Megatron and
vLLM: start, weight sync, sampling, grading, batch, shards, passes, update, checks and metrics. Each
rank and engine has the same work at each size, so whatever is in order grows with the first power
of their number.
"""

import contextlib
import math
import time
from dataclasses import dataclass

import pytest

from rlmath.actor import group, rank_calls
from rlmath.cluster.session import ray_session
from rlmath.config.arithmetic import resolve_layout
from rlmath.config.load import load
from rlmath.config.schema import ClusterConfig, Device
from rlmath.data import ProblemStream
from rlmath.engines.transports import TransportPlan
from rlmath.model.tiny import make_tiny_model
from rlmath.monitor import open_monitor
from rlmath.monitor.digests import read_digests
from rlmath.rewards.loading import FunctionReward
from rlmath.rewards.mix import RewardMix
from rlmath.rewards.mix_items import MixItem
from rlmath.rollout import engine_process, pool
from rlmath.rollout.collect import Collector
from rlmath.rollout.sampler import Sampler
from rlmath.rollout.sampling import Sampling
from rlmath.rollout.wake_room import WakeRoom
from rlmath.training.algorithm_settings import least_groups
from rlmath.training.checks.catalog import step_checks
from rlmath.training.controllers import Coefficients
from rlmath.training.engine_settings import engine_spec, verification_of
from rlmath.training.group_source import GroupSource
from rlmath.training.kept_batches import KeptBatches
from rlmath.training.opening import Running, start
from rlmath.training.rank_settings import actor_settings
from rlmath.training.step import StepParts, train_step
from rlmath.training.trainer import ActorTrainer
from rlmath.types import Problem
from tests.unit.training.stubs.engines import StubEngine
from tests.unit.training.stubs.hosts import StubRay, Traffic
from tests.unit.training.stubs.ranks import StubRank

pytestmark = pytest.mark.process

TENSOR_PARALLEL, GROUP_SIZE, SAMPLES_PER_ENGINE, STEPS = 2, 4, 6, 2
PROMPT = (5, 6, 7, 8)
# Exponents of the growth with the number of ranks and engines; 1 is linear.
MOST_OF_TRAFFIC, MOST_OF_CPU = 1.05, 1.25
# Few ranks are looked at one by one, many several at once: one by one all the way would be 1.95.
MOST_OF_WAITING = 1.8


@dataclass(frozen=True)
class Run:
    """Costs of a run.

    Attributes:
        size: Ranks, and engines.
        begun: Traffic with ranks and with engines until all are connected.
        step: Traffic of the second step.
        waited: References that the driver gave to ``ray.wait`` in that step.
        cpu_s: CPU time of the driver, in that step.
    """

    size: int
    begun: tuple[Traffic, Traffic]
    step: tuple[Traffic, Traffic]
    waited: int
    cpu_s: float


class Stubs:
    """Location of ranks and engines, and the model that they are given.

    Args:
        folder: For the model and the runs.
    """

    def __init__(self, folder):
        self.folder, self.runs = folder, 0
        make_tiny_model(folder / "model", seed=0)
        self.ranks, self.engines = StubRay(StubRank), StubRay(StubEngine)

    def run_dir(self):
        """Folder of the next run."""
        self.runs += 1
        self.ranks.clear()
        self.engines.clear()
        return self.folder / f"run_{self.runs}"

    def take_traffic(self):
        """Traffic of ranks and of engines, since the last call."""
        return self.ranks.take_traffic(), self.engines.take_traffic()


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    with ray_session(ClusterConfig(object_store_mib=400)):
        yield Stubs(tmp_path_factory.mktemp("scale"))


@pytest.fixture(scope="module")
def small(stubs):
    run(8, stubs)  # What Python and torch do once.
    return run(8, stubs)


def run(size, stubs, *more):
    """Two steps of ``size`` ranks and ``size`` engines, with more settings."""
    folder, ranks, engines = stubs.run_dir(), stubs.ranks, stubs.engines
    config = load(
        [
            f"model.path={stubs.folder / 'model'}",
            f"runner.run_dir={folder}",
            f"actor.tensor_parallel={TENSOR_PARALLEL}",
            f"actor.data_parallel={size // TENSOR_PARALLEL}",
            f"rollout.engines={size}",
            f"algorithm.prompts_per_step={size * SAMPLES_PER_ENGINE // GROUP_SIZE}",
            f"algorithm.group_size={GROUP_SIZE}",
            "algorithm.minibatches_per_step=2",
            "rollout.prefix_caching=false",
            "weights.verify_every=1",
            f"runner.steps={STEPS}",
            "runner.progress=false",
            # The stubs' ranks report these values.
            "actor.optimizer.lr=1e-4",
            "actor.optimizer.warmup_steps=0",
            *more,
        ]
    )
    layout = resolve_layout(config, Device.cpu)
    problems = [Problem(f"d:{i}", "What is 1 + 1?", PROMPT, ("2",)) for i in range(size * 10)]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for module in (group, rank_calls):
            patch.setattr(module, "ray", ranks)
        patch.setattr(engine_process, "ray", engines)
        patch.setattr(pool, "ray", engines)
        settings = actor_settings(config, layout, config.actor.optimizer, 6, 1.0)
        actor = group.ActorGroup(
            settings, layout.actor, device="cpu", seed=0, num_threads=1, log_dir=str(folder)
        )
        spec = engine_spec(config, layout, trains=True)
        trainer = ActorTrainer(config, spec, actor)
        made = pool.RolloutPool(spec, num_engines=size, stall_timeout_s=600, trainer=trainer)
        start(actor, made, lambda text, logs=False: None)
        made.connect()
        begun = stubs.take_traffic()
        item = MixItem(FunctionReward(score, "small"), "small")
        mix = stack.enter_context(RewardMix([item], answer_grader=None))
        collector = Collector(mix)
        stack.callback(collector.close)
        running = Running(config, layout, actor, Sampling(made, mix, collector))
        monitor = stack.enter_context(open_monitor(folder, config.runner, STEPS))
        sampler = Sampler(config, ProblemStream(problems), least_groups(config, layout))
        source = GroupSource(running, sampler, monitor)
        stack.callback(source.close)
        kept = KeptBatches(folder / "replay", config.runner.replay_keep_gib)
        stack.callback(kept.close)
        parts = StepParts(
            running,
            monitor,
            Coefficients(config.algorithm),
            step_checks(),
            source,
            kept,
            verification_of(config, layout),
            WakeRoom(),
        )
        for step in range(1, STEPS + 1):
            stubs.take_traffic()
            ranks.waited = engines.waited = 0
            began_s = time.process_time()
            metrics = train_step(parts, step).metrics
            cpu_s = time.process_time() - began_s
            monitor.log_step(step, metrics)
            assert metrics["rollout/rewards"] == 0.5
        return Run(size, begun, stubs.take_traffic(), ranks.waited + engines.waited, cpu_s)


def score(**columns):
    return [float(i % 2) for i in range(len(columns["completions"]))]


def exponents(small, large):
    """``a`` in ``y ~ size^a``, of everything that was counted."""
    found = {
        "the driver's CPU seconds": power(small, large, small.cpu_s, large.cpu_s),
        "references waited for": power(small, large, small.waited, large.waited),
    }
    for name, ones, others in (
        ("start", small.begun, large.begun),
        ("step", small.step, large.step),
    ):
        for of, one, other in zip(("a rank", "an engine"), ones, others, strict=True):
            assert one.calls.keys() == other.calls.keys()
            for kind in ("calls", "given", "answered"):
                before, after = getattr(one, kind), getattr(other, kind)
                for method in before:
                    what = f"{name}: {kind} of {of}'s {method}"
                    found[what] = power(small, large, before[method], after[method])
    return found


def power(small, large, before, after):
    return math.log(after / before) / math.log(large.size / small.size)


LIMITS = {"the driver's CPU seconds": MOST_OF_CPU, "references waited for": MOST_OF_WAITING}


def faster_than_ranks(small, large):
    """Exponents above the limits, by what grows so."""
    found = exponents(small, large)
    return {name: a for name, a in found.items() if a > LIMITS.get(name, MOST_OF_TRAFFIC)}


def test_driver_costs_grow_linearly_with_ranks_and_engines(small, stubs):
    large = run(64, stubs)
    assert faster_than_ranks(small, large) == {}
    # Each rank and engine was called, in both.
    for one in (small, large):
        assert one.begun[0].calls["connect_engines"] == one.size
        assert one.step[0].calls["finish_step"] == one.size
        assert one.step[1].calls["finish_weight_update"] == one.size
        assert one.step[1].calls["exchange"] >= one.size


def digests(folder):
    return [{k: v for k, v in line.items() if k != "settings"} for line in read_digests(folder)]


@pytest.mark.long
def test_nor_with_512_of_each(small, stubs):
    middle, large = run(64, stubs), run(512, stubs)
    assert faster_than_ranks(small, large) == faster_than_ranks(middle, large) == {}


@pytest.mark.long
def test_nor_while_engines_sample_ahead(stubs):
    small, large = (run(size, stubs, "rollout.schedule=pipelined") for size in (8, 64))
    assert faster_than_ranks(small, large) == {}
    # The engines' present weights are probed.
    assert large.step[0].calls["log_probs"] == 64


def test_handles_for_every_rank_and_engine_are_detected(stubs, monkeypatch):
    monkeypatch.setattr(TransportPlan, "of_ranks", lambda plan, world_size: [plan] * world_size)
    found = faster_than_ranks(run(8, stubs), run(32, stubs))
    assert "start: given of a rank's connect_engines" in found
