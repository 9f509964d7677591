"""What tests/fuzz does with a checkpoint: everything that an engine reads of it before it compiles a program."""

import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxllm.engine_args import EngineArgs
from jaxllm.exceptions import ModelLoadError
from jaxllm.model_loader.checkpoint import open_checkpoint
from jaxllm.model_loader.loader import load_model
from jaxllm.tokenizer.chat_template import render_chat
from jaxllm.tokenizer.loader import open_tokenizer
from sharding.mesh import make_mesh

_TEXT = "The capital <|im_start|>é\u3000\U0001f469\u200d\U0001f680 1234  \n\n<s></s>\0"


def open_model(path: Path) -> str:
    """Opens config, tokenizer, chat template and every tensor; returns how many parameters were loaded."""
    checkpoint = open_checkpoint(str(path))
    config = EngineArgs(model=str(path), max_model_len=None).create_engine_config(checkpoint)
    tokenizer = open_tokenizer(checkpoint)
    tokenizer.decode(tokenizer.encode(_TEXT))
    tokenizer.decode(range(-2, min(tokenizer.vocab_size, 1000) + 2), skip_special_tokens=False)
    if tokenizer.chat_template is not None:
        render_chat(tokenizer, [{"role": "user", "content": _TEXT}])
    float32 = jnp.dtype(jnp.float32)
    model = load_model(config, make_mesh(jax.local_devices()[:1]), float32, float32)
    return f"{len(jax.tree.leaves(model))} parameters"


def misbehave(path: Path) -> str:
    """Does what the file says, each thing a fault that the harness must see."""
    word = path.read_text()
    if word == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif word == "hang":
        while True:
            pass
    elif word == "outside":
        Path("/etc/hostname").open().close()
    elif word == "write":
        path.write_text("changed")
    elif word == "memory":
        bytearray(4 << 30)
    elif word == "lines":
        raise ModelLoadError("one\ntwo")
    elif word == "exception":
        raise RecursionError("deep")
    elif word == "refused":
        raise ModelLoadError("no")
    return word
