"""Actions that programs must not be able to do, tried by programs that try."""

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest

from rlmath.rewards import RewardSettingError
from rlmath.rewards.sandbox import Limits, Program, ProviderError, get_provider
from rlmath.rewards.sandbox.local import LEVELS, LocalProvider

pytestmark = pytest.mark.process

QUICK = Limits(cpu_s=2, wall_s=20.0, memory_mib=256, file_size_mib=8, output_kib=64, processes=16)


def levels_here():
    working = []
    for level in LEVELS:
        try:
            working.append(LocalProvider(level=level).level)
        except RewardSettingError:
            continue
    return working


LEVELS_HERE = levels_here()


@pytest.fixture(scope="module", params=LEVELS_HERE)
def provider(request):
    return LocalProvider(level=request.param)


def run(provider, source, stdin="", language="python", limits=QUICK, **program):
    with provider.prepare(Program(language, source, **program), limits) as prepared:
        assert prepared.compile_error is None, prepared.compile_error
        return prepared.run(stdin)


def test_some_level_works_here():
    assert LEVELS_HERE, "no sandbox level works: code rewards need a remote provider"
    assert get_provider("local").level == LEVELS_HERE[0]


def test_a_program_reads_and_prints(provider):
    result = run(provider, "print(sum(map(int, input().split())))", "1 2 39\n")
    assert (result.status, result.stdout, result.exit_code) == ("ok", "42\n", 0)
    result = run(provider, "import sys; print(sys.argv[1:]); sys.exit(3)", args=("a", "b c"))
    assert (result.status, result.stdout, result.exit_code) == (
        "runtime_error",
        "['a', 'b c']\n",
        3,
    )
    result = run(provider, "import helper; print(helper.x)", files={"helper.py": "x = 5"})
    assert result.stdout == "5\n"
    assert "ZeroDivisionError" in run(provider, "1/0").stderr


def test_the_standard_library_works(provider):
    source = """
import asyncio, bisect, collections, ctypes, datetime, decimal, fractions, functools, hashlib
import heapq, itertools, json, math, multiprocessing, numbers, os, random, re, socket, sqlite3
import ssl, statistics, string, subprocess, sys, tempfile, threading, time, uuid, zoneinfo
print(hashlib.sha256(b"x").hexdigest()[:4], datetime.datetime.now().year > 2000)
with tempfile.NamedTemporaryFile() as file:
    file.write(b"x")
print(subprocess.run(["echo", "hi"], capture_output=True, text=True).stdout, end="")
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
sys.setrecursionlimit(10**6)
def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)
print(depth(20000), asyncio.run(asyncio.sleep(0, 7)))
"""
    result = run(provider, source)
    assert result.stdout == "2d71 True\nhi\nthread\n20000 7\n", result.stderr


def test_files_come_back(provider):
    source = "open('output.txt', 'w').write('done')\nimport os\nos.symlink('/etc/passwd', 'link')"
    result = run(provider, source, collect=("output.txt", "missing.txt", "link"))
    assert result.files == {"output.txt": "done"}, "a link is not followed"


NETWORK = """
import socket
def attempt(what):
    try:
        what()
        print("open")
    except OSError as error:
        print("closed")
attempt(lambda: socket.create_connection(("127.0.0.1", {port}), 1))
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)))
attempt(lambda: socket.socket(socket.AF_UNIX).connect("/var/run/docker.sock"))
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW))
"""


def test_sandbox_has_no_network(provider):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run(provider, NETWORK.format(port=server.getsockname()[1]))
        assert result.stdout == "closed\n" * 4, result.stderr


def test_an_endless_loop_ends(provider):
    limits = Limits(cpu_s=1, wall_s=20.0)
    assert run(provider, "while True: pass", limits=limits).status == "timeout"
    limits = Limits(cpu_s=1, wall_s=0.5)
    assert run(provider, "import time; time.sleep(60)", limits=limits).status == "timeout"


def test_memory_is_bounded(provider):
    result = run(provider, "x = bytearray(2 * 10**9); print('got it')")
    assert result.status == "runtime_error" and "MemoryError" in result.stderr
    # In many processes, each within its own limit.
    grow = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(150 * 2**20)
        for i in range(0, len(x), 4096):
            x[i] = 1
        time.sleep(30)
