"""The one logger. Lines go to stderr, so that stdout holds generated text alone."""

import json
import logging
from typing import Literal

from jaxllm import envs

LogFormat = Literal["text", "json"]
_TEXT = logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s", "%H:%M:%S")


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def get_logger(name: str) -> logging.Logger:
    """Returns a logger under `jaxllm`, whose level is JAXLLM_LOG_LEVEL."""
    root = logging.getLogger("jaxllm")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_TEXT)
        root.addHandler(handler)
        root.setLevel(envs.log_level())
        root.propagate = False
    return logging.getLogger(name)


def configure_for_server(log_format: LogFormat) -> None:
    """Sets up a server's log: INFO unless JAXLLM_LOG_LEVEL says otherwise, the HTTP library's warnings in it too."""
    root = get_logger("jaxllm")
    root.setLevel(envs.log_level(default="INFO"))
    if log_format == "json":
        for handler in root.handlers:
            handler.setFormatter(_JsonFormatter())
    library = logging.getLogger("uvicorn")
    library.handlers = list(root.handlers)
    library.setLevel("WARNING")
    library.propagate = False
