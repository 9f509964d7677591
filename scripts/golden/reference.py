"""Recomputes a golden file's numbers from its prompts with transformers. Uses nothing of jaxllm.

Run by scripts/make_golden, in an environment that has torch and transformers.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_GREEDY_TOKENS = 48
NUM_TOP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Recompute a golden file with transformers.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("golden", type=Path)
    parser.add_argument("--write", action="store_true", help="replace the golden file")
    args = parser.parse_args()
    golden = json.loads(args.golden.read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(args.gguf.parent, gguf_file=args.gguf.name)
    model = AutoModelForCausalLM.from_pretrained(args.gguf.parent, gguf_file=args.gguf.name, dtype=torch.float32)
    model.eval()
    cases = [_case(model, tokenizer, case["prompt"]) for case in golden["cases"]]
    for old, new in zip(golden["cases"], cases, strict=True):
        print(f"{old['prompt'][:40]!r}: {_difference(old, new)}")
    golden["cases"] = cases
    if "chat_example" in golden:  # some models have no chat template
        messages, stored = golden["chat_example"]["messages"], golden["chat_example"]["rendered"]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        print(f"chat example: {'equal' if rendered == stored else 'different'}")
        golden["chat_example"] = {"messages": messages, "rendered": rendered}
    if args.write:
        args.golden.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def _case(model: Any, tokenizer: Any, prompt: str) -> dict[str, Any]:
    prompt_ids = tokenizer(prompt)["input_ids"]
    logits = model(torch.tensor([prompt_ids])).logits[0]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    own = [logprobs[i, token_id].item() for i, token_id in enumerate(prompt_ids[1:])]
    top = torch.topk(logprobs[-1], NUM_TOP)
    greedy_ids, gaps = _greedy(model, prompt_ids)
    return {
        "prompt": prompt,
        "prompt_token_ids": prompt_ids,
        "prompt_logprobs": [None, *(round(value, 5) for value in own)],
        "last_top10_ids": top.indices.tolist(),
        "last_top10_logprobs": [round(value, 5) for value in top.values.tolist()],
        "greedy_token_ids": greedy_ids,
        "greedy_top1_top2_logit_gap": gaps,
    }


def _greedy(model: Any, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
    """Takes the most likely token each time, past any end-of-sequence token; also returns how sure each was."""
    ids, gaps, cache = [], [], None
    inputs = torch.tensor([prompt_ids])
    for _ in range(NUM_GREEDY_TOKENS):
        output = model(inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best = torch.topk(output.logits[0, -1], 2)
        ids.append(best.indices[0].item())
        gaps.append(round((best.values[0] - best.values[1]).item(), 4))
        inputs = best.indices[:1].reshape(1, 1)
    return ids, gaps


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    if old["prompt_token_ids"] != new["prompt_token_ids"]:
        return "other token ids"
    pairs = zip(old["prompt_logprobs"][1:], new["prompt_logprobs"][1:], strict=True)
    worst = max((abs(a - b) for a, b in pairs), default=0.0)
    same = sum(a == b for a, b in zip(old["greedy_token_ids"], new["greedy_token_ids"], strict=True))
    return f"prompt logprobs within {worst:.5f}, {same} of {NUM_GREEDY_TOKENS} greedy tokens equal"


if __name__ == "__main__":
    main()
