"""Which module builds which architecture. Strings only: importing this file imports no jax.

Each module offers FAMILY, as models/llama.py does.
"""

FAMILIES = {
    "GPT2LMHeadModel": "jaxllm.models.gpt2",
    "Gemma2ForCausalLM": "jaxllm.models.gemma",
    "Gemma3ForCausalLM": "jaxllm.models.gemma",
    "LlamaForCausalLM": "jaxllm.models.llama",
    "MistralForCausalLM": "jaxllm.models.llama",
    "OPTForCausalLM": "jaxllm.models.opt",
    "Qwen2ForCausalLM": "jaxllm.models.qwen2",
    "Qwen3ForCausalLM": "jaxllm.models.qwen3",
}
