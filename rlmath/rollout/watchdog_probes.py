from __future__ import annotations

from rlmath.cluster.watchdog import Process, WatchedComponent
from rlmath.rollout.collect import Collector
from rlmath.rollout.pool import RolloutPool


def engines(pool: RolloutPool) -> WatchedComponent:
    def waiting_on() -> list[str]:
        role = pool.spec.role
        lines = [f"{role} {engine.index}, which is starting" for engine in pool.starting().values()]
        generation = pool.generation
        for index, held in enumerate([] if generation is None else generation.held):
            for oldest in list(held.values())[:1]:
                lines.append(
                    f"{len(held)} samples of {role} {index}, the oldest sample {oldest.index} of "
                    f"problem {oldest.problem_id}"
                )
        lines += [
            f"the tools' answer to sample {index} of problem {id_}"
            for id_, index in pool.awaited_turns[:10]
        ]
        return lines

    def processes() -> list[Process]:
        return [
            Process(f"{pool.spec.role} {one.index}", pool.spec.log_path(one.index), one.place())
            for one in pool.processes
        ]

    def progress() -> tuple[int, ...]:
        starts = (pool.restarts, len(pool.starting()))
        if (generation := pool.generation) is None:
            return starts
        held = [len(of_engine) for of_engine in generation.held]
        return (*starts, generation.number, *held, *generation.tokens)

    return WatchedComponent(progress, waiting_on, processes)


def grades(collector: Collector) -> WatchedComponent:
    def waiting_on() -> list[str]:
        left = collector.ungraded_samples()
        return [f"the grade of sample {index} of problem {id_}" for id_, index in left[:10]]

    return WatchedComponent(lambda: tuple(collector.ungraded_samples()), waiting_on)
