"""What the watchdog has to know of the engines and of grading."""

from __future__ import annotations

from rlmath.cluster.watchdog import Part, Process
from rlmath.rollout.collect import Collector
from rlmath.rollout.pool import RolloutPool


def engines(pool: RolloutPool) -> Part:
    """Which samples of which engines are waited for."""

    def waits_for() -> list[str]:
        lines = [f"engine {engine.index}, which is starting" for engine in pool.starting().values()]
        generation = pool.generation
        for index, held in enumerate([] if generation is None else generation.held):
            for oldest in list(held.values())[:1]:
                lines.append(
                    f"{len(held)} samples of engine {index}, the oldest sample {oldest.index} of "
                    f"problem {oldest.problem_id}"
                )
        return lines

    def processes() -> list[Process]:
        return [
            Process(f"engine {one.index}", pool.spec.log_path(one.index), one.place())
            for one in pool.processes
        ]

    def marks() -> tuple[int, ...]:
        starts = (pool.restarts, len(pool.starting()))
        if (generation := pool.generation) is None:
            return starts
        held = [len(of_engine) for of_engine in generation.held]
        return (*starts, generation.number, *held, *generation.tokens)

    return Part(marks, waits_for, processes)


def grades(collector: Collector) -> Part:
    """Which samples are being graded."""

    def waits_for() -> list[str]:
        left = collector.ungraded()
        return [f"the grade of sample {index} of problem {id_}" for id_, index in left[:10]]

    return Part(lambda: tuple(collector.ungraded()), waits_for)
