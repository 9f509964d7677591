"""FrontEnd: what an engine is made from besides its core: configuration, tokenizer, end-of-text ids."""

from typing import NamedTuple

from jaxllm import envs
from jaxllm.config import EngineConfig
from jaxllm.engine_args import EngineArgs
from jaxllm.model_loader.checkpoint import OpenedModel, open_model
from jaxllm.model_loader.hf_config import token_ids
from jaxllm.tokenizer.loader import open_tokenizer
from jaxllm.tokenizer.tokenizer import Tokenizer


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
    tokenizer = open_tokenizer(checkpoint)
    return FrontEnd(config, tokenizer, _eos_token_ids(config, tokenizer, checkpoint))


def _eos_token_ids(config: EngineConfig, tokenizer: Tokenizer, checkpoint: OpenedModel) -> list[int]:
    """Returns every id that ends a text; a generation config may name more than the model's own."""
    more = token_ids(checkpoint.generation_config, "eos_token_id")
    return list(dict.fromkeys([*config.model.eos_token_ids, *tokenizer.eos_token_ids, *more]))
