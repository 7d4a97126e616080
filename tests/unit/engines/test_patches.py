"""The plugin in vLLM's processes, and its list of patches."""

import re
from pathlib import Path

import pytest

import rlmath
from rlmath.config.load import load
from rlmath.engines.patches.engine_precision import check_workers, engine_arguments
from rlmath.model.precision import Precision
from rlmath.training.rank_settings import precision

KEPT = {
    "logprobs_mode": "processed_logprobs",
    "dtype": "bfloat16",
    "lm_head_dtype": "bfloat16",
    "batch_invariant": "off",
}


def test_vllm_gets_a_float32_head_and_log_probs_after_temperature():
    assert engine_arguments(Precision()) == {"logprobs_mode": "processed_logprobs"}
    told = engine_arguments(Precision(lm_head_dtype="float32"))
    assert told["hf_overrides"] == {"head_dtype": "float32"}


def test_a_worker_that_does_otherwise_is_refused_by_name():
    check_workers([KEPT, KEPT], Precision(), "bfloat16")
    check_workers(
        [KEPT | {"router_dtype": "float32"}], Precision(router_dtype="float32"), "bfloat16"
    )
    for changed, setting, message in (
        ({}, Precision(lm_head_dtype="float32"), r"precision\.lm_head_dtype.*float32.*bfloat16"),
        ({"router_dtype": "bfloat16"}, Precision("model", "float32"), r"precision\.router_dtype"),
        ({"logprobs_mode": "raw_logprobs"}, Precision(), r"precision\.logprobs_mode.*raw"),
        ({}, Precision(batch_invariant=True), r"precision\.batch_invariant.*with on.*rank 0.*off"),
        ({"batch_invariant": "on"}, Precision(), r"precision\.batch_invariant.*with off.*with on"),
        ({"dtype": "float16"}, Precision(), r"model\.dtype.*bfloat16.*rank 1.*float16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            check_workers(
                [KEPT | ({} if "dtype" in changed else changed), KEPT | changed],
                setting,
                "bfloat16",
            )


def test_a_dense_model_has_no_router_to_set():
    config = load(["model=tiny", "runner.run_dir=r", "precision.lm_head_dtype=float32"])
    assert precision(config) == Precision("float32", "model")


ROOT = Path(rlmath.__file__).parent
PLUGIN = ROOT / "engines" / "patches"
PAGE = (PLUGIN / "README.md").read_text(encoding="utf-8")
SECTIONS = {one.splitlines()[0]: one for one in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
ASKED = ("Changes", "Why", "Gain", "Upstream", "Remove when")


def test_every_module_has_a_row_and_a_section():
    modules = {path.name for path in PLUGIN.glob("*.py")} - {"__init__.py"}
    assert modules
    assert {name for name in modules if f"| [`{name}`]({name}) |" in PAGE} == modules
    assert {name for name in modules if any(f"`{name}`" in title for title in SECTIONS)} == modules


def test_every_change_is_described_in_full():
    changes = {title: text for title, text in SECTIONS.items() if not title.startswith("Private")}
    lacking = [
        (title, word)
        for title, text in changes.items()
        for word in ASKED
        if f"- **{word}**:" not in text
    ]
    assert len(changes) >= 7 and not lacking


def test_whatever_register_installs_is_listed():
    """Also what lies in other folders."""
    text = (PLUGIN / "register.py").read_text(encoding="utf-8")
    imported = re.findall(
        r"(?:from|import) (rlmath\.[\w.]+)|\"(rlmath\.engines\.transports[\w.]+_engine)\"",
        text.replace("{_TRANSPORTS}", "rlmath.engines.transports"),
    )
    files = {"".join(one).removeprefix("rlmath.").replace(".", "/") + ".py" for one in imported}
    files = {file for file in files if (ROOT / file).is_file()}
    assert {"device/gloo.py", "engines/transports/shared_memory_engine.py"} <= files
    links = {
        (PLUGIN / link).resolve().relative_to(ROOT).as_posix()
        for link in re.findall(r"^\| \[`[^`]+`\]\(([^)]+)\)", PAGE, flags=re.MULTILINE)
    }
    assert files <= links


def test_links_exist_and_the_version_is_the_locked_one():
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", PAGE) if not link.startswith("http")]
    assert [link for link in links if not (PLUGIN / link).exists()] == []
    (written_for,) = re.findall(r"\*\*vLLM (\S+)\*\*", PAGE)
    locks = (ROOT.parent / "requirements").glob("c*.lock")
    locked = [re.findall(r"^vllm(?:-cpu)?={2,3}(\S+)", lock.read_text(), re.M) for lock in locks]
    assert locked == [[written_for], [written_for]]
