"""A run on a machine with one GPU, nothing installed, no network and little time.

    here   launchers/gpu_run.sh prepare BOX --pack DIR ...   environment, model and data, in pieces
    there  launchers/gpu_run.sh receive PIECE ...            once per call that brings pieces
    there  launchers/gpu_run.sh run OUT --limit-s 800        unpacks, then works through the list
    here   launchers/gpu_run.sh collect OUT                  the section for docs/gpu_results.md

Packed folders come to lie where they lay, so that a virtual environment works there: pack it, and
the Python that it was made with, where that machine has no such. ``run`` writes OUT/NN_NAME/
result.json when an item begins and again when it ends: a machine that is taken away in the middle
leaves all that was done. With the same OUT it continues where it was cut. Needs Python 3.9 and
nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[1]
STORE = Path(os.environ.get("RLMATH_BOX", "~/rlmath_box")).expanduser()
MANIFEST = "manifest.json"
# Files of an item's folder that come back: names, and at most this much of each.
KEPT = ("selfcheck.md", "metrics.jsonl", "summary.json", "curves.png", "results.json")
KEPT_BYTES = 8 * 2**20
TAIL_CHARACTERS = 6000
# A metric that SFT has not.
_ALIGNMENT = "alignment/mean_exp_abs_diff"
# An item that has less than this is not begun.
LEAST_S = 10.0
# The list where --items names no other: in order of what is missed most. {python}, {model}, {data}
# and {out} are filled in.
ITEMS = [
    {"name": "doctor", "limit_s": 60, "command": "{python} -m rlmath doctor"},
    {
        "name": "word_problems",
        "limit_s": 780,
        "command": "{python} benchmarks/real_model.py --raw {data} --model {model} --to {out} "
        "--held-out 700 --seeds 0 1 2 --at-once 3 --peer trl --plot {out}/curves.png -- "
        "runner.steps=80 eval.every=20 actor.num_threads=null "
        "actor.max_tokens_per_microbatch=16384 rollout.max_running_sequences=1024",
    },
    {
        "name": "gsm8k",
        "limit_s": 420,
        "command": "{python} -m rlmath train experiment=smollm2_word_problems model.path={model} "
        "data=gsm8k data.train_paths=[{data}/gsm8k_train.jsonl] "
        "eval.benchmarks=[{{name:gsm8k,path:{data}/gsm8k_test.jsonl,max_problems:400}}] "
        "data.apply_chat_template=true reward.items=[{{name:math}}] actor.num_threads=null "
        "actor.max_tokens_per_microbatch=16384 rollout.max_response_tokens=256 "
        "rollout.gpu_memory_utilization=0.5 rollout.enforce_eager=false eval.every=25 "
        "runner.steps=100 runner.run_dir={out}/run",
    },
    *(
        {
            "name": f"selfcheck_{check}",
            "limit_s": limit_s,
            "command": "{python} -m rlmath selfcheck gpu --out {out} --only " + check,
        }
        for check, limit_s in (
            ("speed", 480),
            ("checkpoint", 180),
            ("alignment", 120),
            ("engines", 180),
        )
    ),
]


class BoxError(Exception):
    """For a person; the message says what to do."""


def main(argv: list[str]) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="launchers/gpu_run.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare", help="pack into pieces")
    one.add_argument("box", type=Path, help="folder for the pieces")
    one.add_argument("--pack", type=Path, nargs="+", required=True, help="folders to bring along")
    one.add_argument("--without", nargs="*", default=[], help="patterns of paths to leave out")
    one.add_argument("--piece-mib", type=int, default=56)
    one = commands.add_parser("receive", help="keep pieces that have come")
    one.add_argument("pieces", type=Path, nargs="+")
    one = commands.add_parser("run", help="unpack and work through the list")
    one.add_argument("out", type=Path)
    one.add_argument("--limit-s", type=float, required=True, help="seconds for all of it")
    one.add_argument("--items", type=Path, help="JSON list of name, limit_s and command")
    one.add_argument("--python", default=sys.executable, help="of the packed environment")
    one.add_argument("--model", default="models/smollm2-135m")
    one.add_argument("--data", default="datasets")
    one = commands.add_parser("collect", help="print the section for docs/gpu_results.md")
    one.add_argument("out", type=Path)
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "prepare":
            prepare(arguments.box, arguments.pack, arguments.without, arguments.piece_mib * 2**20)
        elif arguments.command == "receive":
            receive(arguments.pieces)
        elif arguments.command == "run":
            return run(arguments)
        else:
            print(collect(arguments.out))
    except BoxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


# -- here: packing ---------------------------------------------------------------------------------


class _Pieces:
    """A file that is written on into pieces of at most ``size`` bytes."""

    def __init__(self, box: Path, size: int) -> None:
        self._box, self._size = box, size
        self._file: BinaryIO | None = None
        self._left = 0
        self.paths: list[Path] = []

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            if not self._left:
                self.close()
                self.paths.append(self._box / f"piece_{len(self.paths):04d}")
                self._file, self._left = self.paths[-1].open("wb"), self._size
            assert self._file is not None
            written = self._file.write(view[: self._left])
            self._left -= written
            view = view[written:]
        return len(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def prepare(box: Path, folders: list[Path], without: list[str], piece_bytes: int) -> None:
    """Write ``box/piece_NNNN`` and the manifest with their hashes."""
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise BoxError(f"--pack: no folder {', '.join(missing)}")
    if box.exists() and any(box.iterdir()):
        raise BoxError(f"{box} is not empty; name another folder or remove it")
    box.mkdir(parents=True, exist_ok=True)
    pieces = _Pieces(box, piece_bytes)

    def is_wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        path = Path("/", entry.name)
        out = path.name == "__pycache__" or any(path.match(pattern) for pattern in without)
        return None if out else entry

    # Libraries shrink to half; better compression would take longer than a call that it saves.
    with (
        gzip.GzipFile(fileobj=pieces, mode="wb", compresslevel=5) as packed,  # type: ignore[call-overload]
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for folder in folders:
            archive.add(folder.absolute(), filter=is_wanted)
    pieces.close()
    manifest = {
        "pieces": {path.name: _digest(path) for path in pieces.paths},
        "folders": [str(folder.absolute()) for folder in folders],
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }
    (box / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    size = sum(path.stat().st_size for path in pieces.paths)
    print(
        f"{box}: {len(pieces.paths)} pieces, {size / 2**20:.0f} MiB; "
        f"bring {MANIFEST} with the first"
    )


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            found.update(block)
    return found.hexdigest()


# -- there: receiving and running ------------------------------------------------------------------


def receive(paths: list[Path]) -> None:
    """Keep pieces, and the manifest, in the store; says which are still to come."""
    STORE.mkdir(parents=True, exist_ok=True)
    # The manifest first: it says what the others should be.
    for path in sorted(paths, key=lambda path: path.name != MANIFEST):
        if path.name != MANIFEST:
            expected = _manifest()["pieces"].get(path.name)
            if expected is None:
                raise BoxError(f"{path}: no piece of the box in {STORE}; another manifest?")
            if _digest(path) != expected:
                raise BoxError(f"{path} arrived changed (SHA-256 differs); bring it again")
        shutil.copyfile(path, STORE / f"{path.name}.part")
        (STORE / f"{path.name}.part").rename(STORE / path.name)
    missing = _missing()
    print("complete" if not missing else f"{len(missing)} pieces to come, next {missing[0]}")


def _manifest() -> dict[str, Any]:
    path = STORE / MANIFEST
    if not path.is_file():
        raise BoxError(f"{STORE} has no {MANIFEST}; bring it with the first piece")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _missing() -> list[str]:
    return [name for name in _manifest()["pieces"] if not (STORE / name).is_file()]


def _unpack(python: str) -> None:
    """Unpack and compile once; a mark says that it is done.

    Compiled modules do not travel, and without them each process of a run takes 20 s to import.
    """
    manifest = _manifest()
    mark = STORE / "unpacked"
    digest = _digest(STORE / MANIFEST)
    if mark.is_file() and mark.read_text() == digest:
        return
    if missing := _missing():
        raise BoxError(f"{len(missing)} pieces are missing: {', '.join(missing[:5])}")
    began = time.monotonic()
    with subprocess.Popen(["tar", "-xzf", "-", "-C", "/"], stdin=subprocess.PIPE) as tar:
        assert tar.stdin is not None
        for name in manifest["pieces"]:
            with (STORE / name).open("rb") as file:
                shutil.copyfileobj(file, tar.stdin, 2**22)
    if tar.returncode:
        raise BoxError(f"tar ended with {tar.returncode}; is the disk full?")
    compiled = [python, "-m", "compileall", "-q", "-j", "0", *manifest["folders"]]
    subprocess.run(compiled, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    mark.write_text(digest)
    print(f"unpacked in {time.monotonic() - began:.0f} s", flush=True)


def run(arguments: argparse.Namespace) -> int:
    """Work through the list; the exit code is 1 if an item failed or was not reached."""
    ends = time.monotonic() + arguments.limit_s
    if (STORE / MANIFEST).is_file():
        _unpack(arguments.python)
    items = json.loads(arguments.items.read_text()) if arguments.items else ITEMS
    arguments.out.mkdir(parents=True, exist_ok=True)
    _write(arguments.out / "machine.json", _machine(arguments.python))
    complete = True
    for number, item in enumerate(items):
        folder = arguments.out / f"{number:02d}_{item['name']}"
        path = folder / "result.json"
        if path.is_file() and json.loads(path.read_text())["rc"] is not None:
            continue
        left_s = ends - time.monotonic()
        if left_s < LEAST_S:
            print(f"{item['name']}: not run, {max(left_s, 0):.0f} s are left", flush=True)
            complete = False
            continue
        folder.mkdir(exist_ok=True)
        filled = item["command"].format(
            python=arguments.python, model=arguments.model, data=arguments.data, out=folder
        )
        result = _item(folder, item["name"], filled, min(item["limit_s"], left_s))
        complete &= result["rc"] == 0
    return 0 if complete else 1


def _item(folder: Path, name: str, command: str, limit_s: float) -> dict[str, Any]:
    result: dict[str, Any] = {"name": name, "command": command, "limit_s": limit_s, "rc": None}
    # Files that are read if the machine goes away in the middle.
    _write(folder / "result.json", result)
    began = time.monotonic()
    log = folder / "output.txt"
    with log.open("wb") as file:
        # A separate session, so that everything it starts ends with it.
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            # Interrupted first, so that a run leaves a checkpoint and curves.
            result["rc"] = _wait(process, limit_s)
        except subprocess.TimeoutExpired:
            result["rc"] = 124
        finally:
            _kill(process)
    result["seconds"] = round(time.monotonic() - began, 1)
    result["tail"] = log.read_text(errors="replace")[-TAIL_CHARACTERS:]
    _write(folder / "result.json", result)
    print(f"{name}: {_verdict(result)}, {result['seconds']:.0f} s", flush=True)
    _keep(folder)
    return result


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int:
    try:
        return process.wait(max(limit_s - 5, limit_s / 2))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(min(5, limit_s / 2))
        raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _keep(folder: Path) -> None:
    """Copy what should come back to the item's folder itself, which is as deep as files come.

    Of several files of a name the newest: an item may train twice, and the last run is meant. A
    file that the item wrote there itself stays.
    """
    wanted = set(KEPT) - {path.name for path in folder.iterdir()}
    deeper = [path for path in folder.rglob("*") if path.name in wanted]
    for path in sorted(filter(Path.is_file, deeper), key=_changed_ns):
        if path.stat().st_size <= KEPT_BYTES:
            shutil.copyfile(path, folder / path.name)


def _changed_ns(path: Path) -> int:
    return path.stat().st_mtime_ns


def _machine(python: str) -> dict[str, Any]:
    names = ("torch", "vllm", "megatron-core", "transformer-engine-torch", "ray", "transformers")
    code = (
        "import importlib.metadata as m, json, sys\n"
        "def v(n):\n"
        "    try: return m.version(n)\n"
        "    except m.PackageNotFoundError: return None\n"
        "print(json.dumps({n: v(n) for n in sys.argv[1:]}))"
    )
    versions = _output(python, "-c", code, *names)
    query = "--query-gpu=name,memory.total,driver_version"
    commit = _manifest()["commit"] if (STORE / MANIFEST).is_file() else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": _output("nvidia-smi", query, "--format=csv,noheader"),
        "python": _output(python, "-V"),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "versions": json.loads(versions) if versions else {},
        "commit": commit or _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _write(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


# -- here: the section -----------------------------------------------------------------------------


def collect(out: Path) -> str:
    """Markdown with the machine and each item's result and figures."""
    if not (out / "machine.json").is_file():
        raise BoxError(f"{out} has no machine.json; it is not what `run` wrote")
    machine = json.loads((out / "machine.json").read_text())
    packages = ", ".join(f"{name} {one}" for name, one in machine["versions"].items() if one)
    lines = [
        f"### {machine['gpu'] or 'No GPU'}, {machine['date']}",
        "",
        f"{machine['cpus']} cores, {machine['python']}, {packages or 'no packages'}, commit "
        f"{(machine['commit'] or 'unknown')[:8]}.",
        "",
        "| item | result | seconds | figures |",
        "|---|---|---|---|",
    ]
    sections = []
    for folder in sorted(path for path in out.iterdir() if (path / "result.json").is_file()):
        result = json.loads((folder / "result.json").read_text())
        seconds = result.get("seconds", "")
        figures = "; ".join(_figures(folder))
        lines.append(f"| `{result['name']}` | {_verdict(result)} | {seconds} | {figures} |")
        if (folder / "selfcheck.md").is_file():
            sections.append((folder / "selfcheck.md").read_text().strip())
        if result["rc"] not in (0, None):
            tail = result["tail"].strip().splitlines()[-8:]
            sections.append(
                "\n".join([f"End of `{result['name']}`:", "", *map("    {}".format, tail)])
            )
    return "\n".join([*lines, "", *"\n\n".join(sections).splitlines()])