time.sleep(30)
"""
    assert run(provider, grow).status == "memory"


def test_a_fork_bomb_is_bounded(provider):
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    most = 0
    stop = threading.Event()
    before = count_processes()

    def watch():
        nonlocal most
        while not stop.wait(0.02):
            most = max(most, count_processes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = run(provider, bomb, limits=Limits(cpu_s=1, wall_s=1.5, processes=16))
    stop.set()
    watcher.join()
    assert result.status == "timeout"
    assert most < 200, "other tests may start some processes meanwhile, a bomb thousands"
    assert_nothing_left()


def count_processes():
    return sum(name.isdigit() for name in os.listdir("/proc"))


def sandbox_processes():
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
                where = os.readlink(f"/proc/{name}/cwd")
            except OSError:
                continue
            if "left-behind" in command or "rlmath-sandbox-" in where:
                found.append(f"{name} {command}")
    return found


def assert_nothing_left():
    deadline = time.monotonic() + 10
    while sandbox_processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sandbox_processes() == []


def test_sandbox_leaves_no_process(provider):
    source = """
import os, subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(60)", "left-behind"]
subprocess.Popen(command)
try:
    subprocess.Popen(command, start_new_session=True)
except PermissionError:
    pass
if os.fork() == 0:
    try:
        os.setsid()
    except PermissionError:
        pass
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
print("done")
"""
    # A process that holds the pipe open for 60 s is not waited for: that would be a timeout.
    result = run(provider, source, limits=Limits(wall_s=30.0))
    assert (result.status, result.stdout) == ("ok", "done\n")
    assert_nothing_left()


def test_output_is_bounded(provider):
    for source in (
        "while True: print('x' * 1000)",
        "import sys\nwhile True: sys.stderr.write('x' * 1000)",
    ):
        result = run(provider, source)
        assert result.status == "output_limit"
        assert len(result.stdout) <= 64 * 1024 and len(result.stderr) <= 64 * 1024


def test_file_size_is_bounded(provider):
    result = run(
        provider, "f = open('big', 'wb')\nfor _ in range(64): f.write(b'x' * 2**20); f.flush()"
    )
    assert result.status == "runtime_error"


SECRETS = """
import os
print(sorted(set(os.environ) - {"PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE", "PYTHONHASHSEED",
                                "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENSSL_CONF"}))
try:
    pids = [p for p in os.listdir("/proc") if p.isdigit()]
except OSError:
    pids = map(str, range(1, 40000))
for pid in pids:
    if int(pid) == os.getpid():
        continue
    try:
        data = open(f"/proc/{pid}/environ", "rb").read()
    except OSError:
        continue
    if b"SECRET_OF_THE_TRAINER" in data:
        print("read it in", pid)
for fd in range(3, 200):
    try:
        os.fstat(fd)
    except OSError:
        continue
    print("open descriptor", fd)
