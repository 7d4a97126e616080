"""Objects given in Python become settings and files of the run folder."""

import itertools
import threading
from pathlib import Path

import pytest
import torch

from rlmath.algorithms.losses import LOSSES, LossTraits, policy_loss, ppo_clip
from rlmath.api import given as given_module
from rlmath.api.given import PARTS, Given
from rlmath.api.source import import_path, source_hash
from rlmath.config.benchmarks import BENCHMARKS
from rlmath.config.load import load
from rlmath.config.settings import by_key
from rlmath.data.source_stream import first_rows, open_source
from rlmath.errors import UserError
from rlmath.plugins.loading import refresh, use
from rlmath.training.checks.base import StepCheck
from rlmath.utils.setting import Options
from tests.unit.plugins.test_plugin_loading import own_plugins  # noqa: F401


@pytest.fixture
def objects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Given("run")


def in_main(source):
    """Namespace of a script or a notebook cell: no process can import it."""
    namespace = {"__name__": "__main__"}
    exec(compile(source, "cell", "exec"), namespace)
    return namespace["it"]


def test_a_function_of_a_module_is_named(objects):
    objects.rewards([source_hash, ("length", 0.5)])
    assert objects.overrides == [
        "reward.items=[{name: rlmath.api.source:source_hash, weight: 1.0},"
        " {name: length, weight: 0.5}]"
    ]
    assert not Path("run").exists()


def test_a_part_of_rlmath_is_chosen_by_its_name(objects):
    objects.part("loss", ppo_clip)
    objects.part("advantage", "rloo")
    assert objects.overrides == ["algorithm.loss=ppo_clip", "algorithm.advantage=rloo"]


def test_a_function_of_a_script_is_sent_with_what_it_uses(objects):
    reward = in_main(
        "factor = 3\ndef half(x): return factor * len(x) / 2\n"
        "def it(completions, **_): return [half(one) for one in completions]\n"
    )
    objects.rewards([reward])
    # Nothing compares answers, so the math reward is there for the accuracy.
    (line,) = objects.overrides
    assert line == (
        "reward.items=[{name: run/given/it.py:it, weight: 1.0}, {name: math, weight: 0}]"
    )
    loaded = refresh("run/given/it.py").it
    assert loaded is not reward and loaded(["ab"]) == [3.0]


def test_two_functions_of_one_name_are_two_files(objects):
    objects.rewards([lambda completions: [0.0], lambda completions: [1.0]])
    assert sorted(path.name for path in Path("run/given").iterdir()) == [
        "lambda_.py",
        "lambda__2.py",
    ]
    assert refresh("run/given/lambda__2.py").lambda__2([""]) == [1.0]


def test_unpicklable_functions_are_refused_with_the_reason(objects):
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"rewards\[1\]: lambda_ cannot be sent.*'_thread.lock'"):
        objects.rewards(["math", lambda completions: [float(lock.locked())]])
    with pytest.raises(UserError, match="loss is a int"):
        objects.part("loss", 3)


def test_a_loss_of_a_script_is_registered_in_each_process(objects):
    def mine(inputs, options):
        return -inputs.token_advantages(), {}

    objects.part("loss", mine)
    assert objects.overrides == ["algorithm.loss=run/given/mine.py:mine"]
    loaded = refresh("run/given/mine.py").mine
    name, options, _ = LOSSES.registration(loaded)
    assert name == f"mine_{source_hash((mine, Options, None))}" and options is Options
    assert LOSSES.get("run/given/mine.py:mine") is loaded
    # As a loss and not as a function of tokens: what it returns is masked and weighted.
    assert loaded.__wrapped__ is not mine
    LOSSES.remove(name)


def test_options_and_traits_of_a_registered_loss_go_with_it(objects):
    @policy_loss("test_given", Options, LossTraits(bounds_ratio=False))
    def mine(inputs, options):
        return -inputs.token_advantages(), {}

    objects.part("loss", mine)
    loaded = refresh("run/given/mine.py").mine
    name, _, traits = LOSSES.registration(loaded)
    assert not traits.bounds_ratio and LOSSES.name("run/given/mine.py:mine") == name
    LOSSES.remove(name)
    LOSSES.remove("test_given")


