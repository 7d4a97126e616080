import contextlib
import json
import os
import subprocess
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlmath.errors import UserError, WeightsError
from rlmath.model.tiny import tiny_config
from rlmath.validation.convert import check_export_target
from rlmath.weights import gather, megatron, model_folder
from rlmath.weights.buckets import TensorMeta, view_in_buffer
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.hf_files import HfFolderReader, generation_config, hf_folder_writer
from rlmath.weights.model_folder import Foreign, check_target, foreign_entries
from rlmath.weights.pieces import expert_tensors
from tests.unit.weights.model_ranks import gatherer_of
from tests.unit.weights.shapes import QWEN3_MOE

TENSORS = {
    "a.weight": torch.randn(6, 5),
    "a.bias": torch.randn(6),
    "b.weight": torch.randn(3, 7).to(torch.bfloat16),
    "c.weight": torch.randn(1, 1).half(),
}
ANNOUNCED = {name: (tuple(t.shape), t.dtype) for name, t in TENSORS.items()}


@pytest.fixture
def source(tmp_path):
    """A folder with a config and a tokenizer whose end of sequence is token 2."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder = tmp_path / "source"
    folder.mkdir()
    config = {**tiny_config(), "vocab_size": 3, "torch_dtype": "bfloat16"}
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(WordLevel({"x": 0, "<pad>": 1, "<end>": 2}, "x")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def write(folder, source, tensors, shard_size_mib=1):
    announced = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    with hf_folder_writer(folder, announced, source, shard_size_mib) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)


def test_written_weights_are_read_by_safetensors(source, tmp_path):
    folder = tmp_path / "out"
    write(folder, source, TENSORS)
    theirs = load_file(folder / "model.safetensors")
    with HfFolderReader(folder) as reader:
        assert set(reader.names()) == set(TENSORS) == set(theirs)
        for name, tensor in TENSORS.items():
            assert reader.file_shapes()[name] == tuple(tensor.shape)
            assert reader.dtype(name) == tensor.dtype
            assert torch.equal(reader.read(name), tensor)
            assert torch.equal(theirs[name], tensor)
        assert torch.equal(reader.read("a.weight", 0, 2, 3), TENSORS["a.weight"][2:5])
        assert torch.equal(reader.read("a.weight", 1, 1, 2), TENSORS["a.weight"][:, 1:3])
        assert torch.equal(reader.read("a.bias", 0, 4, 2), TENSORS["a.bias"][4:])
        with pytest.raises(WeightsError, match="has no tensor nothing"):
            reader.read("nothing")
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == "float32"
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    readme = (folder / "README.md").read_text()
    assert f"# {folder.name}\n" in readme and "trained with rlmath" in readme


def test_large_models_are_cut_into_shards_with_an_index(source, tmp_path):
    tensors = {f"layer{n}": torch.randn(300, 500) for n in range(5)}  # 0.57 MiB each
    write(tmp_path / "out", source, tensors)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 300 * 500 * 4
    assert index["weight_map"]["layer4"] == "model-00005-of-00005.safetensors"
    with HfFolderReader(tmp_path / "out") as reader:
        for name, tensor in tensors.items():
            assert torch.equal(reader.read(name), tensor)


def test_an_older_model_is_replaced_and_other_files_are_kept(source, tmp_path):
    folder = tmp_path / "out"
    write(folder, source, {f"old{n}": torch.zeros(300, 500) for n in range(3)})
    (folder / "notes.txt").write_text("mine")
    (folder / "results").mkdir()
    (folder / "results" / "scores.json").write_text("{}")
    write(folder, source, TENSORS)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "results" / "scores.json").read_text() == "{}"
    with HfFolderReader(folder) as reader:
        assert set(reader.names()) == set(TENSORS)
    # Neither the index nor the shards of the older model are left: a reader would take them.
    assert sorted(p.name for p in folder.glob("*.safetensors*")) == ["model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_files_beside_a_model_survive_an_error_while_it_is_replaced(source, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    write(folder, source, {"old": torch.zeros(2)})
    (folder / "notes.txt").write_text("mine")
    rename = type(folder).rename

    def fail_for_notes(path, target):
        if path.name == "notes.txt":
            raise OSError("no space left")
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        patch.setattr(type(folder), "rename", fail_for_notes)
        write(folder, source, TENSORS)
    (kept,) = tmp_path.glob(".out.*/notes.txt")
    assert str(kept.parent) in caught.value.__notes__[0]
    write(folder, source, TENSORS)
    assert kept.read_text() == "mine"


def test_a_model_that_cannot_take_the_place_of_another_is_removed(source, tmp_path, monkeypatch):
    """A mount point cannot be replaced; each try would leave a whole model beside it."""
    folder = tmp_path / "out"
    write(folder, source, {"old": torch.zeros(2)})
    (folder / "notes.txt").write_text("mine")

    def refuse(one, other):
        raise OSError("device or resource busy")

    monkeypatch.setattr(model_folder, "_exchange", refuse)
    with pytest.raises(OSError, match="busy"):
        write(folder, source, TENSORS)
    assert (folder / "notes.txt").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_overwrite_replaces_the_whole_folder(source, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with hf_folder_writer(folder, ANNOUNCED, source, overwrite=True) as writer:
        for name, tensor in TENSORS.items():
            writer.add(name, tensor)
    assert not (folder / "notes.txt").exists()


def test_a_file_is_never_made_a_folder(source, tmp_path):
    target = tmp_path / "out"
    target.write_text("mine")
    with (
        pytest.raises(UserError, match="is a file"),
        hf_folder_writer(target, ANNOUNCED, source, overwrite=True),
    ):
        pass
    assert target.read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_a_link_to_a_folder_stays_a_link(source, tmp_path):
    write(tmp_path / "real", source, {"old": torch.zeros(2)})
    (tmp_path / "out").symlink_to("real")
    write(tmp_path / "out", source, TENSORS)
    assert (tmp_path / "out").is_symlink()
    with HfFolderReader(tmp_path / "real") as reader:
        assert set(reader.names()) == set(TENSORS)


def test_an_error_leaves_the_older_folder_and_nothing_half(source, tmp_path):
    folder = tmp_path / "out"
    write(folder, source, {"old": torch.zeros(2)})
    with pytest.raises(RuntimeError, match="the trainer died"):  # noqa: SIM117
        with hf_folder_writer(folder, ANNOUNCED, source) as writer:
            writer.add("a.weight", TENSORS["a.weight"])
            raise RuntimeError("the trainer died")
    with pytest.raises(WeightsError, match=r"1 of 4 tensors came; the next would be a\.bias"):  # noqa: SIM117
        with hf_folder_writer(folder, ANNOUNCED, source) as writer:
            writer.add("a.weight", TENSORS["a.weight"])
    with HfFolderReader(folder) as reader:
        assert reader.names() == ["old"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_leftovers_of_a_killed_writer_are_removed(source, tmp_path):
    folder = tmp_path / "out"
    writing = hf_folder_writer(folder, ANNOUNCED, source)
    writing.__enter__().add("a.weight", TENSORS["a.weight"])
    (partial,) = tmp_path.glob(".out.*")
    assert not folder.exists()
    # A writer that is alive keeps what it writes; one that was killed does not.
    write(folder, source, TENSORS)
    assert partial.exists()
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    partial.rename(str(partial).replace(f"-{os.getpid()}-", f"-{ended.pid}-"))
    write(folder, source, TENSORS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_tensors_come_as_announced(source, tmp_path):
    def add(name, tensor):
        with hf_folder_writer(tmp_path / "out", ANNOUNCED, source) as writer:
            writer.add(name, tensor)

    with pytest.raises(WeightsError, match=r"a\.bias came where a\.weight was announced"):
        add("a.bias", TENSORS["a.bias"])
    with pytest.raises(WeightsError, match=r"a\.weight was announced as \(6, 5\)"):
        add("a.weight", TENSORS["a.weight"].T)
    with pytest.raises(WeightsError, match=r"torch\.float32 and came as .* torch\.bfloat16"):
        add("a.weight", TENSORS["a.weight"].bfloat16())


def test_broken_folders_are_named(source, tmp_path):
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        HfFolderReader(source)
    tensors = {f"layer{n}": torch.randn(300, 500) for n in range(3)}
    folder = tmp_path / "out"
    write(folder, source, tensors)
    shard = folder / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match=r"model-00002-of-00003\.safetensors is cut off"):
        HfFolderReader(folder)
    shard.unlink()
    with pytest.raises(
        WeightsError, match=r"model-00002-of-00003\.safetensors is listed .*missing"
    ):
        HfFolderReader(folder)
    save_file({"other": torch.zeros(1)}, shard)
    with pytest.raises(WeightsError, match=r"says that layer1 is in .*; it is not"):
        HfFolderReader(folder)


@pytest.mark.parametrize(
    ("listed", "expected"), [(None, 2), (2, 2), (1, [2, 1]), ([1, 2], [1, 2]), ([0, 1], [2, 0, 1])]
)
def test_generation_stops_where_the_tokenizer_says(source, listed, expected):
    if listed is not None:
        text = json.dumps({"eos_token_id": listed, "temperature": 0.6})
        (source / "generation_config.json").write_text(text)
    result = generation_config(source)
    assert result["eos_token_id"] == expected
    assert result.get("temperature") == (None if listed is None else 0.6)


def test_a_copy_without_generation_config_stops_where_config_json_says(source):
    """As transformers and vLLM do with the original."""
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 0]}))
    assert generation_config(source) == {"eos_token_id": [2, 1, 0]}
    (source / "generation_config.json").write_text("{}")
    assert generation_config(source) == {"eos_token_id": 2}


def model(folder, *more):
    folder.mkdir(parents=True, exist_ok=True)
    shards = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    for name in ("config.json", "README.md", "tokenizer.json", *shards, *more):
        (folder / name).write_text("{}")
    return folder


def test_target_may_be_new_empty_or_a_model(tmp_path):
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
    "change", [add_file, add_folder_named_like_a_file, add_adapter, add_hidden, lose_config]
)
def test_target_with_foreign_files_is_refused(tmp_path, change):
    folder = model(tmp_path / "out")
    change(folder)
    foreign = foreign_entries(folder)
    assert foreign
    with pytest.raises(Foreign, match="--overwrite") as caught:
        check_target(folder)
    assert all(name in str(caught.value) for name in foreign[:5])


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


SPEC = replace(QWEN3_MOE, vocab=64)
MESSAGES = ("broadcast", "isend", "irecv", "batch_isend_irecv", "all_reduce", "all_gather_object")


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_writes_its_own_experts_and_sends_nothing(monkeypatch, ranks):
    spec = replace(SPEC, kv_heads=ranks)
    # Buckets that are smaller than an expert's matrix.
    gatherer, _ = gatherer_of(monkeypatch, spec, ranks, 0.0005)

    def refuse_to_send(*_, **__):
        raise AssertionError("a message was sent")

    for name in MESSAGES:
        monkeypatch.setattr(dist, name, refuse_to_send)
    experts, written = expert_tensors(spec), set()
    for _ in range(2):
        for bucket in gatherer.buckets:
            buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            gatherer.write_local(bucket, buffer)
            for tensor in bucket.tensors:
                if tensor.meta.name in experts:
                    values = view_in_buffer(buffer, tensor)
                    assert values.any() == values.all(), "whole, or nothing of it"
                    written |= {tensor.meta.name} if values.any() else set()
    # The first rank has the first experts of every layer.
    own = {name for name, expert in experts.items() if expert < spec.experts // ranks}
    assert written == own and len(own) * ranks == len(experts)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_wait_outside_nccl_until_a_bucket_is_on_the_disk(monkeypatch, rank):
    """A message or barrier of NCCL ends the run after 10 minutes, and a disk may need longer."""
    events = []
    metas = [TensorMeta(name, (2,), torch.float32) for name in "abc"]

    def gather_buckets(destination):
        for number, names in enumerate(("ab", "c")):
            events.append(f"gather {number}")
            yield [(name, torch.zeros(2)) for name in names if destination == rank]

    @contextlib.contextmanager
    def writer(*_):
        yield SimpleNamespace(add=lambda name, _: events.append(f"write {name}"))
        events.append("write the rest")

    group = object()
    monkeypatch.setattr(gather, "free_group", lambda: group)
    monkeypatch.setattr(dist, "barrier", lambda group: events.append(group))
    monkeypatch.setattr(megatron, "hf_folder_writer", writer)
    monkeypatch.setattr(megatron, "file_tensors", lambda _: {name: (name,) for name in "abc"})
    monkeypatch.setattr(megatron, "file_shapes", lambda _: dict.fromkeys("abc", (2,)))
    monkeypatch.setattr(megatron, "fuse_for_files", lambda _, tensors: tensors)
    parallel = SimpleNamespace(global_rank=rank, group=object())
    gatherer = Mock(spec=BucketGatherer, parallel=parallel, tensors=metas, buckets=[1, 2])
    gatherer.gather = gather_buckets
    gatherer.wait_for_all = partial(BucketGatherer.wait_for_all, gatherer)
    gatherer.gather_to_writer = partial(BucketGatherer.gather_to_writer, gatherer)
    megatron.save_to_hf(gatherer, None, "target", "source")
    written = ["write a", "write b"], ["write c"], ["write the rest"]
    first, second, last = written if rank == 0 else ([], [], [])
    wanted = ["gather 0", *first, group, "gather 1", *second, group, *last, group]
    assert events == wanted
