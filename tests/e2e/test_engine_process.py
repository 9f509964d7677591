"""LLM with the engine in a process of its own, and in this one: the same answers, and the same errors at the start."""

from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.exceptions import DeviceError, ModelLoadError
from jaxllm.sampling_params import BeamSearchParams
from tests.fakes.tiny_models import tiny_llama, write_tiny_folder

PROMPTS = ["the capital of France is", "one two three four five six seven", "a"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=9, logprobs=1),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=3, max_tokens=20, stop=["e"]),
]
ENGINE_ARGS = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "num_gpu_blocks_override": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"), tiny_llama())


@pytest.mark.slow
def test_the_answers_are_the_same_to_the_last_bit(model: Path) -> None:
    answers = []
    for engine_process in ("mp", "inproc"):
        with LLM(model=str(model), engine_process=engine_process, **ENGINE_ARGS) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            beams = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=6))
        answers.append(
            [
                [(output.prompt, output.prompt_token_ids, output.prompt_logprobs) for output in outputs],
                [
                    (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs, one.cumulative_logprob)
                    for output in outputs
                    for one in output.outputs
                ],
                [(one.tokens, one.cum_logprob) for output in beams for one in output.sequences],
            ]
        )
    assert answers[0] == answers[1]
    assert [prompt for prompt, _, _ in answers[0][0]] == PROMPTS


@pytest.mark.parametrize("engine_process", ["mp", "inproc"])
def test_weights_that_do_not_fit_are_a_model_load_error(model: Path, tmp_path: Path, engine_process: str) -> None:
    broken = tiny_llama()
    tensors = {name: tensor for name, tensor in broken.tensors.items() if name != "model.norm.weight"}
    folder = write_tiny_folder(tmp_path, type(broken)(broken.config, tensors, broken.tokens, broken.merges))
    with pytest.raises(ModelLoadError, match="lacks 'model.norm.weight'"):
        LLM(model=str(folder), engine_process=engine_process, **ENGINE_ARGS)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_platform_that_is_not_there_is_a_device_error(
    platform: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    with pytest.raises(DeviceError, match=f"^no device can be used with JAX_PLATFORMS={platform}: "):
        LLM(model=str(model), engine_process="mp", **ENGINE_ARGS)