def test_the_same_source_keeps_its_file_and_other_source_does_not(objects):
    source = "scale = {}\ndef it(completions, **_): return [scale * 1.0 for _ in completions]\n"
    objects.rewards([in_main(source.format(1))])
    file = Path("run/given/it.py")
    before = file.read_bytes()
    Given("run").rewards([in_main(source.format(1))])
    assert file.read_bytes() == before
    # A constant that it uses is part of its source.
    with pytest.raises(KeyError), (again := Given("run")).restoring():
        again.rewards([in_main(source.format(2))])
        assert file.read_bytes() != before
        raise KeyError
    assert file.read_bytes() == before, "a refused resume leaves the run what it was made with"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def it(): return 1", "def it(): return 2"),
        ("def f(): return 1\ndef it(): return f()", "def f(): return 2\ndef it(): return f()"),
        ("def it(a=1): return a", "def it(a=2): return a"),
        ("def make(n):\n def it(): return n\n return it\nit = make(1)",
         "def make(n):\n def it(): return n\n return it\nit = make(2)"),
        ("class A:\n x = 1\n def __call__(self): return 1\nit = A()",
         "class A:\n x = 2\n def __call__(self): return 1\nit = A()"),
        ("class A:\n def __init__(self, n): self.n = n\n def __call__(self): return 1\nit = A(1)",
         "class A:\n def __init__(self, n): self.n = n\n def __call__(self): return 1\nit = A(2)"),
        ("import torch\nt = torch.ones(2)\ndef it(): return t",
         "import torch\nt = torch.zeros(2)\ndef it(): return t"),
    ]
)  # fmt: skip
def test_the_hash_follows_source_constants_and_state(one, other):
    first = source_hash(in_main(one))
    assert first == source_hash(in_main(one))
    assert first != source_hash(in_main(other))


def test_only_what_other_processes_can_import_has_a_path():
    assert import_path(torch.nn.functional.relu) == "torch.nn.functional:relu"
    assert import_path(source_hash) == "rlmath.api.source:source_hash"
    assert import_path(lambda: 0) is None
    assert import_path(in_main("def it(): pass")) is None
    assert import_path(test_only_what_other_processes_can_import_has_a_path) is not None


def test_rows_are_a_file_of_the_run_and_a_generator_is_read_to_its_end(objects):
    objects.rows(
        "data", "data.train_paths", ({"q": f"{i} ü", "n": torch.tensor(i)} for i in (1, 2))
    )
    assert objects.overrides == ["data.train_paths=[run/given/data.jsonl]"]
    assert (
        Path("run/given/data.jsonl").read_text() == '{"q": "1 ü", "n": 1}\n{"q": "2 ü", "n": 2}\n'
    )


def failing():
    yield {"q": 1}
    raise KeyError("the database has gone")


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], UserError, "data has no rows"),
        (["1+1"], UserError, "row 1 is a str"),
        ("train.jsonl", UserError, "data is a str"),
        ([{"a": 1}, {"a": object()}], UserError, "row 2 .* object"),
        (failing(), KeyError, "database"),
    ],
)
def test_rows_that_are_none(objects, rows, error, message):
    with pytest.raises(error, match=message):
        objects.rows("data", "data.train_paths", rows)
    assert not Path("run/given/data.jsonl").exists()


@pytest.mark.parametrize("argument", [name for name, part in PARTS.items() if not part.several])
def test_each_part_of_a_script_is_registered_where_its_file_is_imported(
    objects,
    argument,
    own_plugins,  # noqa: F811
):
    part = PARTS[argument]
    assert part.setting in by_key()
    objects.part(argument, in_main("def it(*_, **__): return 7"))
    assert objects.overrides[0] == f"{part.setting}=run/given/it.py:it"
    found = part.names().get("run/given/it.py:it")
    assert argument == "loss" or found() == 7
    objects.part(argument, "of_a_file.py:it")
    assert f"{part.setting}=of_a_file.py:it" in objects.overrides


