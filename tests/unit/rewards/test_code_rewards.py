"""Code rewards with real programs in the local sandbox, and over a Piston-compatible server."""

import json
import shutil
import subprocess
import sys

import pytest

from rlmath.rewards import RewardSettingError, get_reward
from rlmath.rewards.ioi_code import with_includes
from rlmath.rewards.program_tests import extract_code, same_output
from rlmath.rewards.sandbox import CodeProvider, Limits, Program, ProviderError, get_provider
from rlmath.rewards.sandbox.cloud import build_script, read_reply
from tests.support.http_server import serve

pytestmark = pytest.mark.process

needs_cpp = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


@pytest.fixture(scope="module")
def local():
    return get_provider("local", max_parallel=2)


def fence(code, language="python"):
    return f"<think>\nhm\n</think>\nHere it is:\n```{language}\n{code}\n```\n"


ADD = "a, b = map(int, input().split())\nprint(a + b)"
TESTS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6\n", "output": "11"}]
INFO = {"language": "python", "test_cases": TESTS}


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        ("3", "3\n\n", True),
        ("a  \nb\t\n", "a\nb", True),
        ("a\r\nb\r\n", "a\nb\n", True),
        ("", "", True),
        ("\n\n", "", True),
        ("1\n2", "1\n2\n3", False),  # a prefix
        ("1\n2\n3", "1\n2", False),  # more than asked
        ("", "1", False),
        ("1", "", False),
        ("1 2", "1  2", False),
        ("\n1", "1", False),
        (" 1", "1", False),
        ("1\n\n2", "1\n2", False),
    ],
)
def test_output_is_compared_in_full(printed, expected, same):
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("text", "language", "code"),
    [
        (fence("x = 1"), "python", "x = 1\n"),
        ("```python\na\n```\n```python\nb\n```", "python", "b\n"),
        ("```py\na\n```", "python", "a\n"),
        ("```Python3\na\n```", "python", "a\n"),
        ("```cpp\nint a;```", "cpp", "int a;"),
        ("```c++\na\n```", "cpp", "a\n"),
        ("```cpp\na\n```", "c", None),
        ("```python\na\n```\n</think>\nno code", "python", None),
        ("```python\na\n```\n```python\nb", "python", "a\n"),
        ("```python\na", "python", None),
        ("no code", "python", None),
        ("```\na\n```", "python", None),
    ],
)
def test_the_last_closed_block_after_the_reasoning_counts(text, language, code):
    assert extract_code(text, language) == code


def test_code(local):
    reward = get_reward("code", provider=local)
    half = "a, b = map(int, input().split())\nprint(3)"
    texts = [fence(ADD), fence(half), "no program", fence("1/0"), fence("def f(:")]
    assert reward(texts, verification_info=[INFO] * 5) == [1.0, 0.5, 0.0, 0.0, 0.0]
    chats = [[{"role": "assistant", "content": fence(ADD)}]]
    assert reward(chats, verification_info=[json.dumps(INFO)]) == [1.0]


def test_code_that_prints_a_prefix_does_not_pass(local):
    reward = get_reward("code", provider=local)
    info = {"language": "python", "test_cases": [{"input": "", "output": "1\n2\n3\n"}]}
    texts = [
        fence(c)
        for c in (
            "pass",
            "print(1)",
            "print(1); print(2)",
            "for i in range(4): print(i + 1)",
            "print('1\\n2\\n3')",
            "print('1\\n2\\n3'); raise SystemExit(1)",
        )
    ]
    assert reward(texts, verification_info=[info] * 6) == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def test_code_without_tests_cannot_be_scored(local):
    reward = get_reward("code", provider=local)
    other = {"language": "python", "test_cases": [{"type": "function_call", "input": "1"}]}
    infos = [
        None,
        {"language": "python", "test_cases": []},
        other,
        {"language": "cobol", "test_cases": TESTS},
    ]
    texts = [fence(ADD)] * 3 + [fence("x", "cobol")]
    assert reward(texts, verification_info=infos) == [None] * 4
    assert reward.drain_metrics()["provider_errors"] == 1.0
    with pytest.raises(RewardSettingError, match="'verification_info' is missing"):
        reward(texts)
    with pytest.raises(RewardSettingError, match="is no JSON object"):
        reward(texts[:1], verification_info=["{"])


def test_binary_code(local):
    reward = get_reward("binary_code", provider=local)
    half = fence("a, b = map(int, input().split())\nprint(3)")
    infos = [INFO, INFO, None]
    assert reward([fence(ADD), half, half], verification_info=infos) == [1.0, 0.0, None]


class Broken(CodeProvider):
    def prepare(self, program, limits):
        raise ProviderError("out of order")


