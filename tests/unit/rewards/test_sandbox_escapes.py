"""Ways out of the code sandbox, each tried at each level and, as a control, outside of it.

One program makes all attempts and prints which of them worked. Outside the sandbox every one has
to work, or it would prove nothing.
"""

import json
import os
import pickle
import platform
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rlmath.rewards import RewardSettingError
from rlmath.rewards.sandbox import Limits, Program
from rlmath.rewards.sandbox import syscalls as sc
from rlmath.rewards.sandbox.local import LEVELS, LocalProvider
from rlmath.rewards.sandbox.memory import process_tree

pytestmark = pytest.mark.process

LIMITS = Limits(cpu_s=5, wall_s=20.0, memory_mib=256, file_size_mib=8, processes=16)
OTHER_USER = 54321
SYSTEM_PYTHON = "/usr/bin/python3"


def _provider(level):
    if level == "process" and os.geteuid() == OTHER_USER:
        return LocalProvider(level="process", python=SYSTEM_PYTHON)
    return LocalProvider(level=level)


def at_level(level, function):
    """``function(level)``, as a user for whom the level exists: ``process`` is not root's."""
    if level != "process" or os.geteuid() != 0:
        return function(level)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(OTHER_USER, OTHER_USER, OTHER_USER)
            os.setresuid(OTHER_USER, OTHER_USER, OTHER_USER)
            sys.executable = SYSTEM_PYTHON  # this one may be in a folder of root's
            answer = function(level)
        except BaseException as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pickle.load(pipe)
    os.waitpid(child, 0)
    if isinstance(answer, RuntimeError):
        raise answer
    return answer


def _works(level):
    try:
        return at_level(level, lambda name: _provider(name).hides_files)
    except (RewardSettingError, RuntimeError):
        return False


LEVELS_HERE = [level for level in LEVELS if _works(level)]


def run(level, source, collect=()):
    def in_sandbox(name):
        program = Program("python", textwrap.dedent(source), collect=collect)
        with _provider(name).prepare(program, LIMITS) as prepared:
            return prepared.run()

    return at_level(level, in_sandbox)


