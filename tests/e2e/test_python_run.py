"""Runs that Python drives, on real ranks and engines: a script, and the notebook as it is."""

import json
import re
import shlex
import shutil

import pytest
from omegaconf import OmegaConf

from tests.e2e.runs import ROOT, RUN_TIMEOUT_S, metrics, python


@pytest.fixture(scope="module")
def folder(material, tmp_path_factory):
    made = tmp_path_factory.mktemp("script")
    shutil.copytree(material, made / "material")
    return made


@pytest.fixture(scope="module")
def answer(folder):
    done = python(str(ROOT / "tests" / "e2e" / "python_program.py"), folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stderr.splitlines()[-1])


def test_a_run_is_left_and_continued_and_asked_between_steps(answer, folder):
    assert answer["numbers"] == [[1, 8, True], [2, 8, True], 3]
    assert 0 <= answer["accuracy"] <= 1
    assert [len(texts) for texts in answer["sampled"]] == [2, 2]
    results = json.loads((folder / "mine/evaluation/step_000002/results.json").read_text())
    assert results["benchmarks"]["held_out"]["metrics"]["accuracy"] == answer["accuracy"]
    # The model before the first step, and after the third. That a run that was interrupted can be
    # opened again in its process is shown in tests/unit/api/test_run.py.
    start, now = (
        (folder / "saved" / name / "model.safetensors").read_bytes() for name in ("start", "now")
    )
    assert start != now


# A run that is resumed after a signal: tests/faults.
@pytest.mark.long
def test_ctrl_c_leaves_a_run_that_the_command_line_continues(answer, folder):
    assert answer["interrupted"] == 3
    assert [line["step"] for line in metrics(folder / "mine")] == [1, 2, 3]
    words = shlex.split(answer["command"])
    assert words[:2] == ["rlmath", "train"]
    done = python("-m", *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed after step 3" in done.stdout
    assert [line["step"] for line in metrics(folder / "mine")] == [1, 2, 3, 4]
    assert (folder / "mine" / "hf" / "model.safetensors").is_file()
    config = OmegaConf.load(folder / "mine" / "config.yaml")
    names = ("Longest", "Rows", "plain", "variety")
    assert sorted(config.plugin_hashes) == [f"mine/given/{name}.py" for name in names]
    assert all(line["checks/longest"] > 0 for line in metrics(folder / "mine"))
    # The rows of an object without end, each where the one before was left.
    ledger = [json.loads(line) for line in (folder / "mine/ledger.jsonl").read_text().splitlines()]
    admitted = {one["problem"] for one in ledger if one["event"] == "admitted"}
    assert admitted == {f"Rows:{number}" for number in range(1, len(admitted) + 1)}
    assert len(admitted) >= 32
    assert [item.name for item in config.reward["items"]] == [
        "mine/given/variety.py:variety",
        "math",
    ]


@pytest.mark.long
def test_the_notebook_runs_as_it_is(quickstart_run, tmp_path, monkeypatch):
    """The script above calls the same; tests/unit/api/test_docs.py has its cells."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    run_dir = "runs/quickstart"
    # As the quickstart's warm start left them.
    for name in ("model", "data", "sft"):
        shutil.copytree(quickstart_run.run_dir / name, tmp_path / run_dir / name)
    (tmp_path / "datasets" / "benchmarks").mkdir(parents=True)
    problem = json.dumps({"problem": "1+1?", "answer": "2"})
    (tmp_path / "datasets" / "benchmarks" / "aime24.jsonl").write_text(problem + "\n")

    notebook = nbformat.read(ROOT / "examples" / "run.ipynb", as_version=4)
    # Whether a model gets there is test_quickstart.py's.
    (loop,) = [cell for cell in notebook.cells if "> 0.95" in cell.source]
    loop.source = loop.source.replace("> 0.95", ">= 0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    client = nbclient.NotebookClient(
        notebook, timeout=RUN_TIMEOUT_S, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", ())]
    shown = [one.data["text/plain"] for one in outputs if one.output_type == "display_data"]
    assert len(shown) <= 2 and re.search(r"step +\d+/70 .*accuracy", "\n".join(shown))
    responses = next(one for one in outputs if one.output_type == "execute_result")
    assert len(json.loads(responses.data["text/plain"].replace("'", '"'))) == 1
    assert (tmp_path / "runs" / "mine" / "model.safetensors").is_file()
    assert [line["step"] for line in metrics(tmp_path / run_dir)] == [0, 1]
