"""What it costs that a model's sizes don't divide by the devices that share them. Arithmetic of sizes alone."""

from jaxllm.config import ModelConfig
from jaxllm.intmath import cdiv
from sharding.split import HeadSplit


def padding_costs(model: ModelConfig, num_devices: int) -> list[str]:
    """Returns a line for each size that grows when num_devices share each layer."""
    lines = [] if num_devices == 1 else _heads(model, num_devices)
    sizes = {"MLP": model.intermediate_size, "vocabulary": model.vocab_size, "experts": model.extra.get("num_experts")}
    for name, size in sizes.items():
        if size is not None and size % num_devices:
            padded = cdiv(size, num_devices) * num_devices
            lines.append(
                f"{name}: {size} padded with zeros to {padded} for {num_devices} devices, {_more(padded, size)} weights"
            )
    return lines


def _heads(model: ModelConfig, num_devices: int) -> list[str]:
    num_heads, num_kv_heads = model.num_attention_heads, model.num_key_value_heads
    if model.has_latent_cache:
        padded = cdiv(num_heads, num_devices) * num_devices
        lines = [f"KV cache: one head that all query heads need; each of {num_devices} devices has a copy"]
        if padded != num_heads:
            lines.append(
                f"heads: {num_heads} padded with zero heads to {padded} for {num_devices} devices, "
                f"{_more(padded, num_heads)} work in attention"
            )
        return lines
    split = HeadSplit(num_heads, num_kv_heads, num_devices)
    padded, copies = split.heads_per_shard * num_devices, split.num_copies
    padded_kv = split.kv_heads_per_shard * num_devices // copies
    lines = []
    if (padded, padded_kv) != (num_heads, num_kv_heads):
        lines.append(
            f"heads: {num_heads} query and {num_kv_heads} KV heads padded with zero heads to {padded} and {padded_kv} "
            f"for {num_devices} devices, {_more(padded, num_heads)} work in attention and "
            f"{_more(padded_kv, num_kv_heads)} KV cache"
        )
    if copies > 1:
        lines.append(
            f"KV cache: {num_kv_heads} KV heads for {num_devices} devices; {copies} devices have a copy of each, "
            f"{_more(copies, 1)} KV cache"
        )
    return lines


def _more(now: int, before: int) -> str:
    return f"{100 * (now - before) / before:.3g} % more"
