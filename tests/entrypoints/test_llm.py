"""LLM.generate and LLM.chat on a scripted engine."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.engine.input_processor import Prompt
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine_args import EngineArgs
from jaxllm.entrypoints.llm import LLM
from jaxllm.exceptions import ConfigError, InvalidRequestError
from jaxllm.messages import EngineCoreRequest
from jaxllm.sampling_params import SamplingParams
from tests.fakes.engines import scripted_engine
from tests.fakes.scripted_client import Script, ScriptedClient

MakeLLM = Callable[..., tuple[LLM, ScriptedClient]]


def echo(request: EngineCoreRequest, index: int) -> list[int]:
    return [*request.prompt_token_ids, 257]


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    def make(script: Script | str = echo) -> tuple[LLM, ScriptedClient]:
        engine, client = scripted_engine(script)
        monkeypatch.setattr(LLMEngine, "from_engine_args", lambda args, engine_process: engine)
        return LLM(), client

    return make


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("ab", ["ab"]),
        ({"prompt": "ab"}, ["ab"]),
        ([97, 98], ["ab"]),
        ({"prompt_token_ids": [97, 98]}, ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([[97, 98], [99]], ["ab", "c"]),
        (["ab", [99], {"prompt": "d"}, {"prompt_token_ids": [101]}], ["ab", "c", "d", "e"]),
        (("ab", "c"), ["ab", "c"]),
    ],
)
def test_every_prompt_form(make_llm: MakeLLM, prompts: Any, texts: list[str]) -> None:
    llm, _ = make_llm()
    outputs = llm.generate(prompts, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == texts
    assert all(output.finished for output in outputs)


def test_b123_outputs_come_in_input_order_whatever_finishes_first(make_llm: MakeLLM) -> None:
    llm, _ = make_llm("x" * 30)
    params = [SamplingParams(max_tokens=count) for count in (9, 2, 17, 1, 5)]
    outputs = llm.generate(["a", "b", "c", "d", "e"], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["a", "b", "c", "d", "e"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 2, 17, 1, 5]


@pytest.mark.parametrize("prompts", [[], [[]], [""], "", ["a", ""], [None], 7, [1, "a"], ["a", 1]])
def test_b26_empty_and_odd_prompts_are_refused_and_the_engine_lives(make_llm: MakeLLM, prompts: Any) -> None:
    llm, client = make_llm()
    with pytest.raises(InvalidRequestError):
        llm.generate(prompts, use_tqdm=False)
    assert not client.has_unfinished_requests()
    assert llm.generate("ok", use_tqdm=False)[0].outputs[0].text == "ok"


def test_a_bad_prompt_aborts_those_before_it(make_llm: MakeLLM) -> None:
    llm, client = make_llm()
    prompts: list[Prompt] = ["a", "b", {"prompt_token_ids": [-1]}, "c"]
    with pytest.raises(InvalidRequestError, match="prompt 3 of 4: prompt_token_ids must be in"):
        llm.generate(prompts, use_tqdm=False)
    assert client.calls == [("abort", ["0-0", "1-1"])]
    assert [output.prompt for output in llm.generate(["d", "e"], use_tqdm=False)] == ["d", "e"]


def test_ctrl_c_leaves_no_request_behind(make_llm: MakeLLM) -> None:
    def interrupt(request: EngineCoreRequest, index: int) -> list[int]:
        if request.prompt_token_ids == [97]:
            raise KeyboardInterrupt
        return [120, 257]

    llm, client = make_llm(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["b", "a"], use_tqdm=False)
    assert not client.has_unfinished_requests()
    assert [output.prompt for output in llm.generate(["b"], use_tqdm=False)] == ["b"]


def test_a_params_list_must_match(make_llm: MakeLLM) -> None:
    llm, _ = make_llm()
    with pytest.raises(InvalidRequestError, match="got 3 for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()] * 3, use_tqdm=False)


def test_params_are_checked_again(make_llm: MakeLLM) -> None:
    llm, _ = make_llm()
    with pytest.raises(InvalidRequestError, match="must be SamplingParams, got dict"):
        llm.generate("a", {"top_p": 1.0}, use_tqdm=False)  # type: ignore[arg-type]


def test_the_default_is_16_tokens(make_llm: MakeLLM) -> None:
    llm, _ = make_llm("x" * 99)
    assert llm.generate("a", use_tqdm=False)[0].outputs[0].text == "x" * 16


def test_chat_takes_one_conversation_or_several(make_llm: MakeLLM) -> None:
    llm, client = make_llm("fine")
    hello = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(hello, use_tqdm=False)
    assert output.prompt == "<user>hi\n<assistant>"
    assert bytes(output.prompt_token_ids) == b"<user>hi\n<assistant>"
    assert output.outputs[0].text == "fine"
    outputs = llm.chat([hello, [{"role": "system", "content": "s"}]], use_tqdm=False, add_generation_prompt=False)
    assert [output.prompt for output in outputs] == ["<user>hi\n", "<system>s\n"]
    assert len(client.requests) == 3


@pytest.mark.parametrize(
    "messages", [[], [[]], "hi", ["hi"], [{"role": "user"}], [{"role": "user", "content": "\ud800"}]]
)
def test_bad_messages_are_refused(make_llm: MakeLLM, messages: Any) -> None:
    llm, _ = make_llm()
    with pytest.raises(InvalidRequestError):
        llm.chat(messages, use_tqdm=False)


def test_the_bar_goes_to_stderr(make_llm: MakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm, _ = make_llm()
    llm.generate(["a", "b"])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err and "tok/s" in captured.err


def test_reset_prefix_cache_goes_down_to_the_core(make_llm: MakeLLM) -> None:
    llm, client = make_llm()
    assert llm.reset_prefix_cache() is True
    llm.llm_engine.add_request("r", "ab", SamplingParams())
    assert llm.reset_prefix_cache() is False
    assert client.calls == [("reset_prefix_cache",)] * 2


def test_it_closes_as_a_context_manager(make_llm: MakeLLM) -> None:
    llm, client = make_llm()
    with llm as same:
        assert same is llm and same.get_tokenizer().vocab_size == 258
    assert client.is_shut_down


def test_engine_arguments_are_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = scripted_engine("x")
    seen: list[EngineArgs] = []

    def make(args: EngineArgs, engine_process: str) -> LLMEngine:
        seen.append(args)
        return engine

    monkeypatch.setattr(LLMEngine, "from_engine_args", make)
    LLM(model="m.gguf", max_num_seqs=3, seed=5)
    assert seen == [EngineArgs(model="m.gguf", max_num_seqs=3, seed=5)]


def test_an_unknown_engine_argument_gets_a_hint() -> None:
    with pytest.raises(ConfigError, match="argument max_model_length; did you mean max_model_len?"):
        LLM(max_model_length=3)


def test_without_parameters_the_models_own_defaults_hold(make_llm: MakeLLM) -> None:
    llm, client = make_llm("x" * 40)
    assert llm.get_default_sampling_params() == SamplingParams()
    own = {"temperature": 0.5, "top_k": 9, "max_new_tokens": 21}
    llm.llm_engine.config = dataclasses.replace(llm.llm_engine.config, generation_config=own)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=9, max_tokens=21)
    llm.generate("a", use_tqdm=False)
    llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
    params = [request.sampling_params for request in client.requests]
    assert [(each.temperature, each.top_k, each.max_tokens) for each in params] == [(0.5, 9, 21), (1.0, 0, 2)]