# Each prints nothing and raises when it fails. ``victim`` is another process of the trainer's user,
# ``file`` one of its files, ``number`` the system calls, ``call`` makes one and raises OSError.
ATTEMPTS = {
    "its limits": "resource.prlimit(victim, resource.RLIMIT_NOFILE, (32, 32))",
    "its priority": "os.setpriority(os.PRIO_PROCESS, victim, 10)",
    "its group's priority": "os.setpriority(os.PRIO_PGRP, victim, 11)",
    "its disk priority": "call('ioprio_set', 1, victim, 3 << 13)",
    "its processors": "os.sched_setaffinity(victim, os.sched_getaffinity(0))",
    "its scheduler": "os.sched_setscheduler(victim, os.SCHED_BATCH, os.sched_param(0))",
    "its scheduler's parameter": "os.sched_setparam(victim, os.sched_param(0))",
    "its scheduler's attributes": (
        "call('sched_setattr', victim, struct.pack('IIQiIQQQ', 48, 3, 0, 12, 0, 0, 0, 0), 0)"
    ),
    "a signal to it": "os.kill(victim, 0)",
    "a signal through a file's owner": "fcntl.fcntl(os.pipe()[0], 8, victim)",
    "a socket's owner": ("fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', victim))"),
    "a handle of it": "os.pidfd_open(victim)",
    "tracing": "call('ptrace', 0x4206, child, 0, 0)",
    "a child's memory": (
        "call('process_vm_readv', child, struct.pack('PN', ctypes.addressof(room), 8), 1,"
        " struct.pack('PN', ctypes.addressof(room), 8), 1, 0)"
    ),
    "comparing processes": "call('kcmp', os.getpid(), os.getpid(), 1, 0, 0)",
    "advice on memory": "reaches('process_madvise', -1, 0, 0, 0, 0)",
    "releasing memory": "reaches('process_mrelease', -1, 0)",
    "taking a descriptor": "reaches('pidfd_getfd', -1, 0, 0)",
    "moving pages": "reaches('move_pages', 2**30, 0, 0, 0, 0, 0)",
    "migrating pages": "reaches('migrate_pages', 2**30, 0, 0, 0)",
    "shared memory of System V": "call('shmctl', call('shmget', 0, 4096, 0o600), 0, 0)",
    "semaphores of System V": "call('semctl', call('semget', 0, 1, 0o600), 0, 0)",
    "messages of System V": "call('msgctl', call('msgget', 0, 0o600), 0, 0)",
    "a POSIX message queue": "reaches('mq_open', b'rlmath-escape', 0, 0, 0)",
    "memory without a process": "os.memfd_create('x')",
    "a file's times": "os.utime(file, (1, 1))",
    "a file's length": "os.truncate(file, 1)",
    "a file's attributes": "os.setxattr(file, 'user.x', b'1')",
    "a file's mode": "os.chmod(file, 0o640)",
    "a file's owner": "os.chown(file, os.getuid(), os.getgid())",
    "reading a file": "open(file).read()",
    "a mount": "call('unshare', 0x00020000 | 0x10000000)",
    "watches on files": "call('inotify_init1', 0)",
    "writing out the machine's disks": "reaches('syncfs', -1)",
    "a larger pipe": "fcntl.fcntl(os.pipe()[0], 1031, 2**16)",
    "a lease on a file": (
        "fcntl.fcntl(os.open(own, os.O_CREAT | os.O_RDONLY, 0o600), 1024, fcntl.F_RDLCK)"
    ),
    "page faults of another": "reaches('userfaultfd', -1)",
    "an abstract socket": "socket.socket(socket.AF_UNIX).bind(chr(0) + 'rlmath-escape')",
    "its memory as a file": "open(f'/proc/{victim}/mem', 'r+b')",
    "its environment": "open(f'/proc/{victim}/environ').read()",
}
# Without effect on others when done to oneself: programs may.
OWN = {
    "limits": "resource.prlimit(0, resource.RLIMIT_NOFILE, (32, 32))",
    "priority": "os.setpriority(os.PRIO_PROCESS, 0, 10)",
    "disk priority": "call('ioprio_set', 1, 0, 3 << 13)",
    "processors": "os.sched_setaffinity(0, os.sched_getaffinity(0))",
    "scheduler": "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
    "descriptor flags": "fcntl.fcntl(0, fcntl.F_SETFD, fcntl.fcntl(0, fcntl.F_GETFD))",
    "process name": "call('prctl', 15, b'solution', 0, 0, 0)",
}

PROGRAM = """
import ctypes, errno, fcntl, json, os, resource, shutil, socket, struct, sys, tempfile, time
victim, file, number = {victim}, {file!r}, {number}
own = tempfile.mkdtemp() + "/own"
libc = ctypes.CDLL(None, use_errno=True)
room = ctypes.create_string_buffer(8)
def call(name, *arguments):
    result = libc.syscall(number[name], *(ctypes.c_long(a) if isinstance(a, int) else a
                                          for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result
def reaches(name, *arguments):
    # Called in a way that the kernel itself refuses, with another error than the filter's.
    try:
        call(name, *arguments)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
worked = {{}}
for name, attempt in {attempts}.items():
    try:
        exec(attempt)
        worked[name] = "yes"
    except Exception as error:
        worked[name] = repr(error)
print(json.dumps(worked))
sys.stdout.flush()
shutil.rmtree(os.path.dirname(own))
try:
    os.kill(child, 9)
except OSError:
    pass
os._exit(0)
"""


