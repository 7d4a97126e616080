"""Programs that try to leave, block or poison a sandbox, or to forge what it reports."""

from __future__ import annotations

import random
import textwrap

# Printed by a program that reached something that it must not.
ESCAPED = "ESCAPED"
# Each is tried alone and with others. PID is a process of the trainer, SECRET a file of it that
# everyone may read, PORT a port at which it listens.
ATTEMPTS = {
    "fork bomb": "while True:\n    try: os.fork()\n    except OSError: pass",
    "fork and leave": "[os.fork() for _ in range(3)]\nos._exit(0)",
    "daemon": """
        if os.fork() == 0:
            quiet(os.setsid)
            if os.fork() == 0:
                for number in range(1, 65):
                    quiet(signal.signal, number, signal.SIG_IGN)
                while True: time.sleep(0.01)
            os._exit(0)""",
    "daemon without output": """
        if os.fork() == 0:
            os.closerange(0, 256)
            quiet(os.setsid)
            time.sleep(60)""",
    "grandchildren that respawn": """
        def again():
            while True:
                if os.fork(): time.sleep(0.002); os._exit(0)
        if os.fork() == 0: again()""",
    "memory": "kept = []\nwhile True: kept.append(bytearray(2**20))",
    "memory of children": """
        for _ in range(8):
            if os.fork() == 0:
                kept = bytearray(90 * 2**20)
                time.sleep(60)
        time.sleep(60)""",
    "shared memory": """
        import mmap
        kept = [mmap.mmap(-1, 64 * 2**20) for _ in range(64)]
        for one in kept: one.write(bytes(64 * 2**20))""",
    "disk": """
        for folder in ('.', '/tmp', '/dev/shm'):
            for i in range(200): quiet(lambda: open(f'{folder}/{i}', 'wb').write(bytes(2**20)))""",
    "inodes": "for i in range(30000): quiet(os.mknod, f'/tmp/{i}')",
    "endless loop": "while True: pass",
    "sleep": "time.sleep(3600)",
    "threads": """
        import threading
        while True: quiet(lambda: threading.Thread(target=time.sleep, args=(3600,)).start())""",
    "exit handler that hangs": "import atexit\natexit.register(time.sleep, 3600)",
    "destructor that hangs": """
        class Slow:
            def __del__(self): time.sleep(3600)
        slow = Slow()
        del slow""",
    "blocked signals": """
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        while True: pass""",
    "flood": "while True: quiet(os.write, 1, b'x' * 65536)",
    "flood of errors": "while True: quiet(os.write, 2, b'\\xff\\x00' * 30000)",
    "flood of an exception": "raise ValueError('x' * 10**8)",
    "closed descriptors": "os.closerange(0, 1024)",
    "closed streams": "sys.stdout.close(); sys.stderr.close(); sys.__stdout__ = None",
    "replaced streams": "sys.stdout = sys.stderr = None\nprint = input = None",
    "exit by force": "os._exit(random.choice([0, 1, 2, 3, 5, 75, 120, 127, 255]))",
    "exit that raises": """
        class Bad(BaseException):
            def __str__(self): raise Bad
        raise Bad(Bad())""",
    "own signal": "os.kill(os.getpid(), random.choice([2, 3, 6, 9, 11, 15, 19, 24, 31]))",
    "all processes": "quiet(os.kill, -1, 9)\nquiet(os.kill, -1, 19)\nquiet(os.killpg, 0, 9)",
    "the sandbox": """
        for number in (2, 9, 15, 18, 19, 17, 10, 23): quiet(os.kill, 1, number)
        for number in (9, 15, 19): quiet(os.kill, os.getppid(), number)""",
    "the trainer": """
        for number in (9, 15, 19): quiet(os.kill, PID, number)
        for pid in range(2, 400):
            if pid != os.getpid(): quiet(os.kill, pid, 9)""",
    "forged results": """
        for fd in range(3, 256):
            for forged in (b'\\x00', b'\\xff', b'\\x01' * 64, b'\\x00' * 34 + b'x' * 1000):
                quiet(os.write, fd, forged)""",
    "results of other processes": """
        for pid in (1, PID):
            for fd in range(64):
                try: os.write(os.open(f'/proc/{pid}/fd/{fd}', os.O_WRONLY), b'\\x00' * 64)
                except OSError: pass
                else:
                    if not own(pid): reached('a descriptor')""",
    "requests of others": "for fd in range(3, 64): quiet(os.read, fd, 1)",
    "memory of others": """
        for pid in (1, PID):
            for name in ('mem', 'environ', 'maps', 'fdinfo/3'):
                try: open(f'/proc/{pid}/{name}', 'rb').read(1)
                except (OSError, ValueError): pass
                else:
                    if not own(pid): reached(name)""",
    "tracing": """
        libc = ctypes.CDLL(None, use_errno=True)
        for request in (0, 16, 0x4206):
            if libc.ptrace(request, 1, 0, 0) == 0: reached('tracing')""",
    "raw calls": """
        libc = ctypes.CDLL(None, use_errno=True)
        for _ in range(300):
            number = random.choice([n for n in range(450) if n not in
                                    (15, 22, 34, 35, 56, 57, 58, 59, 60, 61, 231, 247, 322, 435)])
            libc.syscall(number, *(random.choice([0, 1, -1, 3, 4096]) for _ in range(5)))""",
    "sockets": """
        import socket
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16, 17, 40):
            for kind in (1, 2, 3, 5):
                try: made = socket.socket(family, kind)
                except OSError: continue
                try: made.connect(('127.0.0.1', PORT))
                except Exception: continue
                reached('a socket')""",
    "a file of the trainer": """
        for path in (SECRET, '/proc/1/root' + SECRET, '/proc/self/cwd/../..' + SECRET):
            try: open(path).read()
            except OSError: pass
            else: reached('a file')""",
    "links": """
        for folder in ('/work', '/tmp', '/dev/shm'):
            quiet(os.symlink, SECRET, folder + '/link')
            quiet(os.symlink, '/', folder + '/root')
            try: open(folder + '/link').read()
            except OSError: pass
            else: reached('a link')""",
    "poisoned folders": """
        for path in ('/work', '/tmp', '/dev/shm', '/', '/usr', '/etc', '/lib', '/dev'):
            quiet(os.chmod, path, 0)
            quiet(os.rename, path, '/tmp/moved')
            quiet(os.setxattr, path, 'user.x', b'1')
            quiet(lambda: open(path + '/sitecustomize.py', 'w').write('raise SystemExit'))
            quiet(lambda: open(path + '/ast.py', 'w').write('raise SystemExit'))""",
    "poisoned packages": """
        for path in [*sys.path, os.path.dirname(os.__file__)]:
            quiet(lambda: open(path + '/ast.py', 'a').write('x'))
        import ast
        ast.parse = exec = None""",
    "poisoned interpreter": """
        import builtins
        builtins.compile = builtins.exec = builtins.eval = None
        sys.modules.clear()
        sys.settrace(lambda *_: time.sleep(3600))""",
    "frames below": """
        frame = sys._getframe()
        while frame:
            for name, value in list(frame.f_locals.items()):
                if hasattr(value, 'sendall'): quiet(value.sendall, b'\\x00' * 64)
            frame = frame.f_back""",
    "more rights": """
        for number in (os.setuid, os.setgid, os.seteuid): quiet(number, 0)
        if os.geteuid() == 0: reached('root')
        import resource
        for what in range(16): quiet(resource.setrlimit, what, (-1, -1))
        quiet(os.setpriority, 0, 1, 19)
        for pid in (1, PID): quiet(resource.prlimit, pid, resource.RLIMIT_NOFILE, (0, 0))""",
    "mounts": """
        libc = ctypes.CDLL(None, use_errno=True)
        for flags in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x7E020000):
            if libc.unshare(flags) == 0: reached('a namespace')
        if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: reached('a mount')
        quiet(os.chroot, '/tmp')""",
    "another program": "os.execv('/bin/sh', ['sh', '-c', 'sleep 60 & sleep 60 & exec sleep 60'])",
    "a shell that stays": "os.system('(sleep 60 >/dev/null 2>&1 &) ; (setsid sleep 60 &)')",
    "a stopped process": "os.kill(os.getpid(), 19) if os.fork() else time.sleep(60)",
    "a pipe that nobody reads": "os.mkfifo('/tmp/f')\nopen('/tmp/f')",
    "a crash": "ctypes.string_at(0)",
    "deep recursion": "sys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
    "deep source": "eval('(' * 50000 + ')' * 50000)",
    "huge numbers": "print(len(str(7 ** 10**7)))",
    "a vfork that holds": """
        libc = ctypes.CDLL(None)
        if libc.vfork() == 0:
            libc.sleep(3600)""",
}
_BEGIN = """
import ctypes, os, random, signal, sys, time
random.seed({seed})
def quiet(function, *arguments):
    try: return function(*arguments)
    except BaseException: pass
IN_SANDBOX = True
def own(pid):  # a process of this sandbox that has the number of the trainer's
    return IN_SANDBOX and quiet(lambda: os.stat(f'/proc/{{pid}}').st_uid) in (os.getuid(), None)
def reached(what):
    os.write(1, b'{escaped}: ' + what.encode() + b'\\n')
"""
_WAYS = {
    "alone": "{body}",
    "in a child": "if os.fork() == 0:\n{inner}\n    os._exit(0)",
    "in a thread": "import threading\ndef work():\n{inner}\nthreading.Thread(target=work).start()",
    "although it fails": "try:\n{inner}\nfinally:\n    1 / 0",
}


def programs(seed: int, count: int, **facts: object) -> list[tuple[str, str]]:
    """Names and sources; the first ones are all attempts alone, the others draw some.

    Args:
        facts: ``PID``, ``SECRET`` and ``PORT``, see ``ATTEMPTS``.
    """
    draw = random.Random(seed)
    chosen = [((name,), ("alone",)) for name in ATTEMPTS]
    while len(chosen) < count:
        names = tuple(draw.choices(list(ATTEMPTS), k=draw.randint(1, 3)))
        chosen.append((names, tuple(draw.choices(list(_WAYS), k=len(names)))))
    return [_program(names, ways, draw.randrange(2**32), facts) for names, ways in chosen[:count]]


def _program(names, ways, seed, facts):
    parts = [_BEGIN.format(seed=seed, escaped=ESCAPED)]
    for name, way in zip(names, ways, strict=True):
        body = textwrap.dedent(ATTEMPTS[name]).strip()
        for fact, value in facts.items():
            body = body.replace(fact, repr(value))
        parts.append(_WAYS[way].format(body=body, inner=textwrap.indent(body, "    ")))
    label = "; ".join(f"{name} {way}" for name, way in zip(names, ways, strict=True))
    return label, "\n".join(parts) + "\n"
