"""The one logger. Lines go to stderr, so that stdout holds generated text alone."""

import logging

from jaxllm import envs


def get_logger(name: str) -> logging.Logger:
    """Returns a logger under `jaxllm`, whose level is JAXLLM_LOG_LEVEL."""
    root = logging.getLogger("jaxllm")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(envs.log_level())
        root.propagate = False
    return logging.getLogger(name)
