import os
import signal
import sys
import time

import pytest

from rlmath.training.grace import Grace
from rlmath.utils.ending_signals import ENDING_SIGNALS, ending_by_exit, signals_wait


@pytest.fixture(autouse=True)
def ends_the_process():
    """As the run's own handler does."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    yield
    signal.signal(signal.SIGTERM, before)


def send():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)


def test_between_updates_it_ends_at_once():
    with pytest.raises(SystemExit) as ended, Grace(60, lambda: False):
        send()
        pytest.fail("it continued")
    assert ended.value.code == 143


def test_an_update_comes_to_its_end(capsys):
    reached = False
    with pytest.raises(SystemExit) as ended, Grace(60, lambda: True) as grace:
        grace.step_done()  # Nobody has asked.
        send()
        reached = True
        grace.step_done()
        pytest.fail("it continued")
    assert reached and ended.value.code == 143
    assert "or in 60 s (runner.grace_s)" in capsys.readouterr().out


def test_but_not_beyond_its_time_nor_a_second_signal():
    with pytest.raises(SystemExit), Grace(0.05, lambda: True):
        send()
        time.sleep(10)
        pytest.fail("it continued")
    with pytest.raises(SystemExit), Grace(60, lambda: True):
        send()
        send()
        pytest.fail("it continued")
    with pytest.raises(SystemExit), Grace(0, lambda: True):
        send()
        pytest.fail("it continued")


def test_failure_during_grace_is_not_restarted():
    """A component's failure would have the run start again."""
    with pytest.raises(SystemExit), Grace(60, lambda: True):
        send()
        raise RuntimeError("the ranks were told to end, too")
    with pytest.raises(RuntimeError, match="a defect"), Grace(60, lambda: True):
        raise RuntimeError("a defect")


def test_the_handler_is_as_before():
    before = signal.getsignal(signal.SIGTERM)
    with Grace(60, lambda: True):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_that_wait_leave_the_handlers_as_they_were():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with signals_wait("a save"):
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    reached = False
    with pytest.raises(SystemExit), signals_wait("a save"):
        send()
        reached = True
    assert reached
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


def test_a_terminal_that_closes_tells_twice_and_ends_nothing_early():
    """The kernel and the shell both send SIGHUP; the grace ends with its time or a SIGTERM."""
    with ending_by_exit():
        reached = 0
        with pytest.raises(SystemExit) as ended, Grace(60, lambda: True) as grace:
            for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGUSR1):
                os.kill(os.getpid(), number)
                time.sleep(0.01)
                reached += 1
            grace.step_done()
        assert (reached, ended.value.code) == (3, 128 + signal.SIGHUP)
    with ending_by_exit(), pytest.raises(SystemExit), Grace(0.05, lambda: True):
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(10)
        pytest.fail("it continued")


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_signals_that_end_jobs_unwind_the_run(number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, ending_by_exit():
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_a_hangup_that_the_user_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_by_exit(), Grace(60, lambda: False):
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGHUP, before)
