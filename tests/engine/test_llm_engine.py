"""LLMEngine and OutputProcessor on a scripted core: text, stops, logprobs, n > 1, abort."""

from typing import Any

import pytest

from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.output_processor import _SequenceState
from jaxllm.exceptions import InvalidRequestError
from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput
from jaxllm.sampling_params import SamplingParams
from tests.fakes.engines import scripted_engine


def run(engine: LLMEngine) -> list[RequestOutput]:
    """Returns every output of every step until nothing is left."""
    outputs: list[RequestOutput] = []
    for _ in range(1000):
        if not engine.has_unfinished_requests():
            return outputs
        outputs += engine.step()
    raise AssertionError("the engine never finishes")


def answer(script: str, **params: Any) -> list[RequestOutput]:
    engine, _ = scripted_engine(script)
    engine.add_request("r", "ab", SamplingParams(**{"max_tokens": 40, **params}))
    return run(engine)


def test_outputs_grow_and_earlier_ones_stay_as_they_were() -> None:
    outputs = answer("hé")
    assert [output.outputs[0].text for output in outputs] == ["h", "h", "hé", "hé"]
    assert [output.outputs[0].token_ids for output in outputs] == [
        [104],
        [104, 195],
        [104, 195, 169],
        [104, 195, 169, 257],
    ]
    assert [output.finished for output in outputs] == [False, False, False, True]
    last = outputs[-1]
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("r", "ab", [97, 98])
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason) == ("stop", None)
    assert last.prompt_logprobs is None and last.outputs[0].logprobs is None
    assert last.outputs[0].cumulative_logprob is None


def test_final_only_returns_a_request_once_beside_one_that_is_returned_each_step() -> None:
    engine, _ = scripted_engine("hello")
    engine.add_request("quiet", "ab", SamplingParams(max_tokens=3), final_only=True)
    engine.add_request("loud", "ab", SamplingParams(max_tokens=2))
    assert [[(one.request_id, one.outputs[0].text, one.finished) for one in engine.step()] for _ in range(3)] == [
        [("loud", "h", False)],
        [("loud", "he", True)],
        [("quiet", "hel", True)],
    ]
    assert not engine.has_unfinished_requests()


def test_final_only_costs_no_copies_of_what_there_is_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    num_snapshots = 0
    snapshot = _SequenceState.snapshot

    def count(self: _SequenceState) -> CompletionOutput:
        nonlocal num_snapshots
        num_snapshots += 1
        return snapshot(self)

    monkeypatch.setattr(_SequenceState, "snapshot", count)
    engine, _ = scripted_engine("x" * 50)
    engine.add_request("r", "ab", SamplingParams(max_tokens=40), final_only=True)
    assert len(run(engine)[0].outputs[0].token_ids) == 40
    assert num_snapshots == 1


def test_an_aborted_final_only_request_gives_its_output_too() -> None:
    engine, _ = scripted_engine("hello")
    engine.add_request("r", "ab", SamplingParams(), final_only=True)
    assert engine.step() == []
    engine.abort_request("r")
    (output,) = engine.step()
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("h", "abort")


def test_times_come_in_order() -> None:
    metrics = answer("hello")[-1].metrics
    assert metrics.first_scheduled_time_s is not None
    assert metrics.first_token_time_s is not None and metrics.finished_time_s is not None
    assert metrics.arrival_time_s <= metrics.first_token_time_s <= metrics.finished_time_s


def test_max_tokens_ends_with_length_and_counts_exactly() -> None:
    last = answer("hello", max_tokens=3)[-1].outputs[0]
    assert (last.text, len(last.token_ids), last.finish_reason) == ("hel", 3, "length")


def test_b23_a_character_cut_by_max_tokens_is_flushed_once() -> None:
    assert [output.outputs[0].text for output in answer("a😀", max_tokens=3)] == ["a", "a", "a\ufffd"]


@pytest.mark.parametrize(("include", "text"), [(False, "he"), (True, "hel")])
def test_a_stop_token_is_hidden_from_text_alone(include: bool, text: str) -> None:
    last = answer("hello", stop_token_ids=[108], include_stop_str_in_output=include)[-1].outputs[0]
    assert (last.text, last.token_ids, last.stop_reason) == (text, [104, 101, 108], 108)


def test_eos_is_hidden_even_where_special_tokens_are_shown() -> None:
    assert answer("hi", skip_special_tokens=False)[-1].outputs[0].text == "hi"
    assert answer("hi", skip_special_tokens=False, ignore_eos=True, max_tokens=3)[-1].outputs[0].text == "hi</s>"


def test_a_stop_string_ends_the_request_and_tells_the_core() -> None:
    engine, client = scripted_engine("hello world")
    engine.add_request("r", "ab", SamplingParams(stop=["lo w", "zzz"], max_tokens=40))
    outputs = run(engine)
    assert [output.outputs[0].text for output in outputs] == ["", "", "", "h", "he", "hel", "hel"]
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason, bytes(last.token_ids)) == ("stop", "lo w", b"hello w")
    assert client.calls == [("finish", "r-0", 0)]
    assert not client.has_unfinished_requests()


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "h"), (2, "h"), (3, "hih"), (4, "hih"), (5, "hihihi")])
def test_stop_strings_of_the_first_tokens_are_none(min_tokens: int, text: str) -> None:
    """Of "hihihi", "ih" ends at tokens 3 and 5."""
    (completion,) = answer("hihihi", stop=["ih"], min_tokens=min_tokens)[-1].outputs
    assert completion.text == text


