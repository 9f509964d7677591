"""Hugging Face folders whose weights are stored as numbers and scales: read as floats, or as those numbers.

Doesn't know how formats lay out their tensors (packed_numbers.py), nor which weight goes where. Imports no jax.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.exceptions import ModelLoadError, UnsupportedModelError
from jaxllm.model_loader.packed_numbers import LAYOUTS, Numbers
from jaxllm.model_loader.safetensors_reader import FLOATS, NUMBERS, HuggingFaceCheckpoint
from jaxllm.model_loader.stored_quantization import StoredFormat, stored_format
from jaxllm.quantization import Scheme

# Scales of activations and of a KV cache, which ours measures itself.
_UNUSED = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".output_zero_point",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".k_zero_point",
    ".v_zero_point",
)
_INT4 = range(-8, 8)


class QuantizedCheckpoint:
    """Implements checkpoint.Checkpoint on a folder whose config.json has a quantization_config.

    Weights have the names that they have where they aren't quantized; what isn't quantized is read as it is.

    Raises:
      ModelLoadError: A file is missing, truncated or contradicts another.
      UnsupportedModelError: The format, or a tensor's type, is one that isn't read.
    """

    def __init__(self, path: Path) -> None:
        self._files = HuggingFaceCheckpoint(path, FLOATS | NUMBERS)
        self.path, self.config = path, self._files.config
        self.generation_config: dict[str, Any] = self._files.generation_config
        self.quantization: str | None = None
        form = stored_format(self.config)
        if form is None:
            raise ModelLoadError(f"{path}: its config.json has no quantization_config")
        self._form: StoredFormat = form
        self._layout = LAYOUTS[form.layout]
        self._modules = self._find_modules()
        self._others = self._find_others()

    def tensor_names(self) -> list[str]:
        return [*self._others, *self._modules]

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor: in its stored dtype, or float32 [O, I], experts [E, I, O], where it was quantised.

        Raises:
          ModelLoadError: A file has become shorter, or what is stored doesn't fit together.
        """
        return self.read_numbers(name).dequantized() if name in self._modules else self._files.read(name)

    def is_quantized(self, name: str) -> bool:
        return name in self._modules

    def is_idle_bias(self, name: str) -> bool:
        """Whether it is the bias of zeros that some tools write for each module, whether it has one or not."""
        module = name.removesuffix(".bias")
        return module != name and module + self._layout.weight in self._modules and not self._files.read(name).any()

    def scheme_of(self, name: str, num_inputs: int) -> Scheme | None:
        """Returns what a weight's numbers can be multiplied as; None where only its floats can, or it is of floats."""
        scheme, size = self._form.scheme, self._form.group_size
        if name not in self._modules or scheme is None:
            return None
        if size is None or size > num_inputs:
            scheme, size = replace(scheme, group_size=None), num_inputs
        return scheme if num_inputs % size == 0 and self._is_in_order(name, size) else None

    def read_numbers(self, name: str) -> Numbers:
        """Returns a quantized weight as it is stored.

        Raises:
          ModelLoadError: A file has become shorter, or what is stored doesn't fit together.
        """
        tensors = {ending: self._files.read(stored) for ending, stored in self._modules[name].items()}
        try:
            return self._layout.read(tensors, self._form)
        except (IndexError, ValueError) as error:
            shapes = {ending.strip("._"): list(tensor.shape) for ending, tensor in tensors.items()}
            raise ModelLoadError(f"{self.path}: {name!r:.200}, stored as {shapes}, is damaged: {error}") from error

    def check_int4(self, name: str, numbers: Numbers) -> None:
        """Checks that numbers which the config says are symmetric are.

        Raises:
          ModelLoadError: They have other zero points.
        """
        if numbers.values.min() not in _INT4 or numbers.values.max() not in _INT4:
            raise ModelLoadError(
                f"{self.path}: {name!r:.200} must have zero points of 8, as its config says that it is symmetric; "
                "set --quantization int8_wo, which doesn't need that"
            )

    def _is_in_order(self, name: str, size: int) -> bool:
        """Whether every `size` inputs in their order share a scale."""
        stored = self._modules[name]
        group_names = [stored[ending] for ending in stored if ending.endswith("g_idx")]
        if not group_names:
            return True
        groups = self._files.read(group_names[0])
        return bool((groups < 0).all()) or np.array_equal(groups, np.arange(groups.size) // size)

    def _find_modules(self) -> dict[str, dict[str, str]]:
        """Returns each quantized weight's tensors by the ending of their names."""
        layout, names = self._layout, set(self._files.tensor_names())
        modules = {}
        for scales in sorted(name for name in names if name.endswith(layout.scales)):
            module = scales.removesuffix(layout.scales)
            found = {ending: module + ending for ending in (layout.scales, *layout.needed, *layout.others)}
            tensors = {ending: name for ending, name in found.items() if name in names}
            if missing := [found[ending] for ending in layout.needed if ending not in tensors]:
                raise ModelLoadError(f"{self.path}: lacks {missing[0]!r:.200}, of which it has {scales!r:.200}")
            modules[module + layout.weight] = tensors
        return modules

    def _find_others(self) -> list[str]:
        """Returns the tensors that aren't of quantized weights."""
        used = {name for tensors in self._modules.values() for name in tensors.values()}
        others = [name for name in self._files.tensor_names() if name not in used and not name.endswith(_UNUSED)]
        for name in others:
            if self._files.dtype(name) not in FLOATS.values():
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name!r:.200} is stored as {self._files.dtype(name)}, without the scales "
                    f"{self._layout.scales!r} that its config asks for"
                )
        return others
