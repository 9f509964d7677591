"""Whole models of a few kilobytes, in each form that is read, and what tests/fuzz does to them."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import gguf

from jaxllm.tokenizer.sentencepiece_model import UNIGRAM, Rules, write_model
from tests.fakes.checkpoint_fuzz import Case
from tests.fakes.golden_families import case_names, read_case, write_folder
from tests.fakes.mutations import damaged_bytes, damaged_gguf, damaged_json, damaged_safetensors
from tests.fakes.packed_weights import WAYS, write_packed
from tests.fakes.tiny_models import (
    TinyModel,
    micro_llama,
    tiny_llama,
    write_tiny_folder,
    write_tiny_gguf,
    write_tiny_tokenizer,
)

_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
SP_PIECES = ("<unk>", "<s>", "</s>", *_BYTES, "▁", "a", "b", "ab", "▁a", "▁▁")
SP_SCORES = (0.0,) * 259 + (-1.0, -2.0, -3.0, -0.5, -0.7, 0.0)
SP_TYPES = (2, 3, 3) + (6,) * 256 + (1,) * 5 + (4,)
# Each link leads to a whole file, so that opening it would go unnoticed.
_NAMES_OUTSIDE = ("../outside/model.safetensors", "/etc/passwd", "..", ".", "", "a/../model.safetensors", "x\0y", "./x")


def write_gguf_seeds(folder: Path) -> list[Path]:
    """Writes a file with a byte-level vocabulary, one with SentencePiece's BPE and one with its unigram model."""
    folder.mkdir()
    paths = [write_tiny_gguf(folder / "bytes.gguf", micro_llama())]
    for kind in ("llama", "t5"):
        path = folder / f"{kind}.gguf"
        paths.append(write_tiny_gguf(path, _sentencepiece_llama(), add_vocabulary=_add_sentencepiece(kind)))
    return paths


