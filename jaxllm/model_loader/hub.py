"""Fetches a model from the Hugging Face hub into its own cache, which other tools share.

HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE, HF_HOME, HF_TOKEN and HF_ENDPOINT work as everywhere: huggingface_hub reads them.
One commit is resolved once and used for every file. Doesn't know what the files hold.
"""

import re
from pathlib import Path

from jaxllm.exceptions import ModelNotFoundError

# Never pickles: see model_files.PICKLE_SUFFIXES.
WEIGHTS_PATTERN = "*.safetensors"
ALLOW_PATTERNS = [WEIGHTS_PATTERN, "*.json", "*.jinja", "tokenizer.model", "merges.txt"]
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([\w./-]{1,128}))?", re.ASCII)


def parse_hub_id(model: str) -> tuple[str, str | None] | None:
    """Splits `org/name[@revision]`, or returns None where `model` has another form."""
    match = _HUB_ID.fullmatch(model)
    return (match[1], match[2]) if match else None


def cached_snapshot(folder: Path) -> Path | None:
    """Returns the snapshot that a model's folder in the hub's cache, models--org--name, has as its main one.

    None where `folder` is no such folder.
    """
    ref = folder / "refs" / "main"
    if not folder.name.startswith("models--") or not ref.is_file():
        return None
    commit = ref.read_bytes()[:64].decode("ascii", "replace").strip()
    snapshot = folder / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def fetch_snapshot(repo_id: str, revision: str | None, has_weights: bool = True) -> Path:
    """Returns the folder of a hub model, downloading what the cache lacks.

    Raises:
      ModelNotFoundError: The hub has no such model, or can't be reached and the cache hasn't it either.
    """
    # A slow import that local files don't need.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    wanted = f"{repo_id}@{revision}" if revision else repo_id
    allowed = [pattern for pattern in ALLOW_PATTERNS if has_weights or pattern != WEIGHTS_PATTERN]
    way_out = "give a .gguf file or a local folder with --model instead"
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=allowed, ignore_patterns=["*/*"]))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"hub model {wanted!r} is gated: accept its terms on its page and set HF_TOKEN, or {way_out}"
        ) from error
    except Exception as error:  # its errors, and those of its HTTP client, change from version to version
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ModelNotFoundError(
            f"hub model {wanted!r} could not be fetched: it is neither in the local Hugging Face cache nor "
            f"within reach ({type(error).__name__}: {reason}); {way_out}"
        ) from error
