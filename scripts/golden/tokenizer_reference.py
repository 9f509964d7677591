"""Hashes what the reference tokenizers make of ten thousand strings. Uses nothing of jaxllm.

SmolLM2's is transformers' conversion of the GGUF file, with the splitting rule of the tokenizer.json that its makers
published (GGUF has only the rule's name). Gemma's is the sentencepiece library, with a model message rebuilt from the
GGUF file's pieces and scores. Run by scripts/make_golden, in an environment that has transformers.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from gguf import GGUFReader
from sentencepiece import sentencepiece_model_pb2
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.fakes.unicode_strings import group_hashes, unicode_strings  # noqa: E402

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


def main() -> None:
    parser = argparse.ArgumentParser(description="Hash the reference tokenizers' ids and texts.")
    parser.add_argument("smollm2", type=Path)
    parser.add_argument("gemma3", type=Path)
    parser.add_argument("golden", type=Path)
    parser.add_argument("--write", action="store_true", help="replace the golden file")
    args = parser.parse_args()
    golden = json.loads(args.golden.read_text(encoding="utf-8")) if args.golden.exists() else {}
    new = {"smollm2": _hashes(*_smollm2(args.smollm2)), "gemma3-270m": _hashes(*_gemma(args.gemma3))}
    for model, kinds in new.items():
        for kind, hashes in kinds.items():
            old = golden.get(model, {}).get(kind, [])
            same = sum(a == b for a, b in zip(old, hashes, strict=False))
            print(f"{model}, {kind}: {same} of {len(hashes)} groups equal")
    if args.write:
        args.golden.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")


def _hashes(encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]) -> dict[str, list[str]]:
    ids = [encode(text) for text in unicode_strings()]
    return {"ids": group_hashes(ids), "texts": group_hashes([decode(part) for part in ids])}


def _smollm2(path: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return (
        lambda text: backend.encode(text, add_special_tokens=False).ids,
        lambda ids: backend.decode(ids, skip_special_tokens=False),
    )


def _gemma(path: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    pieces, scores, types = _vocabulary(path)
    message = sentencepiece_model_pb2.ModelProto()
    for piece, score, kind in zip(pieces, scores, types, strict=True):
        message.pieces.add(piece=piece.replace(" ", "▁") if kind == _USER_DEFINED else piece, score=score, type=kind)
    message.pieces[pieces.index("<unk>")].type = _UNKNOWN  # GGUF calls it control
    message.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    message.trainer_spec.byte_fallback = True
    message.normalizer_spec.add_dummy_prefix = False
    message.normalizer_spec.remove_extra_whitespaces = False
    processor = sentencepiece.SentencePieceProcessor(model_proto=message.SerializeToString())
    control = {piece: i for i, piece in enumerate(pieces) if types[i] == _CONTROL}
    found = re.compile("(" + "|".join(re.escape(piece) for piece in sorted(control, key=len, reverse=True)) + ")")

    def encode(text: str) -> list[int]:
        parts = [[control[part]] if part in control else processor.encode(part) for part in found.split(text)]
        return [token_id for part in parts for token_id in part]

    def decode(ids: list[int]) -> str:
        texts: list[Any] = [[]]
        for token_id in ids:
            if types[token_id] == _CONTROL:
                texts += [pieces[token_id], []]
            else:
                texts[-1].append(token_id)
        return "".join(part if isinstance(part, str) else processor.decode(part) for part in texts)

    return encode, decode


def _vocabulary(path: Path) -> tuple[list[str], list[float], list[int]]:
    fields = GGUFReader(path).fields
    tokens, scores, types = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    pieces = [bytes(tokens.parts[i]).decode() for i in tokens.data]
    return pieces, [float(scores.parts[i][0]) for i in scores.data], [int(types.parts[i][0]) for i in types.data]


if __name__ == "__main__":
    main()
