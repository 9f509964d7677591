"""vLLM's first example, on an OPT checkpoint made here with a byte-level BPE tokenizer as GPT-2's."""

import pytest

from jaxllm import LLM, SamplingParams
from tests.fakes.golden_families import GoldenRunner, new_sequence, read_case, write_folder
from tests.fakes.seeded_weights import seeded_tensor
from tests.fakes.tiny_models import TinyModel, tiny_vocabulary, write_tiny_tokenizer

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    """The folder of a tiny OPT whose embedding holds the tokenizer's 300 tokens, and its config."""
    case = read_case("opt", "plain")
    tokens, merges = tiny_vocabulary()
    embedding = "model.decoder.embed_tokens.weight"
    config = {**case.config, "vocab_size": len(tokens)}
    tensors = {**case.tensors, embedding: seeded_tensor(embedding, (len(tokens), config["hidden_size"]))}
    folder = write_folder(tmp_path_factory.mktemp("opt"), case._replace(config=config, tensors=tensors))
    write_tiny_tokenizer(folder, TinyModel(config, tensors, tokens, merges))
    return folder, config


@pytest.fixture(scope="module")
def llm(opt):
    with LLM(model=str(opt[0]), max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64) as llm:
        yield llm


def test_the_example(llm):
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert 0 < len(output.outputs[0].token_ids) <= 16
        assert isinstance(output.outputs[0].text, str)


def test_greedy_text_is_that_of_the_runner(llm, opt):
    """The same prompt, token by token through a worker without engine, scheduler and detokenizer."""
    (output,) = llm.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    runner = GoldenRunner(*opt)
    prompt = output.prompt_token_ids
    (token,) = runner.step({1: len(prompt)}, (new_sequence(1, prompt, 1),)).sampled[1]
    drawn = [token.token_id]
    while len(drawn) < 6:
        drawn.append(runner.step({1: 1}, (), {1: drawn[-1:]}).sampled[1][0].token_id)
    assert output.outputs[0].token_ids == drawn
    assert output.outputs[0].text == llm.get_tokenizer().decode(drawn)
