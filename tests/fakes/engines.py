"""An LLMEngine on a ScriptedClient and a ByteTokenizer, in one line."""

from pathlib import Path

from jaxllm.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from jaxllm.engine.llm_engine import LLMEngine
from tests.fakes.byte_tokenizer import ByteTokenizer
from tests.fakes.scripted_client import Script, ScriptedClient


def engine_config(max_model_len: int = 64, model_limit: int = 128, seed: int | None = 0) -> EngineConfig:
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=260,  # two more than the tokenizer knows, as padded vocabularies have
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=model_limit,
    )
    scheduler = SchedulerConfig(max_model_len=max_model_len)
    return EngineConfig(model=model, model_path=Path("model.gguf"), seed=seed, cache=CacheConfig(), scheduler=scheduler)


def scripted_engine(script: Script | str, max_model_len: int = 64) -> tuple[LLMEngine, ScriptedClient]:
    """Returns an engine that answers every request alike if `script` is a text: its bytes, then EOS."""
    tokens = [*script.encode(), 257] if isinstance(script, str) else []
    client = ScriptedClient((lambda request, index: tokens) if isinstance(script, str) else script)
    return LLMEngine(engine_config(max_model_len), ByteTokenizer(), client, eos_token_ids=[257]), client
