"""Recomputes the beam searches of a golden file with transformers. Uses nothing of jaxllm.

Run by scripts/make_golden, in an environment that has torch and transformers. A case is a prompt and the parameters of
its search; the outcome is each returned sequence with its score, and how close each step's decision was.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_NEW_TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description="Recompute a golden file's beam searches with transformers.")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("golden", type=Path)
    parser.add_argument("--write", action="store_true", help="replace the golden file")
    args = parser.parse_args()
    golden = json.loads(args.golden.read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(args.gguf.parent, gguf_file=args.gguf.name)
    model = AutoModelForCausalLM.from_pretrained(args.gguf.parent, gguf_file=args.gguf.name, dtype=torch.float32)
    model.eval()
    cases = [_case(model, tokenizer, case, golden["eos_token_id"]) for case in golden["cases"]]
    for old, new in zip(golden["cases"], cases, strict=True):
        is_equal = old.get("sequences") == new["sequences"]
        print(f"width {new['width']} {old['prompt'][-40:]!r}: {'equal' if is_equal else 'different'}")
    if args.write:
        golden["cases"] = cases
        args.golden.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def _case(model: Any, tokenizer: Any, case: dict[str, Any], eos_token_id: int) -> dict[str, Any]:
    prompt_ids = tokenizer(case["prompt"])["input_ids"]
    with _GapRecorder(model, case["width"], eos_token_id) as recorder:
        output = model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
            do_sample=False,
            num_beams=case["width"],
            num_return_sequences=case["width"],
            max_new_tokens=MAX_NEW_TOKENS,
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
            eos_token_id=eos_token_id,
            pad_token_id=eos_token_id,
            return_dict_in_generate=True,
            output_scores=True,
        )
    generated = output.sequences[:, len(prompt_ids) :].tolist()
    keys = ("prompt", "width", "length_penalty", "early_stopping")
    return {
        **{key: case[key] for key in keys},
        "prompt_token_ids": prompt_ids,
        "sequences": [_until(token_ids, eos_token_id) for token_ids in generated],
        "scores": [round(score, 5) for score in output.sequences_scores.tolist()],
        "step_gaps": recorder.gaps,
    }


class _GapRecorder:
    """Notes, at each step, how far the worst candidate kept lay above the best one dropped.

    Of the candidates that go on and of all candidates (those that end count only among the first `width`), whichever
    is less. A gap of less than rounding is a decision that another implementation may take differently.
    """

    def __init__(self, model: Any, width: int, eos_token_id: int) -> None:
        self.gaps: list[float] = []
        self._model, self._width, self._eos = model, width, eos_token_id
        self._original = model._get_top_k_continuations

    def __enter__(self) -> "_GapRecorder":
        self._model._get_top_k_continuations = self._record
        return self

    def __exit__(self, *exception: object) -> None:
        self._model._get_top_k_continuations = self._original

    def _record(self, **arguments: Any) -> Any:
        result = self._original(**arguments)
        logprobs, last = result[0][0], result[1][0, :, arguments["cur_len"]]
        going_on = logprobs[last != self._eos]
        gaps = [self._gap(logprobs), self._gap(going_on)]
        self.gaps.append(round(min(gaps), 5))
        return result

    def _gap(self, logprobs: torch.Tensor) -> float:
        if len(logprobs) <= self._width:
            return float("inf")
        return (logprobs[self._width - 1] - logprobs[self._width]).item()


def _until(token_ids: list[int], eos_token_id: int) -> list[int]:
    """Returns the tokens up to the first end-of-sequence, with it; what follows is padding."""
    return token_ids[: token_ids.index(eos_token_id) + 1] if eos_token_id in token_ids else token_ids


if __name__ == "__main__":
    main()