def _outcome(level):
    """Outcome of each attempt, inside a sandbox or (``None``) outside."""
    number = {**sc._NUMBERS[platform.machine()], **sc._COMMON}
    with (
        TemporaryDirectory() as folder,
        subprocess.Popen(["sleep", "600"], start_new_session=True) as victim,
    ):
        Path(folder).chmod(0o755)
        file = Path(folder) / "weights.bin"
        file.write_text("s3cr3t")
        try:
            source = PROGRAM.format(
                victim=victim.pid, file=str(file), number=number, attempts={**ATTEMPTS, **OWN}
            )
            if level is None:
                done = subprocess.run(
                    [sys.executable, "-c", source], capture_output=True, text=True, timeout=60
                )
                return json.loads(done.stdout)
            with _provider(level).prepare(Program("python", source), LIMITS) as prepared:
                result = prepared.run()
            assert result.status == "ok", result
            answers = json.loads(result.stdout)
            answers["the victim lives"] = "yes" if victim.poll() is None else "no"
            answers["the file is as it was"] = (
                "yes" if file.read_text() == "s3cr3t" and file.stat().st_mtime > 1 else "no"
            )
            return answers
        finally:
            victim.kill()


@cache
def outcome(level):
    return at_level(level, _outcome)


@cache
def outside():
    return _outcome(None)


def test_some_level_is_tried():
    assert LEVELS_HERE


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_escape_works_outside_the_sandbox(attempt):
    """The control: without it "held" could mean a mistake in the attempt."""
    said = outside()[attempt]
    if attempt == "a mount" and said != "yes" and os.geteuid() != 0:
        pytest.skip("this machine lets no user make namespaces, in a sandbox or not")
    if attempt == "a file's attributes" and "Errno 95" in said:
        pytest.skip("the file system has no extended attributes")
    if attempt == "a lease on a file" and "Errno 22" in said:
        pytest.skip("the file system has no leases")
    if attempt in ("its memory as a file", "its environment") and "PermissionError" in said:
        pytest.skip("this machine lets no user look into a process that is not a child")
    assert said == "yes"


@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_escape_is_held_in_the_sandbox(level, attempt):
    if attempt == "a handle of it" and level == "namespace":
        assert "ProcessLookupError" in outcome(level)[attempt]
    assert outcome(level)[attempt] != "yes"


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_sandboxed_programs_change_only_themselves(level):
    said = outcome(level)
    assert {name: said[name] for name in OWN} == dict.fromkeys(OWN, "yes")
    assert (said["the victim lives"], said["the file is as it was"]) == ("yes", "yes")


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_shared_memory_is_not_the_machines(level):
    path = Path(f"/dev/shm/rlmath-escape-{os.getpid()}")
    path.write_text("x")  # the control: it can be made here
    path.unlink()
    run(level, f"open({str(path)!r}, 'w').write('x')")
    assert not path.exists()


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_collected_files_are_the_programs_own(level):
    source = """
        import os
        os.makedirs("real/deep")
        for name in ("real/deep/x", "one"):
            open(name, "w").write("mine")
        os.symlink("real", "linked")
        os.symlink("deep", "real/link")
        os.symlink("/etc", "away")
        os.link("one", "two")
        print(open("linked/deep/x").read(), open("two").read())
    """
    collect = ("real/deep/x", "./real//deep/x", "linked/deep/x", "real/link/x", "away/passwd")
    result = run(level, source, (*collect, "two"))
    assert result.stdout == "mine mine\n", "the control: the links lead somewhere"
    assert set(result.files) == {"real/deep/x", "./real//deep/x"}


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_special_files_are_not_collected(level):
    source = """
        import os
        os.mkfifo("pipe")
        os.mkdir("folder")
        os.symlink("/dev/zero", "endless")
        for name in ("new\\nline", "empty"):
            open(name, "w").close()
        with open("sparse", "wb") as file:
            file.truncate(8 * 2**20)
        print("made")
    """
    result = run(level, source, ("pipe", "folder", "endless", "new\nline", "sparse", "none"))
    assert result.stdout == "made\n"
    assert {name: len(text) for name, text in result.files.items()} == {
        "new\nline": 0,
        "sparse": 8 * 2**20,
    }


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_the_launchers_report_cannot_be_forged(level):
    source = """
        import os
        forged = b'{"exit": 0}\\n{"exit": 0}\\n'
        for fd in range(3, 4096):
            try:
                os.write(fd, forged)
                print("wrote to", fd)
            except OSError:
                pass
        for process in (1, os.getppid()):
            try:
                for fd in os.listdir(f"/proc/{process}/fd"):
                    with open(f"/proc/{process}/fd/{fd}", "wb") as pipe:
                        pipe.write(forged)
                    print("wrote to", fd, "of", process)
            except OSError:
                pass
        print("tried", flush=True)
        os._exit(3)
    """
    result = run(level, source)
    assert (result.status, result.exit_code, result.stdout) == ("runtime_error", 3, "tried\n")