@pytest.mark.parametrize("argument", [name for name, part in PARTS.items() if part.several])
def test_lists_of_parts(objects, argument, own_plugins):  # noqa: F811
    part = PARTS[argument]
    assert part.setting in by_key()
    before = part.names().names()
    objects.part(argument, [in_main("class it:\n x = 7")])
    (line,) = objects.overrides
    if part.setting == "plugins":
        assert line == "plugins=[run/given/it.py]"
        use("run/given/it.py")
    else:
        name = '{name: "run/given/it.py:it"}' if argument == "benchmarks" else "run/given/it.py:it"
        assert line == f"{part.setting}=[{name}]"
        assert part.names().get("run/given/it.py:it").x == 7
    (new,) = set(part.names().names()) - set(before)
    assert part.names().get(new).x == 7
    with pytest.raises(UserError, match=f"{argument} is a function; give a list"):
        objects.part(argument, lambda: None)
    with pytest.raises(UserError, match=rf"{argument}\[1\] is a int; give a function or class"):
        objects.part(argument, ["math", 3])


def test_plugins_of_the_settings_stay_and_those_of_several_kinds_are_one_list(
    monkeypatch,
    tmp_path,
    own_plugins,  # noqa: F811
):
    monkeypatch.chdir(tmp_path)
    given = Given("my run", ["my_pkg", "a b.py"])
    given.part("step_checks", [in_main("class it:\n pass")])
    given.part("families", ["other_pkg", in_main("class it:\n pass")])
    assert given.overrides == [
        "plugins=[my_pkg, a b.py, my run/given/it.py, other_pkg, my run/given/it_2.py]"
    ]
    with pytest.raises(UserError, match=r"StepCheck is not registered.*@STEP_CHECKS\.register"):
        given.part("step_checks", [StepCheck])


def test_a_benchmark_is_given_with_its_settings(objects, own_plugins):  # noqa: F811
    products = BENCHMARKS.register("mine", Options)(in_main("def it(options): return []"))
    settings = {"samples": 2, "temperature": 0.5, "options": {"largest": 3, "kind": "a b"}}
    objects.part("benchmarks", ["aime24", (products, settings)])
    (line,) = objects.overrides
    assert line.endswith('options: {largest: 3, kind: "a b"}}]')
    line = line.replace('{largest: 3, kind: "a b"}', "{}")  # It has no such options.
    first, second = load(["model.path=m", "runner.run_dir=r", line]).eval.benchmarks
    assert first.name == "aime24" and second.name == "run/given/it.py:it"
    assert (second.samples, second.temperature) == (2, 0.5)


ENDLESS = """
class it:
    def __init__(self): self.row = 0
    def __iter__(self):
        while True:
            self.row += 1
            yield {"q": f"{self.row}+1=", "a": str(self.row + 1)}
    def state_dict(self): return {"row": self.row}
    def load_state_dict(self, state): self.row = state["row"]
"""


def test_rows_that_can_say_where_they_are_are_taken_as_needed(
    objects,
    own_plugins,  # noqa: F811
):
    rows = in_main(ENDLESS)()
    next(iter(rows))
    objects.rows("data", "data.train_paths", rows)
    assert objects.overrides == ["data.source=run/given/it.py:it", "data.train_paths=[]"]
    config = load(["model.path=m", "runner.run_dir=r", *objects.overrides])
    for _ in range(2):  # It begins where it was given, each time that it is made.
        assert [one.fields["q"] for one in first_rows(config.data, 2)] == ["2+1=", "3+1="]
    source = open_source(config.data)
    source.load_state_dict({"row": 7})
    assert next(iter(source))["a"] == "9"


@pytest.mark.parametrize("key", ["data.train_paths", "data.eval_paths"])
def test_rows_without_end_are_refused_with_what_to_do(objects, key, monkeypatch):
    monkeypatch.setattr(given_module, "MOST_ROWS", 3)
    objects.rows("data", key, [{"q": 1}] * 3)
    before = Path("run/given/data.jsonl").read_text()
    with (
        pytest.raises(UserError, match="data has more than 3 rows, or no end") as caught,
        objects.restoring(),
    ):
        objects.rows("data", key, ({"q": one} for one in itertools.count()))
    assert ("state_dict" in str(caught.value)) == (key == "data.train_paths")
    assert Path("run/given/data.jsonl").read_text() == before
