"""Measuring commands: `python -m jaxllm.bench {host,throughput}`. `throughput` knows LLM's public face only."""