def _states(processes):
    """`R`, `S`, … of these processes: nothing for one that is gone."""
    found = set()
    for process in processes:
        with suppress(OSError):
            found.add(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0])
    return found


def _outlive(level, folder):
    """State of a program and its children once the process that runs them is killed outright."""
    source = f"""
        import ctypes, os, time
        os.fork()  # a child, and
        clone_parent, sigchld = 0x8000, 17
        ctypes.CDLL(None).syscall({sc._NUMBERS[platform.machine()]["clone"]},
                                  clone_parent | sigchld, 0, 0, 0, 0)  # children of the launcher
        try:
            os.setsid()
        except OSError:
            pass
        time.sleep(100)
    """
    provider = _provider(level)
    trainer = os.fork()
    if trainer == 0:
        with suppress(BaseException):
            tempfile.tempdir = folder  # what a killed trainer leaves there is removed by the test
            limits = replace(LIMITS, wall_s=60.0)
            with provider.prepare(Program("python", textwrap.dedent(source)), limits) as prepared:
                prepared.run()
        os._exit(0)
    deadline = time.monotonic() + 30
    processes = []
    while len(processes) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
        processes = [pid for pid in process_tree(trainer) if pid != trainer]
    time.sleep(0.3)
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    deadline = time.monotonic() + 30
    while (states := _states(processes)) - {"Z", "X"} and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in processes if states - {"Z", "X"} else ():
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
    return len(processes), states


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_no_child_outlives_a_killed_trainer(level):
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # for a user of level `process`
        count, states = at_level(level, lambda name: _outlive(name, folder))
    assert count >= 5, "the launcher, the program, and three children"
    assert states <= {"Z", "X"}


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_deep_folders_are_removed(level, monkeypatch):
    """Deeper than a path can be long, and than Python recurses."""
    source = """
        import os
        for _ in range(1200):
            os.mkdir("deep")
            open("file", "w").close()
            os.chdir("deep")
        os.chmod("..", 0)
    """
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # for a user of level `process`
        monkeypatch.setattr(tempfile, "tempdir", folder)
        assert run(level, source).status in ("ok", "disk_limit")
        assert os.listdir(folder) == []


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_kernel_resources_per_user_are_bounded(level):
    source = "import resource; print(resource.getrlimit(resource.RLIMIT_SIGPENDING)[1])"
    assert int(run(level, source).stdout) <= 256


DISK = {
    "files": "open(str(i), 'wb').write(block)",
    "deleted and open": """
    kept.append(open(str(i), 'wb'))
    kept[-1].write(block)
    kept[-1].flush()
    os.unlink(str(i))""",
    "deleted and mapped": """
    with open(str(i), 'w+b') as file:
        file.write(block)
        file.flush()
        kept.append(mmap.mmap(file.fileno(), 4096))
    os.unlink(str(i))
    # The mapping holds a descriptor as well, which is not the one looked for.
    for fd in range(3, 64):
        try:
            os.close(fd)
        except OSError:
            pass""",
    "held by a program that cannot be looked into": """
    kept.append(open(str(i), 'wb'))
    kept[-1].write(block)
    kept[-1].flush()
    os.unlink(str(i))
    os.set_inheritable(kept[-1].fileno(), True)
    if i == 5:
        copy = os.open('sleep', os.O_CREAT | os.O_WRONLY, 0o111)
        os.write(copy, open('/bin/sleep', 'rb').read())
        os.close(copy)
        os.execv('./sleep', ['sleep', '15'])""",
    "in a folder that cannot be listed": """
    os.makedirs('d', 0o300, exist_ok=True)
    open('d/' + str(i), 'wb').write(block)""",
    "deeper than a path can be long": """
    for _ in range(5):
        os.mkdir('d' * 250)
        os.chdir('d' * 250)
    open('x', 'wb').write(block)""",
    "many": """
    for j in range(3000):
        os.mknod(str(i) + '-' + str(j))""",
}


