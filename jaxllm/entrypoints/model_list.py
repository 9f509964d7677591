"""`python -m jaxllm.models`: which models there are short names for, which are on this disk, which families run.

Fetches nothing and asks nobody. Exit codes: 0, 2 bad usage.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from jaxllm import envs
from jaxllm.entrypoints.arg_parser import ArgParser
from jaxllm.model_loader.aliases import HUB_MODELS
from jaxllm.model_loader.demo_models import DEMO_MODELS
from jaxllm.model_loader.gguf_architectures import ARCHITECTURES
from jaxllm.models.registry import FAMILIES


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code. `argv` defaults to the process's arguments."""
    parser = ArgParser("jaxllm models", "List the models that have short names, those on this disk, and the families.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse(sys.argv[1:] if argv is None else argv)
    found = list_models()
    sys.stdout.write(json.dumps(found) + "\n" if args.json else _to_text(found))
    return 0


def list_models() -> dict[str, Any]:
    """Returns what the command prints.

    `built_in` and `hub` list the short names, `cached` the hub's other models on this disk; each `cached_bytes` is what
    the model takes there, 0 where it isn't. `architectures` are names of config.json, `gguf_architectures` llama.cpp's.
    """
    cached = _hub_bytes()
    return {
        "built_in": [
            {"name": name, "source": model.requirements, "cached_bytes": _demo_bytes(model.file_name)}
            for name, model in DEMO_MODELS.items()
        ],
        "hub": [
            {"name": name, "source": hub_id, "cached_bytes": cached.get(hub_id, 0)}
            for name, hub_id in HUB_MODELS.items()
        ],
        "cached": [
            {"name": hub_id, "cached_bytes": num_bytes}
            for hub_id, num_bytes in sorted(cached.items())
            if hub_id not in HUB_MODELS.values()
        ],
        "architectures": sorted(FAMILIES),
        "gguf_architectures": sorted(ARCHITECTURES),
    }


def _demo_bytes(file_name: str) -> int:
    path = envs.home() / "models" / file_name
    return path.stat().st_size if path.exists() else 0


def _hub_bytes() -> dict[str, int]:
    """Returns hub id -> bytes of the models in the Hugging Face cache."""
    from huggingface_hub import scan_cache_dir  # a slow import
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return {}
    return {repo.repo_id: repo.size_on_disk for repo in cache.repos if repo.repo_type == "model"}


def _to_text(found: dict[str, Any]) -> str:
    lines = ["built in, fetched when first used:", *_rows(found["built_in"])]
    lines += [
        "",
        "short names of hub models (HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are honoured):",
        *_rows(found["hub"]),
    ]
    if found["cached"]:
        lines += ["", "other models in the Hugging Face cache:", *_rows(found["cached"])]
    lines += ["", "families (architectures of config.json):", f"  {', '.join(found['architectures'])}"]
    lines += ["", "families in GGUF files (general.architecture):", f"  {', '.join(found['gguf_architectures'])}"]
    return "\n".join(lines) + "\n"


def _rows(models: Iterable[dict[str, Any]]) -> list[str]:
    return [
        f"  {model['name']:<26} {_size(model['cached_bytes']):>10}  {model.get('source', '')}".rstrip()
        for model in models
    ]


def _size(num_bytes: int) -> str:
    if not num_bytes:
        return "-"
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