def write_folder_seeds(folder: Path) -> list[Path]:
    """Writes a folder with a tokenizer.json, one of two shards with a tokenizer.model, one with a GPT-2 vocabulary.

    And one whose weights are stored as numbers of four bits.
    """
    plain = write_tiny_folder(folder / "plain", micro_llama())
    (plain / "generation_config.json").write_text('{"eos_token_id": [2, 0], "temperature": 0.6, "top_k": 20}')
    sharded = write_tiny_folder(folder / "sharded", _sentencepiece_llama(), num_shards=2)
    (sharded / "tokenizer.json").unlink()
    rules = Rules(kind=UNIGRAM, removes_spaces=False, has_bytes=True)
    (sharded / "tokenizer.model").write_bytes(write_model(SP_PIECES, SP_SCORES, SP_TYPES, rules))
    config = {
        "bos_token": "<s>",
        "add_bos_token": True,
        "added_tokens_decoder": {"1": {"content": "<s>", "special": True}},
    }
    (sharded / "tokenizer_config.json").write_text(json.dumps(config))
    gpt2 = write_tiny_folder(folder / "gpt2", tiny_llama(**_MICRO, vocab_size=300))
    vocabulary = json.loads((gpt2 / "tokenizer.json").read_text())["model"]
    (gpt2 / "vocab.json").write_text(json.dumps(vocabulary["vocab"]))
    (gpt2 / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(f"{' '.join(pair)}\n" for pair in vocabulary["merges"])
    )
    (gpt2 / "tokenizer.json").unlink()
    (gpt2 / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{% endfor %}")
    micro = micro_llama()
    packed, _ = write_packed(folder / "numbers", micro.config, micro.tensors, WAYS["int4, asymmetric"])
    write_tiny_tokenizer(packed, micro)
    return [plain, sharded, gpt2, packed]


def write_family_seeds(folder: Path) -> list[Path]:
    """Writes a folder of each family, and some of weights stored as numbers, with a vocabulary of a few tokens."""
    first_cases = {family: name for family, name in reversed(case_names())}
    seeds = [write_folder(folder / family, read_case(family, name)) for family, name in sorted(first_cases.items())]
    case = read_case("llama", first_cases["llama"])
    for way in ("awq", "gptq", "int8", "fp8 blocks"):
        seeds.append(write_packed(folder / way, case.config, case.tensors, WAYS[way])[0])
    for seed in seeds:
        write_tiny_tokenizer(seed, micro_llama())
    return seeds


def family_cases(folder: Path, seeds: list[Path], count: int) -> Iterator[Case]:
    """Yields folders whose config.json is damaged, each written when it is asked for."""
    folder.mkdir()
    for index in range(count):
        seed, path = seeds[index % len(seeds)], folder / str(index)
        shutil.copytree(seed, path, copy_function=os.link)
        what, data = damaged_json((path / "config.json").read_bytes(), Random(f"family/{index}"))
        (path / "config.json").unlink()
        (path / "config.json").write_bytes(data)
        yield Case(f"{index} ({seed.name}, config.json: {what})", path, path)


def gguf_cases(folder: Path, seeds: list[Path], count: int) -> Iterator[Case]:
    """Yields damaged files, each written when it is asked for."""
    folder.mkdir()
    contents = [seed.read_bytes() for seed in seeds]
    for index in range(count):
        rng = Random(f"gguf/{index}")
        which = index % len(seeds)
        what, data = damaged_gguf(contents[which], rng)
        path = folder / f"{index}.gguf"
        path.write_bytes(data)
        yield Case(f"{index} ({seeds[which].name}, {what})", path, path)


def folder_cases(folder: Path, seeds: list[Path], count: int) -> Iterator[Case]:
    """Yields damaged folders, each written when it is asked for; the first are those that lead out of themselves."""
    folder.mkdir()
    shutil.copytree(seeds[0], folder / "outside")
    todo: list[tuple[Path, str, Callable[[Path, Random], str]]] = []
    for seed in seeds:
        for file in sorted(seed.iterdir()):
            todo += [(seed, file.name, damage) for damage in (_link_out, _make_pipe, _make_folder)]
    index_name = "model.safetensors.index.json"
    todo += [(seeds[1], index_name, lambda path, rng, name=name: _name_in_index(path, name)) for name in _NAMES_OUTSIDE]
    for index in range(max(count, len(todo))):
        rng = Random(f"folder/{index}")
        seed = seeds[index % len(seeds)]
        names = sorted(file.name for file in seed.iterdir())
        seed, name, damage = todo[index] if index < len(todo) else (seed, rng.choice(names), _damage_content)
        path = folder / str(index)
        shutil.copytree(seed, path)
        what = damage(path / name, rng)
        yield Case(f"{index} ({seed.name}, {name}: {what})", path, path)


def _damage_content(path: Path, rng: Random) -> str:
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        what, data = damaged_safetensors(data, rng)
    elif path.suffix == ".json" and rng.random() < 0.85:
        what, data = damaged_json(data, rng)
    else:
        what, data = damaged_bytes(data, rng)
    path.write_bytes(data)
    return what


def _link_out(path: Path, rng: Random) -> str:
    outside = path.parent.parent / "outside" / f"{path.parent.name}-{path.name}"
    path.rename(outside)
    path.symlink_to(rng.choice((outside, Path("..") / "outside" / outside.name)))
    return "a link out"


def _make_pipe(path: Path, rng: Random) -> str:
    path.unlink()
    os.mkfifo(path)
    return "a pipe"


def _make_folder(path: Path, rng: Random) -> str:
    path.unlink()
    path.mkdir()
    return "a folder"


def _name_in_index(path: Path, name: str) -> str:
    index = json.loads(path.read_text())
    index["weight_map"][min(index["weight_map"])] = name
    path.write_text(json.dumps(index))
    return f"names {name!r}"


_MICRO = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


def _sentencepiece_llama() -> TinyModel:
    return tiny_llama(**_MICRO, vocab_size=len(SP_PIECES), bos_token_id=1)


def _add_sentencepiece(kind: str) -> Callable[[gguf.GGUFWriter, TinyModel], None]:
    def add(writer: gguf.GGUFWriter, model: TinyModel) -> None:
        writer.add_tokenizer_model(kind)
        writer.add_token_list([piece.replace("▁▁", "  ") for piece in SP_PIECES])
        writer.add_token_scores(SP_SCORES)
        writer.add_token_types(SP_TYPES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(True)
        writer.add_unk_token_id(0)

    return add
