"""Faults in engines that a run restarts while the fault is planted."""

from types import SimpleNamespace
from typing import cast

import ray

from rlmath.commands.drill.fault import Scene
from rlmath.commands.drill.in_engines import _when_undone, in_actors, plant_in_engines


class Engine:
    """An engine's Ray actor: calls run here, and fail once it is dead."""

    def __init__(self):
        self.dead, self.calls = False, list[str]()
        self.__ray_call__ = SimpleNamespace(remote=self._call)

    def _call(self, function):
        if self.dead:
            raise RuntimeError("this actor is dead")
        function(self)


def plant(engine):
    engine.calls.append("plant")
    _when_undone(engine, lambda: engine.calls.append("back"))


def test_a_fault_is_undone_in_the_engines_that_are_left(monkeypatch):
    """A call to the one that was restarted would end the drill with a traceback."""
    monkeypatch.setattr(ray, "get", lambda found: found)
    old, new, other = Engine(), Engine(), Engine()
    pool = SimpleNamespace(engines=[old, other])
    scene = cast(Scene, SimpleNamespace(run=SimpleNamespace(sampling=SimpleNamespace(pool=pool))))
    with plant_in_engines(scene, in_actors, plant):
        old.dead = True
        pool.engines = [new, other]
    assert (old.calls, new.calls, other.calls) == (["plant"], [], ["plant", "back"])
