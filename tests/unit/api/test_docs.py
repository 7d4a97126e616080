"""The public API is a list that is current, and its library needs neither Ray nor Megatron."""

import json
import re
import sys

import pytest

from tests.support.program_answers import output_of
from tests.unit.documented import ROOT
from toolkits.pages import api as docs

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def test_the_page_is_current():
    assert docs.API_PAGE.read_text(encoding="utf-8") == docs.api_page(), (
        "run python -m toolkits.pages.api"
    )


@pytest.mark.parametrize("module", docs.PUBLIC)
def test_every_public_name_is_there_with_a_docstring(module):
    names = docs.public_names(module)
    assert names
    for name in names:
        value = getattr(sys.modules[module], name)
        if callable(value) and value.__module__.startswith("rlmath"):
            assert value.__doc__, f"{module}.{name} has no docstring"


@pytest.mark.process
def test_examples_of_the_library_run_without_ray_or_megatron():
    library = BLOCK.findall(PAGE.partition("## The library")[2])
    assert len(library) == 4
    heavy = {"ray", "megatron", "vllm", "hydra", "omegaconf", "transformers"}
    program = "\n".join([
        *library, "import sys", f"print(sorted({heavy!r} & set(sys.modules)))"
    ])  # fmt: skip
    assert output_of(program) == "[]\n"


@pytest.mark.process
def test_run_is_imported_when_it_is_asked_for():
    program = (
        "import sys, rlmath\n"
        "assert 'rlmath.api' not in sys.modules and 'torch' not in sys.modules\n"
        "from rlmath import Run\n"
        "assert 'rlmath.api' in sys.modules\n"
        "assert 'ray' not in sys.modules and 'vllm' not in sys.modules\n"
        "assert not hasattr(rlmath, 'Nothing')\n"
    )
    output_of(program)


def test_the_example_is_the_same_everywhere():
    example, definitions, *_ = BLOCK.findall(PAGE)
    assert example in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(example.splitlines()) <= 12
    notebook = json.loads((ROOT / "examples" / "run.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(one["source"]) for one in notebook["cells"] if one["cell_type"] == "code"]
    assert cells[0] == definitions.rstrip("\n")
    assert "\n".join(cells[1:]) == example.rstrip("\n")
    assert not any(one.get("outputs") for one in notebook["cells"])
