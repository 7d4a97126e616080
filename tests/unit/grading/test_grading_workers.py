"""Worker processes: they are killed and replaced, and cannot hang, leak or lie."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlmath.grading import MathGrader, grade
from rlmath.grading.pool import WorkerPool
from rlmath.grading.settings import GradingSettings
from tests.support.program_answers import output_of

pytestmark = pytest.mark.process

SYMBOLIC = ("\\boxed{\\sum_{k=1}^1 \\sin^2 x + \\cos^2 x}", "1")
ENDLESS = ("\\boxed{\\int_0^1 \\frac{\\sin^{50}(x^3)}{1+x^7} dx}", "\\frac{1}{3}")


def wait_for(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def test_overrunning_job_is_killed_and_the_others_continue():
    with MathGrader(num_workers=2, timeout_s=1.0) as grader:
        grader.grade_one(*SYMBOLIC)
        before = set(grader.worker_pids())
        responses = [ENDLESS[0]] + [
            f"\\boxed{{\\sum_{{k=1}}^1 \\sin^2 {c} + \\cos^2 {c}}}" for c in "abcxyz"
        ]
        grades = grader.grade_batch(responses, [ENDLESS[1]] + ["1"] * 6)
        assert [g.status for g in grades] == ["timeout"] + ["correct"] * 6
        assert 0.9 < grades[0].seconds < 3.0
        wait_for(lambda: len(grader.worker_pids()) == 2)
        killed = before - set(grader.worker_pids())
        assert len(killed) == 1
        assert not psutil.pid_exists(killed.pop())


def test_the_deadline_counts_from_the_start_of_the_job():
    with MathGrader(num_workers=1, timeout_s=1.0, cache_size=0) as grader:
        grader.grade_one(*SYMBOLIC)
        endless = [ENDLESS[0].replace("x^7", f"x^{{{n}}}") for n in (7, 8)]
        responses = [*endless, SYMBOLIC[0]]
        grades = grader.grade_batch(responses, [ENDLESS[1], ENDLESS[1], "1"])
        assert [g.status for g in grades] == ["timeout", "timeout", "correct"]
        assert grades[1].seconds < 2.0, "the second job was charged for its time in the queue"
        assert grades[2].seconds < 1.0


def test_a_worker_killed_from_outside_costs_no_grade():
    with MathGrader(num_workers=2, cache_size=0) as grader:
        grader.grade_one(*SYMBOLIC)
        wait_for(lambda: len(grader.worker_pids()) == 2)
        stop = threading.Event()

        def kill_now_and_then():
            for _ in range(4):
                time.sleep(0.1)
                for pid in grader.worker_pids()[:1]:
                    os.kill(pid, signal.SIGKILL)
            stop.set()

        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        statuses = []
        round_number = 0
        while not stop.is_set():
            round_number += 1
            names = [f"x_{{{round_number * 100 + k}}}" for k in range(10)]
            responses = [f"\\boxed{{\\sum_{{k=1}}^1 \\sin^2 {n} + \\cos^2 {n}}}" for n in names]
            statuses += [g.status for g in grader.grade_batch(responses, ["1"] * len(names))]
        killer.join()
        assert set(statuses) == {"correct"}


def test_the_fork_server_killed_from_outside_is_replaced():
    with MathGrader(num_workers=1, cache_size=0) as grader:
        grader.grade_one(*SYMBOLIC)
        (worker,) = grader.worker_pids()
        server = psutil.Process(worker).ppid()
        os.kill(server, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        assert grader.grade_one(*SYMBOLIC).correct


def test_workers_are_replaced_after_some_jobs():
    with MathGrader(num_workers=1, max_jobs_per_worker=3, cache_size=0) as grader:
        seen = set()
        for _ in range(7):
            assert grader.grade_one(*SYMBOLIC).correct
            seen.update(grader.worker_pids())
        assert len(seen) >= 3


def test_workers_inherit_no_secrets_and_are_limited(monkeypatch):
    monkeypatch.setenv("RLMATH_TEST_SECRET", "hunter2")
    secret = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        with MathGrader(num_workers=1, memory_limit_mib=700) as grader:
            grader.grade_one(*SYMBOLIC)
            (pid,) = grader.worker_pids()
            environment = Path(f"/proc/{pid}/environ").read_text()
            limits = Path(f"/proc/{pid}/limits").read_text()
            opened = [os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir()]
            assert "RLMATH_TEST_SECRET" not in environment
            assert "PYTHONHASHSEED=0" in environment
            assert str(700 * 1024 * 1024) in limits
            assert __file__ not in opened
            assert os.getpgid(pid) == pid != os.getpgid(0)
    finally:
        os.close(secret)


def test_memory_is_limited():
    from rlmath.grading.worker import limit_resources

    script = (
        f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
        "from rlmath.grading.worker import limit_resources\n"
        "limit_resources(256)\n"
        "try:\n    bytearray(400 << 20)\nexcept MemoryError:\n    sys.exit(7)\n"
    )
    assert limit_resources.__doc__
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7


def test_sympy_never_enters_the_calling_process():
    script = (
        "import sys\n"
        "from rlmath.grading import grade\n"
        "assert grade(r'\\boxed{\\sum_{k=1}^1 \\sin^2 x+\\cos^2 x}', '1').method == 'sympy'\n"
        "names = ('sympy', 'torch', 'math_verify', 'ray')\n"
        "bad = [name for name in names if name in sys.modules]\n"
        "assert not bad, bad\n"
    )
    output_of(script)


def test_threads_and_the_callers_alarm():
    fired = []
    previous = signal.signal(signal.SIGALRM, lambda *_: fired.append(1))
    signal.setitimer(signal.ITIMER_REAL, 30.0)
    try:
        results = []

        def work(name):
            results.append(
                grade(f"\\boxed{{\\sum_{{k=1}}^1 \\sin^2 {name}+\\cos^2 {name}}}", "1").status
            )
            results.append(grade("\\boxed{2^{10}}", "1024").status)

        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == ["correct"] * 8
        remaining, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < remaining < 30.0, "grading touched the caller's alarm"
        assert signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def test_a_forked_child_grades_with_a_pool_of_its_own():
    script = (
        "import os\n"
        "from rlmath.grading import grade\n"
        "case = (r'\\boxed{\\sum_{k=1}^1 \\sin^2 x+\\cos^2 x}', '1')\n"
        "assert grade(*case).correct\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    ok = grade(r'\\boxed{\\sum_{k=1}^1 \\sin^2 y+\\cos^2 y}', '1').correct\n"
        "    from rlmath.grading import default_grader\n"
        "    default_grader().close()\n"
        "    os._exit(0 if ok else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "assert grade(r'\\boxed{\\sum_{k=1}^1 \\sin^2 z+\\cos^2 z}', '1').correct\n"
    )
    output_of(script)


def test_closing_leaves_no_process_and_an_honest_error():
    grader = MathGrader(num_workers=2)
    with grader:
        grader.grade_one(*SYMBOLIC)
        wait_for(lambda: len(grader.worker_pids()) == 2)
        pids = grader.worker_pids()
        server = psutil.Process(pids[0]).ppid()
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in [*pids, server]))
    assert grader.grade_one("\\boxed{42}", "42").correct
    assert grader.grade_one("\\boxed{\\sum_{k=1}^1 \\sin^2 y + \\cos^2 y}", "1").status == "error"


def test_a_killed_caller_leaves_no_worker_not_even_a_busy_one():
    script = (
        f"import sys, threading, time; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
        "from rlmath.grading import MathGrader\n"
        "grader = MathGrader(num_workers=1, timeout_s=60)\n"
        f"assert grader.grade_one(*{SYMBOLIC!r}).correct\n"
        f"threading.Thread(target=grader.grade_one, args={ENDLESS!r}, daemon=True).start()\n"
        "print(*grader.worker_pids(), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as run:
        worker = psutil.Process(int(run.stdout.readline()))
        server = worker.parent()
        busy_s = worker.cpu_times().user
        wait_for(lambda: worker.cpu_times().user > busy_s + 0.1)
        run.kill()
    wait_for(lambda: has_ended(worker) and has_ended(server), timeout_s=2.0)


def has_ended(process):
    """Whether it does nothing any more; whoever inherits it may take a while to take notice."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_pool_that_cannot_start_ends_every_job():
    pool = WorkerPool(GradingSettings(num_workers=1, startup_timeout_s=0.001))
    try:
        result = pool.submit({"answer": "x", "gold": "y", "task": "math"}).result(timeout=30)
        assert "error" in result.reply
    finally:
        pool.close()
