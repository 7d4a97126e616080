"""Long responses without a box: prose, and text made to cost the search for an answer much time.

RESPONSES   the 24 of earlier measurements
FLOODS      one unit, over and over, and ENDED with an end that is read
ENDINGS     what follows prose and fills the few hundred characters that are read
MARKED      an answer after "answer is" or in a tag, and what may take it back
"""

from __future__ import annotations

STEP = "The sum of the first 12 terms is $x^2+3x = 40$, so x = 5 or x = -8. We continue with 7.\n"
RESPONSES = (
    STEP * 400 + "Therefore there are 42 apples.",
    "word " * 6_000 + "so there are 42 apples",
    "我们计算得到。" * 2_000 + "所以一共有42个苹果。",
    STEP * 400 + "so $x=42$",
    "word " * 8_000,
    "a." * 20_000 + "42",
    "(" * 40_000,
    "$" * 40_000,
    "1," * 20_000,
    "5 because " * 4_000,
    "nswer" * 8_000,
    "word\n" * 6_000 + "Ответ" + " " * 190 + "1?",
    "word\n" * 6_000 + "la respuesta" + " " * 186 + "1?",
    "$a=1,~~b=2$ " * 2_500 + "so x=42",
    "~~5~~ " * 5_000,
    "~~\\boxed{5}~~ " * 2_300,
    "= 5 " * 7_500,
    "5-" * 15_000,
    "\\(" * 15_000 + "5",
    "It is 6 " * 4_000,
    "5 = 5 in 3 " * 2_800,
    "(5, " * 7_500,
    "<|x|>" * 6_000 + "5",
    "he has 5 apples, she has 6 apples. " * 850,
)