def _verdict(result: dict[str, Any]) -> str:
    if result["rc"] is None:
        return "cut while it ran"
    if result["rc"] == 124:
        return f"ended at its limit of {result['limit_s']:.0f} s"
    return "passed" if result["rc"] == 0 else f"failed ({result['rc']})"


def _figures(folder: Path) -> Iterator[str]:
    """Each part's rise, of ``benchmarks/real_model.py``; else of a training run: steps, first and
    last held-out accuracy, speed."""
    results = folder / "results.json"
    parts = json.loads(results.read_text()) if results.is_file() else {}
    rises = {k: part for k, part in parts.items() if isinstance(part, dict) and "rise" in part}
    for name, part in rises.items():
        sets = (
            f"{one} {rise['before']:.3f} → {rise['after']:.3f} ± {rise['standard_error']:.3f}"
            for one, rise in part["rise"].items()
        )
        yield f"{name}, step {part['curve'][-1]['step']}: {', '.join(sets)}"
    if rises:
        return
    path = folder / "metrics.jsonl"
    if not path.is_file():
        path = max(folder.rglob("metrics.jsonl"), key=_changed_ns, default=path)
    if not path.is_file():
        return
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    steps = [row for row in rows if "timing/step" in row]
    yield f"{len(steps)} steps"
    held_out = [row for row in rows if "eval/accuracy" in row]
    if held_out:
        shown = (held_out[0], held_out[-1])
        yield "held-out " + " → ".join(
            f"{row['eval/accuracy']:.3f} ± {row['eval/accuracy_standard_error']:.3f}"
            for row in shown
        )
    if len(steps) > 1:
        seconds = sorted(row["timing/step"] for row in steps[1:])
        yield f"{seconds[len(seconds) // 2]:.1f} s a step"
    apart = [row[_ALIGNMENT] for row in steps if _ALIGNMENT in row]
    if apart:
        yield f"mean exp\\|Δ\\| {max(apart):.4f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
