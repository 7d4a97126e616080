"""One run at a time in a folder, also when the first one was killed."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from rlmath.errors import UserError
from rlmath.utils.run_lock import only_run_in

HOLD = "import sys, time; from rlmath.utils.run_lock import only_run_in\n"
HOLD += "with only_run_in(sys.argv[1]): print('held', flush=True); time.sleep(60)"


def test_a_second_run_is_refused_and_a_killed_one_lets_go(tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        refused = pytest.raises(UserError, match=rf"at work there \(process {holder.pid} on ")
        with refused, only_run_in(run_dir):
            pass
        holder.send_signal(signal.SIGKILL)
    with only_run_in(run_dir):
        pass
    with only_run_in(run_dir):
        pass


def test_a_file_system_without_locks_is_named_and_the_run_goes_ahead(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    ran = False
    with only_run_in(tmp_path):
        ran = True
    said = capsys.readouterr().out
    assert ran
    assert f"runner.run_dir={tmp_path} is not locked" in said
    assert os.strerror(errno.ENOLCK) in said
