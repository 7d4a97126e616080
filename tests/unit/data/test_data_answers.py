import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmath.data.answers import accepted_answers
from rlmath.data.files import MalformedRowError


@pytest.mark.parametrize(
    ("field", "answers"),
    [
        (["\\boxed{x}"], ("x",)),
        ("\\boxed{\\frac{1}{2}}", ("\\frac{1}{2}",)),
        ("$\\boxed{\\{1, 2\\}}$", ("\\{1, 2\\}",)),
        ("\\fbox{3}", ("3",)),
        ("First \\boxed{2}, no: \\boxed{3}.", ("3",)),
        ("\\boxed{2}, \\boxed{3}", ("2, 3",)),
        ("$x=\\boxed{1}$ and $y=\\boxed{2}$", ("(1, 2)",)),
        ("Say \\boxed{1}.\n\nThen \\boxed{2}.", ("2",)),
        ("$\\boxed{2}$ and $\\boxed{3}$.", ("2, 3",)),
        ("48/2 = <<48/2=24>>24 clips\n#### 72", ("72",)),
        ("so\n#### 1,234", ("1234",)),
        ("so\n#### -1,234,567.5", ("-1234567.5",)),
        ("so\n#### $70,000", ("70000",)),
        ("so\n#### 2,3", ("2,3",)),
        ("(1,234)", ("(1,234)",)),
        ("  x+1 ", ("x+1",)),
        (27.0, ("27",)),
        (-0.0, ("0",)),
        (-2.5e16, ("-25000000000000000",)),
        (6.02e23, ("602" + "0" * 21,)),
        ([1e300, 1e-7], ("1" + "0" * 300, "1e-07")),
        (0.5, ("0.5",)),
        (5, ("5",)),
        (["1/2", "0.5", "1/2"], ("1/2", "0.5")),
        ([3, "\\boxed{4}"], ("3", "4")),
        ('["85"]', ("85",)),
        (' ["1/2", "0.5"] ', ("1/2", "0.5")),
        ("['x']", ("x",)),
        ("[1, 2]", ("[1, 2]",)),
        ("[a]", ("[a]",)),
    ],
)
def test_the_answer_is_cut_out_of_its_field(field, answers):
    assert accepted_answers(field) == answers


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (None, "this is null"),
        (True, "this is a bool"),
        ([], "an empty list"),
        ([["3"]], "this is a list"),
        ({"value": 3}, "this is a dict"),
        ("   ", "no answer in '   '"),
        ("\\boxed{}", "no answer in"),
        ("\\boxed{1", "no answer in"),
        (float("nan"), "no answer in nan"),
        ("NaN", "no answer in 'NaN'"),
        ("null", "no answer in 'null'"),
        ([85, None], "this is null"),
        ('[""]', "no answer in ''"),
        (float("inf"), "the answer is inf"),
    ],
)
def test_a_field_without_an_answer_says_so(field, message):
    with pytest.raises(MalformedRowError, match=message):
        accepted_answers(field)


balanced = st.recursive(
    st.text("xyz0123456789+-^_ ", min_size=1).filter(str.strip),
    lambda inner: st.builds("\\frac{{{}}}{{{}}}".format, inner, inner),
    max_leaves=6,
)


@given(balanced)
def test_boxing_and_unboxing_gives_the_content_back(content):
    assert accepted_answers(f"\\boxed{{{content}}}") == (content.strip(),)


@given(st.integers(1, 10**15 - 1), st.integers(0, 290))
def test_a_float_is_the_number_that_its_file_says(digits, exponent):
    """JSON and parquet hold 6.02e23; a double near it is another integer from 2**53 on."""
    (answer,) = accepted_answers(json.loads(f"{digits}e{exponent}"))
    assert int(answer) == digits * 10**exponent