def test_a_stop_string_goes_before_the_length_that_ends_with_it() -> None:
    engine, client = scripted_engine("hello")
    engine.add_request("r", "ab", SamplingParams(stop="lo", max_tokens=5))
    last = run(engine)[-1].outputs[0]
    assert (last.text, last.finish_reason, last.stop_reason) == ("hel", "stop", "lo")
    assert client.calls == []  # the core has ended it by itself


def test_streamed_text_equals_the_final_text() -> None:
    texts = [output.outputs[0].text for output in answer("one, two, three", stop=["three!", "x"])]
    assert texts[-1] == "one, two, three"
    assert all(texts[-1].startswith(text) for text in texts)


def test_without_detokenize_there_is_no_text() -> None:
    last = answer("hi", detokenize=False)[-1].outputs[0]
    assert (last.text, last.token_ids) == ("", [104, 105, 257])


def test_logprobs_and_their_sum() -> None:
    last = answer("hi", logprobs=2)[-1].outputs[0]
    assert last.logprobs is not None
    assert last.logprobs[0] == {
        104: Logprob(-0.5, 7, "h"),
        65: Logprob(-0.25, 1, "A"),
        66: Logprob(-0.25, 2, "B"),
    }
    assert [set(position) for position in last.logprobs] == [{104, 65, 66}, {105, 65, 66}, {257, 65, 66}]
    assert last.cumulative_logprob == -1.5


def test_b68_logprobs_0_is_the_sampled_token() -> None:
    last = answer("A", logprobs=0)[-1].outputs[0]
    assert last.logprobs == [{65: Logprob(-0.5, 7, "A")}, {257: Logprob(-0.5, 7, "</s>")}]


def test_prompt_logprobs_begin_with_none() -> None:
    last = answer("x", prompt_logprobs=1)[-1]
    assert last.prompt_logprobs == [None, {98: Logprob(-0.5, 7, "b"), 65: Logprob(-0.25, 1, "A")}]


def test_logprobs_read_a_character_across_the_prompts_end() -> None:
    engine, _ = scripted_engine(lambda request, index: [0xA9, 257])
    engine.add_request("r", [97, 0xC3], SamplingParams(logprobs=0))
    logprobs = run(engine)[-1].outputs[0].logprobs
    assert logprobs is not None and logprobs[0][0xA9].decoded_token == "é"


def test_b81_n_sequences_keep_to_their_index_and_finish_together() -> None:
    engine, client = scripted_engine(lambda request, index: [*[b"a", b"bcX", b"def"][index], 257])
    engine.add_request("r", "ab", SamplingParams(n=3, stop="X", max_tokens=40))
    outputs = run(engine)
    assert [output.finished for output in outputs] == [False, False, False, True]
    last = outputs[-1].outputs
    assert [(one.index, one.text, one.stop_reason) for one in last] == [
        (0, "a", None),
        (1, "bc", "X"),
        (2, "def", None),
    ]
    assert client.calls == [("finish", "r-0", 1)]


def test_a_duplicate_live_id_is_refused_and_a_finished_one_is_free() -> None:
    engine, client = scripted_engine("x")
    engine.add_request("r", "ab", SamplingParams())
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request("r", "cd", SamplingParams())
    assert run(engine)[-1].prompt == "ab"
    engine.add_request("r", "cd", SamplingParams())
    assert run(engine)[-1].prompt == "cd"
    assert len(client.requests) == 2


def test_a_request_id_must_be_a_string() -> None:
    engine, _ = scripted_engine("x")
    with pytest.raises(InvalidRequestError, match="request_id must be a string, got int"):
        engine.add_request(1, "ab", SamplingParams())  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["", [-1], [10**9]])
def test_a_bad_request_touches_nothing_else(prompt: Any) -> None:
    engine, _ = scripted_engine("hi")
    engine.add_request("good", "ab", SamplingParams())
    with pytest.raises(InvalidRequestError):
        engine.add_request("bad", prompt, SamplingParams())
    outputs = run(engine)
    assert {output.request_id for output in outputs} == {"good"}
    assert outputs[-1].outputs[0].text == "hi"


def test_a_request_that_the_core_refuses_is_forgotten() -> None:
    engine, client = scripted_engine("hi")
    client.refuses.add("bad")
    with pytest.raises(InvalidRequestError, match="block pool"):
        engine.add_request("bad", "ab", SamplingParams())
    assert not engine.has_unfinished_requests()


def test_abort_gives_a_last_output_with_the_text_so_far() -> None:
    engine, client = scripted_engine("hello")
    engine.add_request("r", "ab", SamplingParams(stop="zzz"))
    engine.add_request("s", "ab", SamplingParams())
    for _ in range(2):
        engine.step()
    engine.abort_request("r")
    engine.abort_request(["r", "unknown"])
    assert client.calls == [("abort", ["r-0"])]
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ["r", "s"]
    assert outputs[0].finished and outputs[0].metrics.finished_time_s is not None
    assert (outputs[0].outputs[0].text, outputs[0].outputs[0].finish_reason) == ("he", "abort")
    assert run(engine)[-1].outputs[0].text == "hello"


def test_abort_leaves_finished_sequences_their_reason() -> None:
    engine, _ = scripted_engine(lambda request, index: [[97, 257], [98, 98, 98, 257]][index])
    engine.add_request("r", "ab", SamplingParams(n=2))
    for _ in range(2):
        engine.step()
    engine.abort_request("r")
    (output,) = engine.step()
    assert [one.finish_reason for one in output.outputs] == ["stop", "abort"]
    assert not engine.has_unfinished_requests()


def test_an_idle_step_returns_nothing() -> None:
    engine, _ = scripted_engine("x")
    assert engine.step() == []


def test_shutdown_reaches_the_client() -> None:
    engine, client = scripted_engine("x")
    engine.shutdown()
    assert client.is_shut_down