@pytest.mark.parametrize("level", LEVELS_HERE)
@pytest.mark.parametrize("way", DISK)
def test_the_disk_is_bounded(level, way):
    source = "import mmap, os, time\nkept, block = [], bytes(4 * 2**20)\nfor i in range({count}):\n"
    source += "    " + DISK[way].strip() + "\n"
    result = run(level, source.format(count=6) + "time.sleep(15)\nprint('done')")
    assert result.status == ("runtime_error" if level == "namespace" else "disk_limit")
    # The control: one file of that size is within the limit.
    if way not in ("many", "in a folder that cannot be listed"):
        assert run(level, source.format(count=1) + "print('done')").stdout == "done\n"


@pytest.mark.parametrize("level", LEVELS_HERE)
def test_a_file_of_the_full_size_is_allowed(level):
    source = """
        import time
        open("x", "wb").write(bytes(7 * 2**20))
        time.sleep(0.5)
        print("done")
    """
    assert run(level, source).stdout == "done\n"


@pytest.mark.parametrize("level", ["namespace", "user", "process"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filters_jumps_stay_inside(level, machine):
    """Every path through the filter ends in an answer, for machines that are not this one too."""
    code = sc.seccomp_filter(machine, level)
    steps = [struct.unpack_from("HBBI", code, at) for at in range(0, len(code), 8)]
    assert steps[-1][0] == 0x06 and len(steps) < 4096
    for at, (kind, yes, no, _) in enumerate(steps):
        if kind in (0x15, 0x35, 0x45):
            assert max(at + 1 + yes, at + 1 + no) < len(steps)


def test_the_filter_on_the_other_machine():
    """Run as the kernel would: the same answers on both, by the names of the calls."""
    for machine in ("x86_64", "aarch64"):
        number = {**sc._NUMBERS[machine], **sc._COMMON}
        answers = {
            (name, arguments): _answer(machine, "process", number[name], arguments)
            for name, arguments in [
                ("prlimit64", (0, 7)), ("prlimit64", (9, 7)), ("setpriority", (0, 0)),
                ("setpriority", (2, 0)), ("setpriority", (0, 9)), ("fcntl", (0, 2)),
                ("fcntl", (0, 8)), ("fcntl", (0, 10)), ("fcntl", (0, 15)),
                ("fcntl", (0, 1024)), ("fcntl", (0, 1031)), ("ioctl", (0, 0x40086602)),
                ("ioctl", (0, 0x5401)), ("inotify_init1", ()), ("fanotify_init", (0, 0)),
                ("sync", ()), ("io_uring_setup", (1, 0)),
                ("prctl", (4, 0)), ("prctl", (15, 0)), ("shmget", (0, 0)),
            ]
        }  # fmt: skip
        allowed = {key for key, value in answers.items() if value == 0x7FFF0000}
        assert allowed == {
            ("prlimit64", (0, 7)), ("setpriority", (0, 0)), ("fcntl", (0, 2)), ("prctl", (15, 0)),
            ("ioctl", (0, 0x5401)),
        }, machine  # fmt: skip


def _answer(machine, level, number, arguments):
    data = struct.pack(
        "IIQ6Q", number, sc._AUDIT_ARCH[machine], 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6]
    )
    code = sc.seccomp_filter(machine, level)
    at, held = 0, 0
    while True:
        kind, yes, no, value = struct.unpack_from("HBBI", code, 8 * at)
        at += 1
        if kind == 0x06:
            return value
        if kind == 0x20:
            held = struct.unpack_from("I", data, value)[0]
        else:
            met = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[kind]
            at += yes if met else no