def test_a_provider_that_fails_is_none_and_not_zero():
    columns = {
        "verification_info": [INFO],
        "official_tests": [TESTS],
        "language": ["python"],
        "test_cases": [[("", "")]],
        "id": ["x"],
    }
    for name in ("code", "binary_code", "cf_code", "ioi_code"):
        with get_reward(name, provider=Broken()) as reward:
            language = "cpp" if name == "ioi_code" else "python"
            assert reward([fence("x", language)], **columns) == [None]
            assert reward.drain_metrics()["provider_errors"] == 1.0


@pytest.mark.parametrize(
    ("mode", "right", "half"),
    [("pass_fail", 1.0, 0.0), ("partial", 1.0, 0.5), ("weighted_sum", 1.1, 0.05)],
)
def test_cf_code(local, mode, right, half):
    reward = get_reward("cf_code", provider=local, scoring_mode=mode)
    wrong = fence("a, b = map(int, input().split())\nprint(3)")
    got = reward(
        [fence(ADD), wrong, "none", fence(ADD)],
        official_tests=[TESTS[:1]] * 3 + [[]],
        generated_tests=[TESTS[1:]] * 3 + [None],
        language=["python"] * 4,
        time_limit=[1.0] * 4,
        memory_limit=[256.0] * 4,
    )
    assert got == [pytest.approx(right), pytest.approx(half), -1.0, None]


def test_cf_code_with_a_checker(local):
    checker = (
        "import sys\n"
        "given, correct, printed = (open(p).read().split() for p in sys.argv[1:])\n"
        "print(int(sorted(correct) == sorted(printed)))\n"
    )
    reward = get_reward("cf_code", provider=local, scoring_mode="pass_fail")
    answers = ["print('b a')", "print('a c')", "open('correct_output.txt').read()"]
    got = reward(
        [fence(a) for a in answers],
        official_tests=[[{"input": "", "output": "a b"}]] * 3,
        language=["python"] * 3,
        generated_checker=[checker] * 3,
    )
    assert got == [1.0, 0.0, 0.0], "any order is right; the submission cannot see the answer"


def test_cf_code_with_files(local):
    source = "x = int(open('input.txt').read())\nopen('output.txt', 'w').write(str(2 * x))"
    reward = get_reward("cf_code", provider=local, scoring_mode="partial")
    tests = [{"input": "4", "output": "8"}]
    assert reward(
        [fence(source), fence("print(8)")],
        official_tests=[tests] * 2,
        language=["python"] * 2,
        input_mode=["file"] * 2,
    ) == [1.0, 0.0]


@needs_cpp
def test_cf_code_that_does_not_compile(local):
    reward = get_reward("cf_code", provider=local)
    good = "#include <iostream>\nint main(){int a,b;std::cin>>a>>b;std::cout<<a+b;}"
    got = reward(
        [fence(good, "cpp"), fence("int main( {", "cpp")],
        official_tests=[TESTS] * 2,
        language=["cpp"] * 2,
    )
    assert got == [pytest.approx(1.1), -0.1]


# Naming the header keeps it from being added: to compile it takes seconds.
CHEAP = "// without #include <bits/stdc++.h>\n#include <cstdio>\n"


@needs_cpp
def test_ioi_code(local):
    reward = get_reward("ioi_code", provider=local)
    source = CHEAP + 'int main(){int a,b;scanf("%d%d",&a,&b);printf("%d",a>4?3:a+b);}'
    cases = [("1 2", "3"), ("5 6", "11"), ("1 1", "2")]
    got = reward(
        [fence(source, "cpp"), "none", fence(source, "cpp")],
        id=["sum"] * 3,
        test_cases=[cases, cases, []],
        time_limit=[1.0] * 3,
        memory_limit=[256 * 2**20] * 3,
        score_precision=[2] * 3,
    )
    assert got == [0.0, 0.0, None], "the least score of the tests counts"


@needs_cpp
def test_ioi_code_with_the_problems_own_package(local):
    compile_script = "g++ -o solution graders/grader.cpp graders/half.cpp\n"
    run_script = (
        "./solution < input.txt > out.txt\n"
        "if cmp -s out.txt correct_output.txt; then echo 1.0; else echo 0.256; fi\n"
        "echo feedback >&2\n"
    )
    grader = (
        '#include "half.h"\n#include <cstdio>\n'
        'int main(){int x;scanf("%d",&x);printf("%d",half(x));}\n'
    )
    files = [
        ("compile", compile_script),
        ("run", run_script),
        ("graders/grader.cpp", grader),
        ("graders/half.h", "int half(int);\n"),
        ("checkers/unused", None),
    ]
    reward = get_reward("ioi_code", provider=local)
    got = reward(
        [fence(CHEAP + "int half(int x){return x < 10 ? x / 2 : 4;}", "cpp")],
        id=["Half"],
        test_names=[["t1", "t2"]],
        test_cases=[{"t2": ("20", "10"), "t1": ("8", "4")}],
        grader_files=[files],
        time_limit=[1.0],
        memory_limit=[256 * 2**20],
        score_precision=[2],
    )
    assert got == [0.26]


