"""Where a model may be written: nothing but an older model is ever replaced."""

import pytest

from rlmath.errors import UserError
from rlmath.validation.convert import check_export_target
from rlmath.weights import model_folder
from rlmath.weights.model_folder import Foreign, check_target, foreign_entries


def model(folder, *more):
    folder.mkdir(parents=True, exist_ok=True)
    shards = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    for name in ("config.json", "README.md", "tokenizer.json", *shards, *more):
        (folder / name).write_text("{}")
    return folder


def test_what_is_free_or_a_model_may_be_written(tmp_path):
    check_target(tmp_path / "new" / "deeper")
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty")
    check_target(model(tmp_path / "model"))


def add_file(folder):
    (folder / "thesis.tex").write_text("mine")


def add_folder_named_like_a_file(folder):
    (folder / "merges.txt").mkdir()


def add_adapter(folder):
    (folder / "adapter_model.safetensors").write_text("mine")


def add_hidden(folder):
    (folder / ".git").mkdir()


def lose_config(folder):
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    "change",
    [add_file, add_folder_named_like_a_file, add_adapter, add_hidden, lose_config],
)
def test_what_is_not_a_models_is_refused_by_name(tmp_path, change):
    folder = model(tmp_path / "out")
    change(folder)
    foreign = foreign_entries(folder)
    assert foreign
    with pytest.raises(Foreign, match="--overwrite") as caught:
        check_target(folder)
    assert all(name in str(caught.value) for name in foreign[:5])


def test_many_foreign_files_are_counted(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("")
    with pytest.raises(Foreign, match=r"4\.txt and 3 more"):
        check_target(tmp_path)


def test_an_export_never_replaces_what_it_reads(tmp_path):
    source, run = model(tmp_path / "model"), tmp_path / "run"
    checkpoint = run / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    for target in (source, checkpoint, run, tmp_path / "run" / ".." / "model"):
        for overwrite in (False, True):
            with pytest.raises(UserError, match="is read to write it"):
                check_export_target(target, checkpoint, source, overwrite)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(Foreign):
        check_export_target(other, checkpoint, source, overwrite=False)
    check_export_target(other, checkpoint, source, overwrite=True)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        check_export_target(file, checkpoint, source, overwrite=True)


def test_a_file_system_without_exchange_swaps_by_renaming(tmp_path, monkeypatch):
    monkeypatch.setattr(model_folder.ctypes, "CDLL", lambda *_, **__: object())
    old, new = model(tmp_path / "out"), tmp_path / "partial"
    new.mkdir()
    (new / "config.json").write_text("new")
    (old / "notes.txt").write_text("mine")
    model_folder.put_in_place(new, old, overwrite=False)
    assert (old / "config.json").read_text() == "new"
    assert (old / "notes.txt").read_text() == "mine"
    assert not (old / "tokenizer.json").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
