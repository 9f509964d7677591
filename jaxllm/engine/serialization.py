"""Messages <-> frames of bytes: msgpack with a schema on both ends, NumPy arrays as raw frames beside it. No pickle.

A decoder builds the types it was made for and nothing else; whatever it is fed, it returns one of them or raises
DecodeError.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
Frame = bytes | bytearray | memoryview

_ARRAY_KINDS = "biuf"  # bool, integers, floats: plain memory, no references


class DecodeError(Exception):
    """Frames that no encoder of ours has made."""


class MessageEncoder:
    """Makes frames. The first holds the message; each array in it is a further one, which isn't copied."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._to_plain)
        self._arrays: list[Frame] = []

    def encode(self, message: Any) -> list[Frame]:
        """Returns the message's frames. Arrays must not change until they have been sent.

        Raises:
          TypeError, ValueError, OverflowError: The message holds what msgpack can't, such as an integer over 64 bits.
        """
        self._arrays = []
        return [self._encoder.encode(message), *self._arrays]

    def _to_plain(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in _ARRAY_KINDS:
                raise TypeError(f"arrays of dtype {value.dtype} can't be sent")
            self._arrays.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            return value.dtype.str, value.shape, len(self._arrays)
        if isinstance(value, Path):
            return str(value)
        for plain in (int, float, str):  # msgspec refuses their subclasses, such as NumPy's float64
            if isinstance(value, plain):
                return plain(value)
        raise TypeError(f"{type(value).__name__} can't be sent")


class MessageDecoder(Generic[T]):
    """Takes frames apart.

    Args:
      message_type: A Struct, or a union of tagged ones.
    """

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type, dec_hook=self._from_plain)
        self._frames: Sequence[Frame] = ()

    def decode(self, frames: Sequence[Frame]) -> T:
        """Returns the message. Its arrays are read-only views of their frames.

        Raises:
          DecodeError: The frames aren't such a message.
        """
        self._frames = frames
        try:
            return self._decoder.decode(frames[0])
        except (ValueError, RecursionError, IndexError, TypeError) as error:  # msgspec's own are ValueErrors
            raise DecodeError(str(error)) from None
        finally:
            self._frames = ()

    def _from_plain(self, expected: Any, value: Any) -> Any:
        if expected is Path:
            return Path(_checked(value, str))
        if expected is np.ndarray:
            return self._array(value)
        raise TypeError(f"{expected} can't be received")

    def _array(self, value: Any) -> np.ndarray[Any, Any]:
        dtype_name, shape, index = msgspec.convert(value, tuple[str, tuple[int, ...], int])
        dtype = np.dtype(dtype_name)
        if dtype.kind not in _ARRAY_KINDS:
            raise ValueError(f"arrays of dtype {dtype_name} can't be received")
        if not 1 <= index < len(self._frames) or any(size < 0 for size in shape):
            raise ValueError(f"array {index} of shape {shape} has no frame")
        frame = memoryview(self._frames[index])
        if frame.nbytes != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"an array of shape {shape} and dtype {dtype_name} isn't {frame.nbytes} bytes")
        array = np.frombuffer(frame, dtype).reshape(shape)
        array.flags.writeable = False
        return array


def _checked(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value
