"""Public names, each imported when first asked for, so that `import jaxllm` costs nothing."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.engine.async_llm_engine import AsyncLLMEngine
    from jaxllm.engine.llm_engine import LLMEngine
    from jaxllm.engine_args import EngineArgs
    from jaxllm.entrypoints.llm import LLM
    from jaxllm.outputs import CompletionOutput, RequestOutput
    from jaxllm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_MODULES = {
    "LLM": "jaxllm.entrypoints.llm",
    "AsyncLLMEngine": "jaxllm.engine.async_llm_engine",
    "CompletionOutput": "jaxllm.outputs",
    "EngineArgs": "jaxllm.engine_args",
    "LLMEngine": "jaxllm.engine.llm_engine",
    "RequestOutput": "jaxllm.outputs",
    "SamplingParams": "jaxllm.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
