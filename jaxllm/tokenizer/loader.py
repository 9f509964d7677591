"""Opens the tokenizer that a checkpoint brings. Imports no jax.

Doesn't know vocabularies' formats: gguf_vocabulary.py and folder_tokenizer.py do.
"""

from jaxllm.config import EngineConfig
from jaxllm.exceptions import ModelLoadError
from jaxllm.logger import get_logger
from jaxllm.model_loader.checkpoint import OpenedModel
from jaxllm.model_loader.gguf_checkpoint import GGUFCheckpoint
from jaxllm.model_loader.hf_config import token_ids
from jaxllm.model_loader.model_folder import TOKENIZER_NAMES
from jaxllm.model_loader.orbax_checkpoint import OrbaxCheckpoint
from jaxllm.tokenizer.dummy_tokenizer import DummyTokenizer
from jaxllm.tokenizer.folder_tokenizer import open_folder_tokenizer
from jaxllm.tokenizer.gguf_vocabulary import open_gguf_tokenizer
from jaxllm.tokenizer.tokenizer import Tokenizer

# Chat and image tokens that a text model's embedding leaves out; a text that holds one is refused, the others run.
MAX_EXTRA_TOKENS = 64

_logger = get_logger(__name__)


def open_tokenizer_of(checkpoint: OpenedModel, config: EngineConfig) -> Tokenizer:
    """Opens the tokenizer that an engine uses: the checkpoint's, or a made-up one where the weights are made up too.

    Raises:
      ModelLoadError, UnsupportedModelError: As open_tokenizer.
    """
    is_made_up = config.load_format == "dummy" and checkpoint.path.is_dir()
    if is_made_up and not any((checkpoint.path / name).exists() for name in TOKENIZER_NAMES):
        return DummyTokenizer(config.model.vocab_size)
    return open_tokenizer(checkpoint)


def open_tokenizer(checkpoint: OpenedModel) -> Tokenizer:
    """Opens the tokenizer that a checkpoint brings, and checks that it belongs to the model.

    Raises:
      ModelLoadError: It has none, a damaged one, or that of another model.
      UnsupportedModelError: Its vocabulary is of a kind that isn't read.
    """
    bos_ids = token_ids(checkpoint.config, "bos_token_id")
    bos_token_id, eos_token_ids = bos_ids[0] if bos_ids else None, token_ids(checkpoint.config, "eos_token_id")
    gguf = checkpoint.gguf if isinstance(checkpoint, GGUFCheckpoint | OrbaxCheckpoint) else None
    if gguf is not None:
        tokenizer = open_gguf_tokenizer(gguf, bos_token_id, eos_token_ids)
    else:
        tokenizer = open_folder_tokenizer(checkpoint.path, bos_token_id, eos_token_ids)
    _check_size(checkpoint, tokenizer)
    return tokenizer


def _check_size(checkpoint: OpenedModel, tokenizer: Tokenizer) -> None:
    """Compares the vocabulary with the logits' width. Logits may be wider: ids without a token become no text."""
    width = checkpoint.config.get("vocab_size")
    num_extra = tokenizer.vocab_size - width if type(width) is int else 0
    if num_extra > MAX_EXTRA_TOKENS:
        raise ModelLoadError(
            f"{checkpoint.path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model {width} logits; the "
            "tokenizer is another model's: give the one that came with the weights"
        )
    if num_extra > 0:
        _logger.warning(
            "%s: the model has no logits for the tokenizer's last %d tokens; prompts with them are refused",
            checkpoint.path,
            num_extra,
        )