"""


def test_the_trainers_environment_is_out_of_sight(provider, monkeypatch):
    if provider.level == "process" and not provider.hides_files:
        pytest.skip("without Landlock a process shows its environment to its own user; documented")
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "s3cr3t")
    result = run(provider, SECRETS)
    assert result.stdout.splitlines()[:1] == ["[]"], result.stdout + result.stderr
    assert "read it" not in result.stdout and "open descriptor" not in result.stdout


def test_files_of_the_machine_are_out_of_sight(provider, tmp_path):
    if not provider.hides_files:
        pytest.skip(f"level {provider.level} hides no files without Landlock; documented")
    secret = tmp_path / "secret.txt"
    secret.write_text("s3cr3t")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder != Path("/tmp") and folder.stat().st_uid == os.geteuid():
            folder.chmod(0o755)
    for path in (str(secret), __file__, "/etc/passwd", "/etc/hostname"):
        result = run(provider, f"print(open({path!r}).read())")
        if provider.level == "namespace" and path == "/etc/passwd":
            assert result.stdout.startswith("sandbox:x:"), "its own"
        else:
            assert result.status == "runtime_error" and not result.stdout, path
    listed = run(provider, f"import os; print(os.listdir({str(tmp_path)!r}))")
    assert listed.status == "runtime_error"
    if provider.level == "namespace":
        shown = run(provider, "import os; print(sorted(os.listdir('/')))").stdout
        assert "home" not in shown and "mnt" not in shown and "'work'" in shown


def test_the_system_cannot_be_written(provider):
    for path in ("/usr/bin/python-x", "/etc/x", "/proc/sys/kernel/hostname", "/x"):
        result = run(provider, f"open({path!r}, 'w').write('x')")
        if provider.level == "namespace" and path in ("/etc/x", "/x"):
            continue  # its own folders, gone with it
        assert result.status == "runtime_error", path
        assert not Path("/x").exists() and not Path("/etc/x").exists()


def test_each_run_starts_clean(provider):
    with provider.prepare(
        Program("python", "import os\nprint(sorted(os.listdir('.')))\nopen('x', 'w')"), QUICK
    ) as program:
        assert program.run().stdout == program.run().stdout == "['main.py']\n"


def test_sandbox_leaves_no_file(provider, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        run(provider, "import os\nos.mkdir('d')\nopen('d/x', 'w').write('x')\nos.chmod('d', 0)")
        short = Limits(cpu_s=1, wall_s=0.3)
        assert run(provider, "import time; time.sleep(60)", limits=short).status == "timeout"
        assert list(Path(folder).iterdir()) == []


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript on this machine")
def test_javascript(provider):
    assert run(provider, "console.log(6 * 7)", language="js").stdout == "42\n"
    grow = "const a = []; for (;;) a.push(new Array(10 ** 6).fill(1.5))"
    assert run(provider, grow).status != "ok"


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler on this machine")
def test_cpp(provider):
    source = """
#include <iostream>
int depth(int n) { volatile char room[256]; room[0] = 1; return n ? room[0] + depth(n - 1) : 0; }
int main() { int a, b; std::cin >> a >> b; std::cout << a + b << " " << depth(300000); }
"""
    assert run(provider, source, "40 2", language="c++").stdout == "42 300000"
    with provider.prepare(Program("cpp", "int main( {"), QUICK) as program:
        assert "error" in program.compile_error
        with pytest.raises(ProviderError, match="did not compile"):
            program.run()


def test_languages_and_paths():
    provider = get_provider("local")
    with pytest.raises(ProviderError, match="'cobol': sandboxes run bash, c, cpp"):
        provider.prepare(Program("cobol", ""), QUICK)
    for path in ("/etc/x", "../x", "a/../../x"):
        with pytest.raises(ProviderError, match="only paths inside"):
            provider.prepare(Program("python", "", files={path: ""}), QUICK)


def test_runs_in_parallel_stay_apart():
    provider = LocalProvider(max_parallel=4)
    results = {}

    def one(i):
        results[i] = run(provider, "print(input())", f"{i}\n").stdout

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {i: f"{i}\n" for i in range(8)}


def test_providers_that_are_missing_say_so():
    with pytest.raises(RewardSettingError, match=r"no code provider 'docker'; there are local"):
        get_provider("docker")
    with pytest.raises(RewardSettingError, match="sandbox level 'jail'"):
        get_provider("local", level="jail")
    with pytest.raises(RewardSettingError, match="its settings: max_parallel, level"):
        get_provider("local", parallel=2)
    with pytest.raises(RewardSettingError, match="sandbox limits must be above 0: cpu_s=0"):
        Limits(cpu_s=0)
    with pytest.raises(RewardSettingError, match="No module named"):
        get_provider("no_such_package:Provider")


@pytest.mark.parametrize(
    ("name", "package"), [("e2b", "e2b-code-interpreter"), ("morph", "morphcloud")]
)
def test_optional_packages_are_named(name, package, monkeypatch):
    import sys

    for module in ("e2b_code_interpreter", "morphcloud", "morphcloud.api"):
        monkeypatch.setitem(sys.modules, module, None)  # as if not installed
    with pytest.raises(RewardSettingError, match=f"needs the package {package}"):
        get_provider(name)
