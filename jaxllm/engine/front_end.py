"""FrontEnd: what an engine is made from besides its core: configuration, tokenizer, end-of-text ids."""

from typing import NamedTuple

from jaxllm import envs
from jaxllm.config import EngineConfig
from jaxllm.engine_args import EngineArgs
from jaxllm.logger import get_logger
from jaxllm.model_loader.checkpoint import OpenedModel, open_model
from jaxllm.model_loader.generation_config import sampling_defaults
from jaxllm.model_loader.hf_config import token_ids
from jaxllm.tokenizer.loader import open_tokenizer_of
from jaxllm.tokenizer.tokenizer import Tokenizer

_logger = get_logger(__name__)


class FrontEnd(NamedTuple):
    config: EngineConfig
    tokenizer: Tokenizer
    eos_token_ids: list[int]  # every id that ends a text


def load_front_end(args: EngineArgs) -> FrontEnd:
    """Opens the checkpoint, which may have to be fetched first, and reads all but its weights.

    Raises:
      ConfigError: An engine argument or an environment variable breaks a rule.
      ModelLoadError: The model can't be found, read or understood.
    """
    envs.check_names()
    checkpoint = open_model(args.model, args.load_format)
    config = args.create_engine_config(checkpoint)
    tokenizer = open_tokenizer_of(checkpoint, config)
    _log_defaults(config)
    return FrontEnd(config, tokenizer, _eos_token_ids(config, tokenizer, checkpoint))


def _log_defaults(config: EngineConfig) -> None:
    """Says once what requests get that leave their sampling parameters out."""
    defaults = sampling_defaults(config.generation_config)
    if defaults:
        _logger.warning(
            "sampling parameters that requests leave out are the model's own: %s; --generation-config vllm takes ours",
            ", ".join(f"{name}={value}" for name, value in defaults.items()),
        )


def _eos_token_ids(config: EngineConfig, tokenizer: Tokenizer, checkpoint: OpenedModel) -> list[int]:
    """Returns every id that ends a text; a generation config may name more than the model's own."""
    more = [
        token_id
        for generation_config in (checkpoint.generation_config, config.generation_config)
        for token_id in token_ids(generation_config, "eos_token_id")
    ]
    return list(dict.fromkeys([*config.model.eos_token_ids, *tokenizer.eos_token_ids, *more]))
