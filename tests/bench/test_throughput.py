"""The throughput benchmark on a generator and a clock that are both made up."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxllm.bench import throughput
from jaxllm.bench.__main__ import main
from jaxllm.engine.input_processor import Prompt
from jaxllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxllm.sampling_params import SamplingParams
from tests.fakes.byte_tokenizer import ByteTokenizer


class FakeLLM:
    """Answers each prompt with max_tokens zeros, and takes the next of `durations_s` for each call."""

    def __init__(self, durations_s: Sequence[float] = (), **engine_args: object) -> None:
        self.now_s = 100.0
        self.durations_s = list(durations_s)
        self.engine_args = engine_args
        self.calls: list[tuple[list[Prompt], SamplingParams]] = []
        self.is_shut_down = False

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams, use_tqdm: bool
    ) -> list[RequestOutput]:
        assert not use_tqdm
        self.calls.append((list(prompts), sampling_params))
        self.now_s += self.durations_s.pop(0) if self.durations_s else 1.0
        return [_output(prompt, sampling_params.max_tokens or 0) for prompt in prompts]

    def clock(self) -> float:
        return self.now_s

    def get_tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.is_shut_down = True


def _output(prompt: Prompt, num_tokens: int) -> RequestOutput:
    token_ids = prompt if isinstance(prompt, list) else [0] * len(str(prompt))
    completion = CompletionOutput(0, token_ids=[0] * num_tokens, finish_reason="length")
    return RequestOutput("0", None, token_ids, None, [completion], True, RequestMetrics(0.0))


@pytest.fixture
def made_llms(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    made: list[FakeLLM] = []

    def make(**engine_args: object) -> FakeLLM:
        made.append(FakeLLM(**engine_args))
        return made[-1]

    monkeypatch.setattr(throughput, "LLM", make)
    return made


def test_the_fastest_timed_run_counts_and_the_warm_up_does_not() -> None:
    llm = FakeLLM(durations_s=[0.25, 4.0, 2.0, 8.0])
    params = SamplingParams(temperature=0.0, max_tokens=10)
    result = throughput.measure(llm, lambda idx: [[idx, 1], [idx, 2, 3]], params, 3, llm.clock)
    assert result == throughput.ThroughputResult(
        elapsed_time=2.0,
        num_requests=2,
        total_num_tokens=25,  # prompts of 2 and 3 tokens, two answers of 10
        total_output_tokens=20,
        requests_per_second=1.0,
        tokens_per_second=12.5,
        output_tokens_per_second=10.0,
    )
    assert [prompts[0][0] for prompts, _ in llm.calls] == [0, 1, 2, 3]


def test_json_has_the_field_names_of_vllm(made_llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    argv = "throughput --json --num-prompts 3 --input-len 5 --output-len 7 --max-num-seqs 2".split()
    assert main(argv) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert sorted(result) == [
        "elapsed_time",
        "max_num_seqs",
        "model",
        "num_requests",
        "output_tokens_per_second",
        "requests_per_second",
        "tokens_per_second",
        "total_num_tokens",
        "total_output_tokens",
    ]
    counts = ["model", "max_num_seqs", "num_requests", "total_num_tokens", "total_output_tokens"]
    assert [result[name] for name in counts] == ["smollm2", 2, 3, 36, 21]
    assert err.startswith("bench: warm-up with 3 prompts\nbench: run 1/1: ")
    assert made_llms[0].engine_args["max_num_seqs"] == 2
    assert made_llms[0].engine_args["engine_process"] == "mp"
    assert made_llms[0].is_shut_down


def test_the_engine_may_run_in_this_process(made_llms: list[FakeLLM]) -> None:
    assert main("throughput --num-prompts 1 --engine-process inproc".split()) == 0
    assert made_llms[0].engine_args["engine_process"] == "inproc"


def test_every_run_gets_fresh_random_prompts(made_llms: list[FakeLLM]) -> None:
    assert main("throughput --num-prompts 2 --input-len 16 --repeats 2".split()) == 0
    prompts_of_runs = [prompts for prompts, _ in made_llms[0].calls]
    assert [len(prompt) for prompts in prompts_of_runs for prompt in prompts] == [16] * 6
    assert len({str(prompts) for prompts in prompts_of_runs}) == 3


def test_requests_run_to_their_full_length(made_llms: list[FakeLLM]) -> None:
    assert main("throughput --output-len 9 --disable-detokenize".split()) == 0
    _, params = made_llms[0].calls[-1]
    assert params == SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=9, detokenize=False)


def test_a_prompts_file_is_repeated_up_to_num_prompts(made_llms: list[FakeLLM], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("[1, 2]\nHello\n", encoding="utf-8")
    assert main(["throughput", "--prompts-file", str(path)]) == 0
    assert made_llms[0].calls[-1][0] == [[1, 2], "Hello"]
    assert main(["throughput", "--prompts-file", str(path), "--num-prompts", "3"]) == 0
    assert made_llms[1].calls[-1][0] == [[1, 2], "Hello", [1, 2]]


def test_the_text_form_is_one_line(made_llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["throughput"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Throughput: ") and out.endswith(" output tokens/s\n") and out.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--num-prompts", "0"], "error: argument --num-prompts: must be an integer of at least 1, got '0'"),
        (["--output-len", "x"], "error: argument --output-len: must be an integer of at least 1, got 'x'"),
        (["--num-promts", "4"], "error: unknown flag --num-promts, did you mean --num-prompts?"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(
    argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["throughput", *argv])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(error) and err.count("\n") == 1


def test_a_missing_prompts_file_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["throughput", "--prompts-file", "no/such/file"]) == 2
    assert capsys.readouterr() == (
        "",
        "error: cannot read prompts file no/such/file: No such file or directory\n",
    )


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), ([], 2), (["latancy"], 2)])
def test_the_door_names_its_commands(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == code
    assert (
        "".join(capsys.readouterr())
        == "usage: jaxllm bench COMMAND ...; commands: attention, host, load, quality, serve, throughput\n"
    )
