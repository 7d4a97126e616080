"""Futures that are waited for: what they held goes with them, without the cycle collector."""

import gc
import weakref
from concurrent.futures import Future

import pytest

from rlmath.utils.futures import gather, when_all


class Thing: ...


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_gathered_results_are_freed_with_the_last_reference():
    things = [Thing(), Thing()]
    seen = [weakref.ref(one) for one in things]
    futures = [Future(), Future()]
    whole = gather(futures)
    for future, thing in zip(futures, things, strict=True):
        future.set_result(thing)
    assert whole.result() == things
    del future, futures, thing, things, whole
    assert [one() for one in seen] == [None, None]


@pytest.mark.usefixtures("no_collector")
def test_a_callback_is_not_kept_once_it_was_called():
    futures = [Future(), Future()]
    thing, called = Thing(), []
    seen = weakref.ref(thing)
    when_all(futures, lambda thing=thing: called.append(thing))
    del thing
    for future in futures:
        assert not called
        future.set_result(None)
    assert len(called) == 1
    called.clear()
    assert seen() is None and futures[0].done()