def test_missing_includes_are_added():
    plain = with_includes("int x;", "half.h").splitlines()
    assert plain == [
        "#include <bits/stdc++.h>",
        '#include "half.h"',
        "using namespace std;",
        "int x;",
    ]
    whole = '#include <bits/stdc++.h>\n#include "half.h"\nstd::string s;'
    assert with_includes(whole, "half.h") == whole


def piston(provider):
    """A server with Piston's protocol that runs the programs in the local sandbox."""

    def answer(exchange):
        body = exchange.body
        main, *others = body["files"]
        program = Program(
            body["language"],
            main["content"],
            args=tuple(body["args"]),
            files={f["name"]: f["content"] for f in others},
        )
        limits = Limits(cpu_s=1, wall_s=body["run_timeout"] / 1000)
        with provider.prepare(program, limits) as prepared:
            if prepared.compile_error is not None:
                exchange.reply({"compile": {"code": 1, "stderr": prepared.compile_error}})
                return
            result = prepared.run(body["stdin"])
        killed = result.status == "timeout"
        exchange.reply(
            {
                "language": body["language"],
                "version": "1",
                "run": {
                    "stdout": result.stdout,
                    "stderr": result.stderr,
                    "code": None if killed else result.exit_code,
                    "signal": "SIGKILL" if killed else None,
                    "status": "TO" if killed else None,
                },
            }
        )

    return answer


def test_code_over_piston(local):
    with serve(piston(local)) as server:
        settings = {"endpoints": server.url.removesuffix("/reward") + "/api/v2", "backoff_s": 0.01}
        reward = get_reward("code", provider="piston", provider_settings=settings, cpu_s=1)
        texts = [fence(ADD), fence("print(3)"), fence("1/0")]
        assert reward(texts, verification_info=[INFO] * 3) == [1.0, 0.5, 0.0]
        once = {"language": "python", "test_cases": TESTS[:1]}
        assert reward([fence("while True: pass")], verification_info=[once]) == [0.0]
        request = server.requests[0]
        assert (request["language"], request["version"]) == ("python", "*")
        assert request["files"][0]["name"] == "main.py" and request["stdin"] == "1 2\n"
        assert request["run_timeout"] == 5000 and request["run_memory_limit"] == 512 * 2**20
        cf = get_reward("cf_code", provider="piston", provider_settings=settings)
        if shutil.which("g++"):
            bad = fence("int main( {", "cpp")
            assert cf([bad], official_tests=[TESTS], language=["cpp"]) == [-0.1]
        file_mode = cf(
            [fence(ADD)], official_tests=[TESTS], language=["python"], input_mode=["file"]
        )
        assert file_mode == [None], "Piston brings no files back"


def test_piston_without_an_address(monkeypatch):
    monkeypatch.delenv("PISTON_ENDPOINTS", raising=False)
    with pytest.raises(RewardSettingError, match=r"set provider_settings\.endpoints or PISTON"):
        get_reward("code", provider="piston")
    monkeypatch.setenv("PISTON_ENDPOINTS", "http://localhost:1/api/v2, http://localhost:2/api/v2")
    assert get_provider("piston").max_parallel == 2


def in_the_cloud(program, stdin=""):
    """Run here what E2B and Morph would run: the script is plain Python."""
    limits = Limits(cpu_s=1, wall_s=10.0, output_kib=64)
    script, mark = build_script(program, limits, stdin, {"extra.txt": "e"})
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True)
    return read_reply("noise\n" + done.stdout, mark, limits)


def test_the_script_for_rented_sandboxes():
    ok, error = in_the_cloud(
        Program("python", "print(input(), open('extra.txt').read())"), "héllo\n"
    )
    assert (ok.status, ok.stdout, error) == ("ok", "héllo e\n", None)
    files = Program("python", "open('o', 'w').write('x')", collect=("o", "p"))
    assert in_the_cloud(files)[0].files == {"o": "x"}
    failed, _ = in_the_cloud(Program("python", "import sys; print('rlmath-:{}'); sys.exit(2)"))
    assert (failed.status, failed.exit_code) == ("runtime_error", 2)
    assert in_the_cloud(Program("python", "while True: pass"))[0].status == "timeout"
    assert in_the_cloud(Program("python", "print('x' * 10**6)"))[0].status == "output_limit"
    with pytest.raises(ProviderError, match="printed no reply"):
        read_reply("nothing", "mark", Limits())
    with pytest.raises(ProviderError, match="'cobol'"):
        build_script(Program("cobol", ""), Limits(), "", {})
