"""A client for scripts and notebooks: a few lines, text in and text out, over gRPC. Needs the `grpc` extra.

    with Client("localhost:50051") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)
        for piece in client.chat_stream("Name three colours."):
            print(piece.text, end="", flush=True)

Imports no engine and no jax.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

import grpc

from jaxllm.entrypoints.grpc_server import descriptors
from jaxllm.exceptions import EngineDeadError, InvalidRequestError, JaxllmError

_DETAILS_KEY = "grpc-status-details-bin"
_POLL_S = 0.5


class ServerError(JaxllmError):
    """The server didn't answer, or refused for a reason that isn't the request's.

    Attributes:
      code: gRPC's status code, such as "UNAVAILABLE".
      reason: The server's own word for it, such as "MODEL_LOADING" or "QUEUE_FULL"; empty if it said none.
      retry_after_s: When asking again may help, or None.
    """

    def __init__(self, message: str, code: str, reason: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.retry_after_s = retry_after_s


class Reply(NamedTuple):
    """What came back; in a stream, what is new.

    Attributes:
      text: The first completion's text.
      message: The whole jaxllm.v1 message: completions or choices, token_ids, logprobs, usage.
    """

    text: str
    message: Any


class Client(AbstractContextManager["Client"]):
    """A connection to one server. Threads may share it.

    Args:
      target: host:port, or unix:/path.
      api_key: Sent with each call.
      timeout_s: Deadline of each call, None for none. The server ends a request whose deadline has passed.
      credentials: For a server that speaks TLS: grpc.ssl_channel_credentials().
    """

    def __init__(
        self,
        target: str = "localhost:50051",
        api_key: str | None = None,
        timeout_s: float | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        options = (("grpc.max_receive_message_length", -1),)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options)
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._timeout_s = timeout_s
        self._calls = {method.name: self._make_call(method) for method in _SERVICE.methods}

    def generate(self, prompt: str | Sequence[int], *, request_id: str = "", **sampling_params: Any) -> Reply:
        """Answers a prompt, text or token ids.

        Args:
          prompt: Text or token ids.
          request_id: A name for `abort`.
          **sampling_params: Fields of jaxllm.v1.SamplingParams: max_tokens, temperature, top_p, n, seed, stop, ...

        Raises:
          InvalidRequestError: The request breaks a rule.
          ServerError: The server can't be reached, is loading, full or has failed, or the deadline has passed.
        """
        message = self._call("Generate", _generate_request(prompt, request_id, sampling_params))
        return Reply(message.completions[0].text, message)

    def generate_stream(
        self, prompt: str | Sequence[int], *, request_id: str = "", **sampling_params: Any
    ) -> Iterator[Reply]:
        """Yields the answer piece by piece. Leaving the loop ends the request."""
        for message in self._stream("GenerateStream", _generate_request(prompt, request_id, sampling_params)):
            yield Reply("".join(part.text for part in message.completions if part.index == 0), message)

    def chat(
        self, messages: str | Sequence[Mapping[str, str]], *, request_id: str = "", **sampling_params: Any
    ) -> Reply:
        """Answers a conversation, [{"role": ..., "content": ...}, ...]; a text is what a user says."""
        message = self._call("Chat", _chat_request(messages, request_id, sampling_params))
        return Reply(message.choices[0].message.content, message)

    def chat_stream(
        self, messages: str | Sequence[Mapping[str, str]], *, request_id: str = "", **sampling_params: Any
    ) -> Iterator[Reply]:
        """Yields the answer piece by piece. Leaving the loop ends the request."""
        for message in self._stream("ChatStream", _chat_request(messages, request_id, sampling_params)):
            yield Reply("".join(part.message.content for part in message.choices if part.index == 0), message)

    def tokenize(self, text: str) -> list[int]:
        return list(self._call("Tokenize", _request("Tokenize", text=text)).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return str(self._call("Detokenize", _request("Detokenize", token_ids=token_ids)).text)

    def list_models(self) -> list[str]:
        """Returns the names under which the server's model can be asked for."""
        return [model.id for model in self._call("ListModels", _request("ListModels")).models]

    def abort(self, *request_ids: str) -> list[str]:
        """Ends requests by their names and returns those names that had any."""
        return list(self._call("Abort", _request("Abort", request_ids=request_ids)).aborted_request_ids)

    def status(self) -> Any:
        """Returns a jaxllm.v1.GetStatusResponse: phase, percent, eta_s, detail and more."""
        return self._call("GetStatus", _request("GetStatus"))

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Waits until the server is there and its model is loaded.

        Raises:
          EngineDeadError: The engine has failed.
          TimeoutError: It isn't ready in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            phase, detail = self._phase()
            if phase == "ready":
                return
            if phase == "dead":
                raise EngineDeadError(f"the server's engine has failed: {detail}")
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"the server isn't ready after {timeout_s:g} s: {detail}")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Ends the connection, and whatever runs on it."""
        self._channel.close()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _phase(self) -> tuple[str, str]:
        try:
            status = self.status()
        except ServerError as error:
            if error.code != "UNAVAILABLE":
                raise
            return "absent", str(error)
        return status.phase, status.detail

    def _make_call(self, method: Any) -> Any:
        make = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        return make(
            f"/{_SERVICE.full_name}/{method.name}",
            request_serializer=descriptors.message_class(method.input_type.full_name).SerializeToString,
            response_deserializer=descriptors.message_class(method.output_type.full_name).FromString,
        )

    def _call(self, name: str, request: Any) -> Any:
        try:
            return self._calls[name](request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _to_exception(error) from None

    def _stream(self, name: str, request: Any) -> Iterator[Any]:
        call = self._calls[name](request, timeout=self._timeout_s, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise _to_exception(error) from None
        finally:
            call.cancel()


_SERVICE = descriptors.service(descriptors.INFERENCE)


def _request(method: str, **fields: Any) -> Any:
    return descriptors.message_class(f"jaxllm.v1.{method}Request")(**fields)


def _generate_request(prompt: str | Sequence[int], request_id: str, sampling_params: Mapping[str, Any]) -> Any:
    params = _sampling_params(sampling_params)
    if isinstance(prompt, str):
        return _request("Generate", text=prompt, request_id=request_id, sampling_params=params)
    return _request("Generate", token_ids={"ids": prompt}, request_id=request_id, sampling_params=params)


def _chat_request(
    messages: str | Sequence[Mapping[str, str]], request_id: str, sampling_params: Mapping[str, Any]
) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    plain = [dict(message) for message in messages]
    return _request("Chat", messages=plain, request_id=request_id, sampling_params=_sampling_params(sampling_params))


def _sampling_params(given: Mapping[str, Any]) -> Any:
    message_class = descriptors.message_class("jaxllm.v1.SamplingParams")
    known = message_class.DESCRIPTOR.fields_by_name
    for name, value in given.items():
        if name not in known:
            raise InvalidRequestError(f"unknown sampling parameter {name}; known: {', '.join(known)}", name)
        if name == "stop" and isinstance(value, str):
            given = {**given, "stop": [value]}
    try:
        return message_class(**given)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"a sampling parameter has a value of the wrong kind: {error}") from None


def _to_exception(error: grpc.RpcError) -> JaxllmError:
    """Returns the error that the server meant."""
    message, code = error.details() or "", error.code()
    status = descriptors.message_class("google.rpc.Status")()
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == _DETAILS_KEY:
            status.ParseFromString(value)
    details = {detail.type_url.rpartition(".")[2]: detail for detail in status.details}
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        violations = _unpacked(details, "BadRequest").field_violations
        return InvalidRequestError(message, violations[0].field if violations else None)
    retry_after_s = _unpacked(details, "RetryInfo").retry_delay.ToMilliseconds() / 1000 or None
    return ServerError(message, code.name, _unpacked(details, "ErrorInfo").reason, retry_after_s)


def _unpacked(details: Mapping[str, Any], name: str) -> Any:
    """Returns one of the details; an empty one if it isn't among them."""
    message = descriptors.message_class(f"google.rpc.{name}")()
    if name in details:
        details[name].Unpack(message)
    return message
