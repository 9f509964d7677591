"""Which module builds which architecture. Strings only: importing this file imports no jax.

Each module offers FAMILY, as models/llama.py does.
"""

FAMILIES = {
    "DeepseekV2ForCausalLM": "jaxllm.models.deepseek",
    "DeepseekV3ForCausalLM": "jaxllm.models.deepseek",
    "GPT2LMHeadModel": "jaxllm.models.gpt2",
    "Gemma2ForCausalLM": "jaxllm.models.gemma",
    "Gemma3ForCausalLM": "jaxllm.models.gemma",
    "GptOssForCausalLM": "jaxllm.models.gpt_oss",
    "GraniteForCausalLM": "jaxllm.models.granite",
    "LlamaForCausalLM": "jaxllm.models.llama",
    "MistralForCausalLM": "jaxllm.models.llama",
    "MixtralForCausalLM": "jaxllm.models.mixtral",
    "Olmo2ForCausalLM": "jaxllm.models.olmo2",
    "OPTForCausalLM": "jaxllm.models.opt",
    "Phi3ForCausalLM": "jaxllm.models.phi3",
    "Qwen2ForCausalLM": "jaxllm.models.qwen2",
    "Qwen3ForCausalLM": "jaxllm.models.qwen3",
    "Qwen3MoeForCausalLM": "jaxllm.models.qwen3_moe",
    "SmolLM3ForCausalLM": "jaxllm.models.smollm3",
}
