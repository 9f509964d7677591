"""Which module builds which architecture. Strings only: importing this file imports no jax.

Each module offers FAMILY, as models/llama.py does.
"""

FAMILIES = {
    "LlamaForCausalLM": "jaxllm.models.llama",
    "MistralForCausalLM": "jaxllm.models.llama",
    "Qwen2ForCausalLM": "jaxllm.models.qwen2",
    "Qwen3ForCausalLM": "jaxllm.models.qwen3",
}
