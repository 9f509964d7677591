"""Converted models, and what tests/fuzz does to them: sizes of files, links, JSON, and what it says of files."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from jaxllm.model_loader.converter import convert
from tests.fakes.checkpoint_fuzz import Case
from tests.fakes.mutations import damaged_bytes, damaged_gguf, damaged_json
from tests.fakes.tiny_models import micro_llama, write_tiny_folder, write_tiny_gguf

_MANIFEST = "jaxllm.json"


def write_orbax_seeds(folder: Path) -> list[Path]:
    """Writes converted models: of a GGUF file with its vocabulary, and int8 of a folder with tokenizer files."""
    folder.mkdir()
    gguf = write_tiny_gguf(folder / "m.gguf", micro_llama())
    hugging_face = write_tiny_folder(folder / "source", micro_llama())
    convert(str(gguf), folder / "of a file")
    convert(str(hugging_face), folder / "of a folder", quantization="int8")
    return [folder / "of a file", folder / "of a folder"]


def orbax_cases(folder: Path, seeds: list[Path], count: int) -> Iterator[Case]:
    """Yields damaged copies, each kind of damage in turn; a copy lives until the next one is asked for."""
    outside = folder / "outside"
    outside.mkdir(parents=True)
    (outside / "secret").write_bytes(b"\0" * 4096)
    for number, damage in zip(range(count), itertools.cycle(_DAMAGES), strict=False):
        seed, path = seeds[number // len(_DAMAGES) % len(seeds)], folder / str(number)
        shutil.copytree(seed, path)
        name = damage(path, Random(number), outside)
        yield Case(f"{number}: {seed.name}: {damage.__name__.strip('_')} {name}", path, path)
        shutil.rmtree(path)


def _manifest(path: Path, rng: Random, outside: Path) -> str:
    return _rewrite(path / _MANIFEST, damaged_json, rng)


def _config(path: Path, rng: Random, outside: Path) -> str:
    return _rewrite(path / "config.json", damaged_json, rng)


def _description(path: Path, rng: Random, outside: Path) -> str:
    return _rewrite(rng.choice(sorted(path.glob("weights/*/.zarray"))), damaged_json, rng)


def _bytes(path: Path, rng: Random, outside: Path) -> str:
    file = rng.choice([file for file in sorted(path.rglob("*")) if file.is_file()])
    return _rewrite(file, damaged_bytes, rng)


def _vocabulary(path: Path, rng: Random, outside: Path) -> str:
    vocabulary = path / "vocabulary.gguf"
    if vocabulary.exists():
        return _rewrite(vocabulary, damaged_gguf, rng)
    return _rewrite(path / "tokenizer.json", damaged_json, rng)


def _shard_size(path: Path, rng: Random, outside: Path) -> str:
    """A weight's file that is shorter or longer than its description says."""
    shard = rng.choice(_shards(path))
    size = rng.choice((0, 1, shard.stat().st_size - 1, shard.stat().st_size + 1, 1 << 33))
    os.truncate(shard, size)  # a large one takes no room on the disk
    return f"{shard.relative_to(path)} of {size} bytes"


def _missing(path: Path, rng: Random, outside: Path) -> str:
    victim = rng.choice([path / _MANIFEST, path / "config.json", path / "weights", *_shards(path), *_folders(path)])
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    return f"{victim.relative_to(path)}"


def _replaced(path: Path, rng: Random, outside: Path) -> str:
    """Something else under the name of a file or a folder: a link out, a link in, a folder, a pipe."""
    files = [path / _MANIFEST, path / "config.json", *path.glob("weights/*/.zarray"), *_shards(path)]
    victim = rng.choice([path / "weights", *_folders(path), *files])
    is_folder = victim.is_dir()
    moved = outside / "moved"
    if moved.exists():
        shutil.rmtree(moved) if moved.is_dir() else moved.unlink()
    victim.rename(moved)
    kind = rng.choice(("link", "dangling link", "link to itself", "pipe", "folder" if not is_folder else "file"))
    if kind == "link":
        victim.symlink_to(moved)
    elif kind == "dangling link":
        victim.symlink_to(outside / "nothing")
    elif kind == "link to itself":
        victim.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(victim)
    else:
        victim.mkdir() if kind == "folder" else victim.touch()
    return f"{victim.relative_to(path)} is a {kind}"


def _renamed_weight(path: Path, rng: Random, outside: Path) -> str:
    """A manifest that names a weight's folder by a path."""
    old = rng.choice(_folders(path)).name
    new = rng.choice(("../../outside", f"{outside}", "..", ".", "", f"../weights/{old}", f"{old}/", "a\\u0000b", "x.y"))
    manifest = path / _MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"{old}"', f'"{new}"'))
    return f"{old} -> {new}"


def _orbax_files(path: Path, rng: Random, outside: Path) -> str:
    """Orbax's own files, which nothing needs."""
    victim = rng.choice([path / "weights" / name for name in ("_METADATA", "_sharding", "array_metadatas/process_0")])
    return _rewrite(victim, damaged_bytes, rng)


def _rewrite(file: Path, damage: Callable[[bytes, Random], tuple[str, bytes]], rng: Random) -> str:
    name, data = damage(file.read_bytes(), rng)
    file.write_bytes(data)
    return f"{file.parent.name}/{file.name} {name}"


def _folders(path: Path) -> list[Path]:
    return sorted(file.parent for file in path.glob("weights/*/.zarray"))


def _shards(path: Path) -> list[Path]:
    return sorted(path.glob("weights/*/[0-9]*"))


_DAMAGES = (
    _manifest, _description, _shard_size, _config, _missing, _replaced, _renamed_weight, _bytes, _vocabulary,
    _manifest, _description, _replaced, _config, _bytes, _orbax_files,
)  # fmt: skip
