"""Which module builds which architecture. Strings only: importing this file imports no jax.

Each module offers build_layer and layer_weights, as models/llama.py does.
"""

FAMILIES = {
    "LlamaForCausalLM": "jaxllm.models.llama",
}
