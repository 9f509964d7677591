"""Times one job in vLLM as `jaxllm.bench throughput` does in jaxllm. Run in the peer's environment.

usage: vllm_throughput.py JOB RESULT     both JSON files; compare.py writes the one and reads the other
"""

import json
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_num_seqs=job["max_num_seqs"],
        max_model_len=job["max_model_len"],
        kv_cache_memory_bytes=job["kv_cache_memory_bytes"],
    )
    prompts = [{"prompt_token_ids": token_ids} for token_ids in job["prompts"]]
    generate(llm, prompts, max_tokens=4)
    speeds = []
    for _ in range(job["repeats"]):
        start = time.perf_counter()
        outputs = generate(llm, prompts, max_tokens=job["output_len"])
        elapsed_s = time.perf_counter() - start
        speeds.append(sum(len(output.outputs[0].token_ids) for output in outputs) / elapsed_s)
    Path(sys.argv[2]).write_text(json.dumps({"output_tokens_per_second": max(speeds)}), encoding="utf-8")


def generate(llm, prompts, max_tokens):
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False)
    return llm.generate(prompts, params, use_tqdm=False)


# vLLM starts its processes by spawning, which imports this file again.
if __name__ == "__main__":
    main()