FLOODS = (
    "7", "1234567 ", "1.1", "\\", "$ 5 ", "$5$", "{", "}", "{5}", "x = ", "=5", "#", "一", "一5",
    "は5です", " ", "\n", "5\n", "\t5", "\\boxed{", "\\boxed{5 ", "\\boxedtext", "\\boxedtext 5 ",
    "<", "<|", "5? ", "5! ", "5. ", "A. 5 ", "Option A ", "A B C D ", "A5", "so 5 ", "not 5 ",
    "the total is 5, ", "5 and ", "5 or 6 ", "if 5 then ", "\\frac{1}{2} ", "\\frac{1}{2}",
    "\\[ 5 \\]\n", "\\(5\\) ", "$$ 5 ", "$$x=5$$\n", "- 5 ", "1 + 1 = 2, ", "x y z = 5 ", "✓5 ",
    "é5 ", "الجواب 5 ", "respuesta 5 ", "la respuesta es 5\n", "**5** ", "`5` ", "\"5\" ", "[5, ",
    "(5) ", "~", "~5 ", "5% ", "5/", "1,234,", "1,111", "5e5", "5 ≈ ", "5 \\approx ", "let's 5 ",
    "boxed nailed 5 ", "5 because it is 5, as 5 is 5 ", "5, where ", "is 5 (where x ",
    "x = 5, where x = 5 ", "5 rather than ", "5 unless ", "5 or more ", "5 percent of x ",
    "5 only when n is ", "5 for ", "5 in ", "5 at ", "which gives 5 ", "therefore 5 ", "５",
    "５ = ", "5\u0338", "5\u00a0", "\b5", "\boxed", "5\u200b", "x = 5\r\n", "It is 5. ", "-> 5 ",
    "=> 5 ", "x = 5\n", "- 5\n", "x: 5 ", "Total: 5 ", "Total: 5\n", "5 times ", "minus 5 ",
    "5 million ", "5cm ", "5th ", "the 5th term ", "5i",
    "he has 5 apples and she has 6 apples and ", "isn't 5 ", "> 5 ", "|5| = ", "x_{5}",
)  # fmt: skip
ENDED = (
    ("\\", " so x = 5"), ("a = b = ", "5"), ("一", "5"), ("\\fboxx\\boxedx ", "so x = 5"),
    ("</s>", "5"), ("is ", "5"), (",", "5"), ("x, ", "5"), ("a b ", "5"),
    ("suppose that $ ", "5"), ("that \\alpha\\beta.\n", "So it is 5."), ("\\alpha", "5"),
    ("\\text{", "5"), ("\\[", "5"), ("-", "5"), ("1 + ", "1 = 5"), ("2 * 3 = 6 * ", "5"),
    ("_", "5"), ("*", "5"), ("[", "5"), ("f(5) = ", "5"), ("5 / ", "5"), ("running ", "is 5"),
    ("gives ", "5"), ("sold sold the ", "5"), ("key says the key ", "is 5"), ("of the of ", "5"),
    ("<think>", "</think> so x = 5"), ("</think>", "5"), ("Ab. ", "It is 5."),
    ("Mr. ", "It is 5"), ("a. b. ", "is 5"), ("n't", "5"), ("a'a", "5"), ("'", "5"), ("=-", "5"),
    ("2^", "5"), ("1{,}", "5"),
)  # fmt: skip
ENDINGS = (
    "x" + "\\(" * 190 + "5",
    "<|" * 3_990 + "a|> x = 5",
    ("<|" + "a" * 41) * 180 + "|> x = 5",
    "$" + "1+" * 990 + "1=5$",
    "$" + "5=" * 990 + "5$",
    "$" + "x+" * 990 + "y=5$",
    "$" + "\\alpha+" * 250 + "y=5$",
    "+" * 398 + "\n" + "=5" * 190 + "= 5",
    "suppose " + "+" * 380 + "\n" + "x " * 190 + "= 5",
    "let " + "+" * 390 + "\n$$" + "+" * 190 + "= 5$$",
    "x " * 200 + "= 5" + " x" * 200,
    "(" * 400 + "x = 5" + " )" * 200,
    "+ " * 190 + " x = 5 " + "+ " * 190 + ". " + "done. " * 66,
    "+ " * 190 + " x = 5 " + "+ " * 190 + ".\n" + "s!" * 200,
    "x = " * 95 + " 5.\n" + "- x\n" * 100,
    "x = " * 95 + " 5." + "\n" * 400,
    "x = " * 95 + " 5" + ".\n" * 200,
    "so it is " * 43 + "5",
    "that $" + "$" * 390 + ". It is 5.",
    "that " + "\\a{b}" * 78 + ". So it is 5.",
    "so x" + " " * 390 + "= 5",
    "~~5~~ " * 24 + "x = 5",
    "(ab cd " * 60 + "5",
    "x " * 200 + "(" + "ab cd " * 19 + "5",
    "x = " + "[(" * 190 + "5",
    "= " + "1/2 / " * 65 + "1/2",
    ("= 5" + " in" * 12 + " 5 ") * 12 + "in",
    "is 5, where 5, which 5, when 5 " * 19,
    "Option A or choice B is correct, so option C holds " * 9,
    "A B " * 150 + "option",
    "select " * 85 + "A",
    "respuesta respuesta respuesta " * 6 + " 5",
    "xs xd xg " * 45 + "is 5",
    " ".join(chr(0x100 + index) for index in range(200)) + " is 5",
    "old value test key given goal is " * 12 + "5",
    "isn't that " * 36 + "5",
    "one of any of all of " * 19 + "is 5",
    "the answer answer result is " * 14 + "5",
    "x plus minus times " * 20 + "is 5",
)
MARKED = (
    "the answer is " * 2_900,
    "the answer is 5 " * 2_500,
    "The answer is 5. " * 2_400,
    "答案是5。" * 4_000,
    "#### 5\n" * 6_000,
    "<answer>" * 5_000 + "5",
    "<answer>5</answer>" * 2_300,
    "The answer is " + "1+" * 190 + "5",
    "so " * 130 + "the answer is 5",
    "The answer is 5. " + STEP * 20,
    "The answer is 5. " + "5. " * 500,
    "The answer is 5. " + "so 5 " * 300,
    "The answer is 5. " + "It is 5. " * 170,
    "The answer is 5.\n" + "Total: 5\n" * 170,
    "The answer is 5.\n\n" + "The sum.\n\n" * 160,
    "The answer is 5. " + "because we have it, " * 80,
    "The answer is 5. " + "should should " * 110,
    "The answer is 5. " + "wait " * 8_000,
)


def unmarked() -> list[str]:
    """All kinds without an announced answer, 30 kB or more of each."""
    floods = [(unit, "") for unit in FLOODS] + list(ENDED)
    return [
        *RESPONSES,
        *(unit * (40_000 // len(unit)) + end for unit, end in floods),
        *(STEP * 400 + ending for ending in ENDINGS),
    ]


def marked() -> list[str]:
    """All kinds with an announced answer."""
    return [text if len(text) > 20_000 else STEP * 330 + text for text in MARKED]


def last_bytes(text: str, size: int) -> str:
    """About the last `size` bytes of a text."""
    return text[-size // (1 if text.isascii() else 3) :]
