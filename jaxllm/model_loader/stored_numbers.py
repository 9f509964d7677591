"""The numbers of a quantized checkpoint as parameters of a model. Doesn't know how they are stored."""

from collections.abc import Mapping

import numpy as np

from jaxllm.exceptions import ModelLoadError
from jaxllm.logger import get_logger
from jaxllm.model_loader.quantized_checkpoint import QuantizedCheckpoint
from jaxllm.models.weight_map import Weight
from jaxllm.quantization import QuantizedWeight, Scheme

_logger = get_logger(__name__)


class StoredNumbers:
    """What is stored as numbers, arranged as the model has it.

    Whatever moves the rows of a weight does the same with the rows of its scales.

    Args:
      checkpoint: Where they are.
      weights: Of each parameter, by its path in CausalLM.
      stored_names: The checkpoint's name of each tensor.
    """

    def __init__(
        self, checkpoint: QuantizedCheckpoint, weights: Mapping[str, Weight], stored_names: Mapping[str, str]
    ) -> None:
        self._checkpoint, self._weights, self._stored_names = checkpoint, weights, stored_names
        self._has_told = False

    def scheme_of(self, name: str, num_inputs: int) -> Scheme | None:
        """Returns how a parameter can be held as it is stored; None where it must become floats.

        It must where its tensors are stored in different ways, or where groups are of inputs that aren't neighbours.
        An embedding is held with one scale a row, or as floats.
        """
        if name not in self._weights:
            return None
        names = [self._stored_names[part] for part in self._weights[name].names]
        schemes = {self._checkpoint.scheme_of(stored, num_inputs) for stored in names}
        scheme = schemes.pop()
        if schemes or scheme is None:
            return None
        is_table = name.startswith("frame.")
        return None if is_table and (scheme.group_size is not None or scheme.of_table() != scheme) else scheme

    def read(self, name: str, shape: tuple[int, ...], scheme: Scheme) -> QuantizedWeight:
        """Reads a parameter of that shape, for which scheme_of has returned `scheme`.

        Raises:
          ModelLoadError: The tensors don't fit together, or the result hasn't the parameter's shape.
        """
        weight = self._weights[name]
        parts = []
        for part in weight.names:
            numbers = self._checkpoint.read_numbers(self._stored_names[part])
            if scheme.dtype_name == "int4":
                self._checkpoint.check_int4(part, numbers)
            parts.append(numbers)
        try:
            values = weight.arrange([part.values for part in parts])
            scales = weight.arrange([part.scales for part in parts])
        except (IndexError, ValueError) as error:
            raise ModelLoadError(f"{self._checkpoint.path}: {name} can't be made of what is stored: {error}") from error
        scales = scales.T if scales.ndim == 2 else scales
        want = (*shape[:-2], scheme.num_groups(shape[1]), shape[-1] if len(shape) == 3 else shape[0])
        if values.shape != shape or scales.shape != want:
            raise ModelLoadError(
                f"{self._checkpoint.path}: {name} must be numbers {list(shape)} and scales {list(want)} by the model's "
                f"config, got {list(values.shape)} and {list(scales.shape)}"
            )
        return QuantizedWeight(values, np.ascontiguousarray(scales))

    def tell_dequantized(self, name: str) -> None:
        """Says in the log, once, that a parameter is read as floats though it is stored as numbers."""
        stored = [self._stored_names[part] for part in self._weights[name].names]
        if not self._has_told and any(self._checkpoint.is_quantized(part) for part in stored):
            self._has_told = True
            _logger.info("%s, and what is like it, is stored as numbers and de-quantised when it is loaded", name)
