"""Measuring commands: `python -m jaxllm.bench {throughput}`. Knows LLM's public face only."""
