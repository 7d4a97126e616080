"""Checks of the selfcheck on one set of ranks and engines, which take most of their time to start.

Runs as a check itself, in its own process; each check that it calls has its own folder in that
one's.
"""

import contextlib
import dataclasses
from pathlib import Path

import ray

from rlmath.actor.group import ActorGroup
from rlmath.commands.selfcheck import parts
from rlmath.commands.selfcheck.checks import alignment, checkpoint, engines, throughput, weight_sync
from rlmath.commands.selfcheck.record import Record
from rlmath.commands.selfcheck.worker import RECORD_FILE

CHECKS = {
    "engines": engines.run,
    "alignment": alignment.run,
    "weight_sync": weight_sync.run,
    "checkpoint": checkpoint.run,
    "throughput": throughput.run,
}


def run(node, record):
    """All of ``CHECKS``, and those with a fault planted, on the same ranks and engines."""
    config = parts.settings(node, "run", 0, ["weights.bucket_size_mib=1"])
    with parts.start(config, record) as pair:
        parts.start, parts.started_engines = _starter(pair), _starter(pair[1])
        for name, check in CHECKS.items():
            _run(node, name, check)
        with _stale_at_the_second_sync(*pair):
            _run(node, "stale", weight_sync.run)
        with _a_bit_lost_in_the_checkpoint():
            _run(node, "lost_bit", checkpoint.run)


def _run(node, name, check):
    folder = Path(node.folder) / name
    folder.mkdir()
    record = Record(folder / RECORD_FILE)
    check(dataclasses.replace(node, folder=str(folder)), record)
    record.end()


def _starter(running):
    @contextlib.contextmanager
    def start(*arguments, **options):
        yield running

    return start


@contextlib.contextmanager
def _stale_at_the_second_sync(actor, pool):
    """The engines say that they have the second of the next versions, and keep the first."""
    send, stale = ActorGroup.send_weights, pool.weights_version + 2

    def send_or_not(self, version):
        if version != stale:
            send(self, version)
            return

        def pretend(engine):
            engine._loop.weights_version = version

        ray.get([engine.__ray_call__.remote(pretend) for engine in pool.engines])

    ActorGroup.send_weights = send_or_not
    try:
        yield
    finally:
        ActorGroup.send_weights = send


@contextlib.contextmanager
def _a_bit_lost_in_the_checkpoint():
    """One bit of one moment of Adam differs after a load."""
    load = ActorGroup.load_checkpoint

    def flip(worker):
        import torch

        optimizer = worker.actor.optimizer
        part = getattr(optimizer, "chained_optimizers", [optimizer])[0]
        state = next(iter(part.optimizer.state.values()))
        state["exp_avg"].view(torch.int32).view(-1)[0] ^= 1

    def load_and_flip(self, folder):
        load(self, folder)
        self.call(flip)

    ActorGroup.load_checkpoint = load_and_flip
    try:
        yield
    finally:
        ActorGroup.load_checkpoint = load
