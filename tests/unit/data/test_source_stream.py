"""Training problems from a user's data source: each row once, in order, also over a resume."""

import pytest

from rlmath.checks.files import data_files
from rlmath.checks.overview import describe_training
from rlmath.checks.prompt_style import with_prompt_style
from rlmath.checks.trial import trial
from rlmath.config.load import load
from rlmath.data import DATA_SOURCES, ProblemStream
from rlmath.data.light_tokenizer import LightTokenizer
from rlmath.data.mixture import MixedStream
from rlmath.data.source_stream import SourceStream
from rlmath.errors import UserError
from rlmath.training.problems import open_problems
from tests.unit.plugins.test_plugin_loading import EXAMPLES, GIVEN, own_plugins  # noqa: F401

SUMS = [f"data.source={EXAMPLES}/data_source.py:Sums", "data.source_options.slower=3"]


@pytest.fixture
def config(own_plugins):  # noqa: F811
    return load([*GIVEN, *SUMS, "reward.fallback=number"])


class Finite:
    """Three rows; the second is malformed, and the third too long in the first epoch."""

    def __init__(self, options):
        self.row, self.epoch = 0, 0

    def __iter__(self):
        while self.row < 3:
            self.row += 1
            prompt = {1: "1+1=", 2: None, 3: "7" * (40 if self.epoch == 0 else 4)}[self.row]
            yield {"id": f"row {self.row}", "prompt": prompt, "solutions": ["2"]}
        self.row, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def ids(problems):
    return [one.id for one in problems]


def finite(*overrides):
    if "finite_of_test" not in DATA_SOURCES.names():
        DATA_SOURCES.register("finite_of_test")(Finite)
    given = ["data.source=finite_of_test", "data.max_prompt_tokens=8", *overrides]
    return SourceStream(load([*GIVEN, *given]).data, LightTokenizer("tiny"))


def test_check_reads_its_first_rows(config):
    config.model.path = "tiny"
    lines = "\n".join(trial(with_prompt_style(config, "train"), "train"))
    assert "longest of 64 checked prompts: 8 tokens" in lines and "answers  " in lines
    assert f"data.source: {config.data.source} (slower 3)" in describe_training(config)


def test_rows_become_problems_and_the_first_ones_are_looked_at(config, capsys):
    assert not [one for one in data_files(config, "train") if "data." in one]
    stream, looked_at = open_problems(with_prompt_style(config, "train"), LightTokenizer("tiny"))
    assert "the first 64 of 64 rows kept" in capsys.readouterr().out
    first = stream.next(3)
    assert ids(first) == ["Sums:1", "Sums:2", "Sums:3"] == ids(list(looked_at))[:3]
    assert first[0].answers == (str(eval(first[0].prompt.removesuffix("="))),)
    assert first[0] == stream["Sums:1"] and "Sums:4" not in stream


def test_a_resumed_stream_continues_at_the_same_row_with_what_was_in_use(config):
    tokenizer = LightTokenizer("tiny")
    straight, first, second = (SourceStream(config.data, tokenizer) for _ in range(3))
    wanted = straight.next(12)
    assert first.next(5) == wanted[:5]
    state = first.snapshot(["Sums:2"])()
    assert "Sums:2" in first and "Sums:3" not in first
    first.next(1)  # The state is that of the moment at which it was taken.
    for _ in range(2):
        second.load_state_dict(state)
    assert second["Sums:2"] == wanted[1]
    assert second.next(7) == wanted[5:]


def test_a_finite_source_begins_again_and_unusable_rows_are_left_out(own_plugins):  # noqa: F811
    stream = finite("data.malformed_rows=skip")
    names = [one.rpartition(" ")[2] for one in ids(stream.next(4))]
    assert names == ["1", "1", "3", "1"]
    assert len(stream) == 3
    other = finite("data.malformed_rows=skip")
    other.load_state_dict(stream.state_dict())
    assert ids(other.next(2)) == ids(stream.next(2))
    with pytest.raises(UserError, match=r"finite_of_test:row 2: field 'prompt'"):
        finite().next(2)
    with pytest.raises(UserError, match=r"row 3: 40 tokens, data\.max_prompt_tokens=8"):
        finite("data.malformed_rows=skip", "data.overlong_prompts=stop").next(2)


def test_a_source_without_usable_rows_ends_with_an_error(own_plugins):  # noqa: F811
    class Empty(Finite):
        def __iter__(self):
            yield from ()

    class Bad(Finite):
        def __iter__(self):
            while True:
                yield {"prompt": "1" * 50, "solutions": ["1"]}

    class Odd(Finite):
        def __iter__(self):
            yield {"prompt": "1", "solutions": {1}}

    for kind, message in ((Empty, "no rows"), (Bad, "1000 rows in a row"), (Odd, "JSON has not")):
        DATA_SOURCES.register(kind.__name__)(kind)
        config = load([*GIVEN, f"data.source={kind.__name__}", "data.max_prompt_tokens=8"])
        with pytest.raises(UserError, match=message):
            SourceStream(config.data, LightTokenizer("tiny")).next(1)


def test_a_place_in_other_data_is_refused(config):
    stream = SourceStream(config.data, LightTokenizer("tiny"))
    problems = stream.next(2)
    files, mixed = ProblemStream(problems), MixedStream([problems], [1.0])
    for one in (files, mixed):
        with pytest.raises(UserError, match=r"data\.source was .*Sums and is null"):
            one.load_state_dict(stream.state_dict())
        with pytest.raises(UserError, match=r"data\.source was null and is .*Sums"):
            stream.load_state_dict(one.state_dict())


def test_settings_that_a_source_does_not_read_are_errors(own_plugins):  # noqa: F811
    given = [*GIVEN, *SUMS, "data.train_paths=[a.jsonl]", "data.shuffle=false", "data.prompt_key=q"]
    found = "\n".join(data_files(load(given), "train"))
    assert "data.train_paths=['a.jsonl'] would not be read" in found
    assert "data.shuffle=false: does nothing" in found
    assert "data.prompt_key=q: Sums:1 has no such field" in found
