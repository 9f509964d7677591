"""The generate command: what it prints where, and its exit codes."""

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine_args import EngineArgs
from jaxllm.exceptions import EngineDeadError, JaxllmError, ModelNotFoundError, UnsupportedModelError
from jaxllm.generate import main
from jaxllm.messages import EngineCoreRequest
from tests.fakes.engines import scripted_engine
from tests.fakes.scripted_client import Script, ScriptedClient

ROOT = Path(__file__).parents[2]


class Engines:
    """Makes one scripted engine and remembers it."""

    def __init__(self, script: Script | str = "Paris.") -> None:
        self.engine, self.client = scripted_engine(script)
        self.args: list[EngineArgs] = []

    def __call__(self, args: EngineArgs) -> LLMEngine:
        self.args.append(args)
        return self.engine


class Terminal(io.StringIO):
    """A stdout that says it is a terminal, and keeps each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


def last_request(client: ScriptedClient) -> EngineCoreRequest:
    return client.requests[-1]


def test_one_prompt_prints_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    engines = Engines()
    assert main(["The capital"], engines) == 0
    assert capsys.readouterr() == ("Paris.\n", "")
    request = last_request(engines.client)
    assert bytes(request.prompt_token_ids) == b"The capital"
    assert request.sampling_params.temperature == 0.0
    assert engines.client.is_shut_down


def test_every_sampling_flag() -> None:
    engines = Engines()
    argv = "hi --max-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --seed 3"
    assert (
        main(
            [
                *argv.split(),
                "--n",
                "2",
                "--stop",
                "a",
                "--stop",
                "b",
                "--ignore-eos",
                "--logprobs",
                "2",
                "--prompt_logprobs=1",
                "--json",
            ],
            engines,
        )
        == 0
    )
    params = last_request(engines.client).sampling_params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 7)
    assert (params.min_p, params.seed, params.n, params.stop, params.ignore_eos) == (
        0.1,
        3,
        2,
        ["a", "b"],
        True,
    )
    assert (params.logprobs, params.prompt_logprobs) == (2, 1)


@pytest.mark.parametrize(
    "flags, expected",
    [("", (0.6, 0.9, 0, 0.0, 20)), ("--temperature 0 --top-k 3 --max-tokens 2 --min-p 0.2", (0.0, 0.9, 3, 0.2, 2))],
)
def test_the_models_own_defaults_hold_where_no_flag_does(flags: str, expected: tuple[float, ...]) -> None:
    engines = Engines()
    own = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 20}
    engines.engine.config = dataclasses.replace(engines.engine.config, generation_config=own)
    assert main(["hi", *flags.split()], engines) == 0
    params = last_request(engines.client).sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == expected


def test_engine_flags_reach_the_engine() -> None:
    engines = Engines()
    assert main(["hi", "--model", "m.gguf", "--max-num-seqs", "4", "--no-enable-prefix-caching", "there"], engines) == 0
    fitted = 2 * 64 + len("hi") + len("there")
    assert engines.args == [
        EngineArgs(model="m.gguf", max_num_seqs=4, max_num_batched_tokens=fitted, enable_prefix_caching=False)
    ]
    assert [bytes(request.prompt_token_ids) for request in engines.client.requests] == [b"hi", b"there"]


@pytest.mark.parametrize(
    ("argv", "num_seqs", "num_tokens"),
    [
        (["hi"], 1, 66),
        (["hi", "--n", "3", "--temperature", "1"], 3, 66),
        (["é" * 5000, "hi"], 2, 2048),
        (["hi", "--max-num-seqs", "7", "--max-num-batched-tokens", "9"], 7, 9),
    ],
)
def test_the_batch_is_no_larger_than_the_prompts_need(argv: list[str], num_seqs: int, num_tokens: int) -> None:
    engines = Engines()
    main(argv, engines)
    (args,) = engines.args
    assert (args.max_num_seqs, args.max_num_batched_tokens) == (num_seqs, num_tokens)


def test_several_prompts_are_printed_with_their_answers_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    def echo(request: EngineCoreRequest, index: int) -> list[int]:
        return [*request.prompt_token_ids * (3 if request.prompt_token_ids == [97] else 1), 257]

    assert main(["a", "bc"], Engines(echo)) == 0
    assert capsys.readouterr() == ("> a\naaa\n\n> bc\nbc\n\n", "")


def test_json_is_one_object_a_prompt_in_input_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"from file"\n[104, 105]\n{"prompt": "dict"}\nplain\n')
    assert main(["first", "--prompts-file", str(file), "--json", "--logprobs", "1"], Engines()) == 0
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["prompt"] for record in records] == ["first", "from file", None, "dict", "plain"]
    assert records[2]["prompt_token_ids"] == [104, 105]
    assert {record["outputs"][0]["text"] for record in records} == {"Paris."}
    assert records[0]["outputs"][0]["logprobs"][0]["80"] == {"logprob": -0.5, "rank": 7, "decoded_token": "P"}
    assert "prompt_logprobs" not in records[0]
    assert err == ""


def test_stdin_is_a_prompts_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin\n"))
    engines = Engines()
    assert main(["--prompts-file", "-"], engines) == 0
    assert bytes(last_request(engines.client).prompt_token_ids) == b"from stdin"


def test_a_terminal_streams_and_closes_with_rates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["hi"], Engines("né")) == 0
    assert terminal.getvalue() == "né\n"
    assert [text for text in terminal.writes if text] == ["n", "é", "\n"]
    err = capsys.readouterr().err
    assert err.startswith("time to first token ") and "decode" in err and err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_streamed_and_whole_text_are_the_same(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hi", flag, "--stop", "is"], Engines("Paris is")) == 0
    assert capsys.readouterr() == ("Par\n", "")


def test_stats_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hi", "--stats"], Engines()) == 0
    out, err = capsys.readouterr()
    assert out == "Paris.\n" and err.startswith("time to first token ")


def test_chat_uses_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    engines = Engines()
    assert main(["hi", "--chat", "--system", "be brief"], engines) == 0
    assert bytes(last_request(engines.client).prompt_token_ids) == b"<system>be brief\n<user>hi\n<assistant>"
    assert capsys.readouterr().out == "Paris.\n"


def test_logprobs_without_json_say_where_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hi", "--logprobs", "1"], Engines()) == 0
    assert capsys.readouterr() == ("Paris.\n", "note: log probabilities are shown with --json only\n")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "no prompt"),
        ([""], "prompt must not be empty"),
        (["", "--chat"], "prompt must not be empty"),
        (["a", ""], "prompt 2 of 2: prompt must not be empty"),
        (["a" * 64], "max_model_len=64"),
        (["a\ud800"], "lone surrogate"),
        (["a", "--max-tokens", "0"], "max_tokens must be in [1, 2147483647], got 0"),
        (["a", "--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
        (["a", "--temperature", "-1"], "temperature must be at least 0, got -1.0"),
        (["a", "--temperature", "nan"], "temperature must be at least 0, got nan"),
        (["a", "--temperature", "inf"], "temperature must be at least 0, got inf"),
        (["a", "--n", "2"], "n must be 1 when temperature is 0"),
        (["a", "--logprobs", "21"], "logprobs must be in [0, 20], got 21"),
        (["a", "--stop", ""], "each stop must be a string"),
        (["a", "--system", "s"], "--system needs --chat"),
        (["a", "b", "--stream"], "--stream needs one prompt"),
        (["a", "--json", "--stream"], "--stream needs one prompt"),
        (["--prompts-file", "/no/such/file"], "cannot read prompts file /no/such/file: No such file"),
    ],
)
def test_bad_input_is_one_line_and_code_2(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv, Engines()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and says in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["a", "--top_q", "1"], "unknown flag --top-q, did you mean --top-p?"),
        (["a", "--max-token", "1"], "unknown flag --max-token, did you mean --max-tokens?"),
        (["a", "--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'"),
        (["a", "--top-k"], "argument --top-k: expected one argument"),
    ],
)
def test_bad_flags_are_one_line_and_code_2(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv, Engines())
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and says in err and err.count("\n") == 1


def test_help_shows_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"], Engines())
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--prompts-file FILE" in text and "--top-p P" in text and "--kv-cache-memory" in text


def test_a_chat_message_keeps_its_cache_salt(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('{"prompt": "hi", "cache_salt": "x"}\n"hi"\n', encoding="utf-8")
    engines = Engines()
    assert main(["--prompts-file", str(file), "--chat"], engines) == 0
    assert engines.client is not None
    assert [request.cache_salt for request in engines.client.requests] == ["x", None]


def test_token_ids_are_no_chat_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("[1]\n")
    assert main(["--prompts-file", str(file), "--chat"], Engines()) == 2
    assert capsys.readouterr().err == "error: --chat needs prompts that are text, got token ids\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelNotFoundError("no such\nfile"), 2),
        (UnsupportedModelError("no such\nfile"), 2),
        (EngineDeadError("no such\nfile"), 1),
    ],
)
def test_errors_of_the_engine_are_one_line(error: JaxllmError, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(args: EngineArgs) -> LLMEngine:
        raise error

    assert main(["a"], fail) == code
    assert capsys.readouterr() == ("", "error: no such file\n")


def test_bad_parameters_are_refused_before_the_model_is_loaded() -> None:
    engines = Engines()
    assert main(["a", "--top-p", "0"], engines) == 2
    assert engines.args == []


def test_ctrl_c_is_code_130_and_shuts_down(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(request: EngineCoreRequest, index: int) -> list[int]:
        raise KeyboardInterrupt

    engines = Engines(interrupt)
    assert main(["a"], engines) == 130
    assert capsys.readouterr() == ("", "")
    assert engines.client.is_shut_down and not engines.client.has_unfinished_requests()


def command(text: str, *argv: str) -> list[str]:
    """Returns the command line of a process that answers `text`."""
    code = (
        "import sys; from jaxllm.generate import main; from tests.fakes.engines import scripted_engine; "
        "sys.exit(main(sys.argv[2:], lambda args: scripted_engine(sys.argv[1])[0]))"
    )
    return [sys.executable, "-c", code, text, *argv]


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_a_reader_who_leaves_ends_it_quietly(flag: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            command("text", "hi", flag), stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, check=False
        )
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


def test_a_terminal_that_lacks_a_character_shows_another() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command("caf\u00e9", "hi"), capture_output=True, cwd=ROOT, env=environment, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"caf?\n", b"")
