"""Short names of models: the built-in ones, and common ones of the hub. Fetches nothing."""

import difflib
import re

from jaxllm.model_loader.demo_models import DEMO_MODELS

HUB_MODELS = {
    "deepseek-v2-lite-chat": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "gemma-2-2b": "google/gemma-2-2b",
    "gemma-2-2b-it": "google/gemma-2-2b-it",
    "gemma-2-9b-it": "google/gemma-2-9b-it",
    "gemma-3-270m-it": "google/gemma-3-270m-it",
    "gemma-3-1b": "google/gemma-3-1b-pt",
    "gemma-3-1b-it": "google/gemma-3-1b-it",
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-xl": "openai-community/gpt2-xl",
    "granite-3.3-2b-instruct": "ibm-granite/granite-3.3-2b-instruct",
    "granite-3.3-8b-instruct": "ibm-granite/granite-3.3-8b-instruct",
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-8b-instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.1-70b-instruct": "meta-llama/Llama-3.1-70B-Instruct",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-1b-instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama-3.2-3b-instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "llama-3.3-70b-instruct": "meta-llama/Llama-3.3-70B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-v0.3",
    "mistral-7b-instruct": "mistralai/Mistral-7B-Instruct-v0.3",
    "mixtral-8x7b-instruct": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "olmo-2-1b": "allenai/OLMo-2-0425-1B",
    "olmo-2-1b-instruct": "allenai/OLMo-2-0425-1B-Instruct",
    "opt-125m": "facebook/opt-125m",
    "phi-3-mini-4k-instruct": "microsoft/Phi-3-mini-4k-instruct",
    "phi-3-mini-128k-instruct": "microsoft/Phi-3-mini-128k-instruct",
    "qwen2.5-0.5b-instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b-instruct": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-7b-instruct": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m-instruct": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b-instruct": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
}


def resolve(model: str) -> str:
    """Returns the built-in model or hub id that a short name means, or `model` itself.

    Case and the marks between words don't count: llama3.2:1b is llama-3.2-1b. A revision may follow, as in a hub id.
    """
    name, at, revision = model.partition("@")
    found = _BY_KEY.get(_key(name))
    return model if found is None else found + at + revision


def nearest(model: str) -> str | None:
    """Returns the short name that was perhaps meant, or None."""
    close = difflib.get_close_matches(model[:80].lower(), [*DEMO_MODELS, *HUB_MODELS], n=1, cutoff=0.7)
    return close[0] if close else None


def _key(name: str) -> str:
    return re.sub(r"[-_:]", "", name.lower())


_BY_KEY = {_key(name): model for name, model in ({name: name for name in DEMO_MODELS} | HUB_MODELS).items()}
