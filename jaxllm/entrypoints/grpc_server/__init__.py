"""The gRPC server, beside the HTTP one and on the same engine. Needs grpcio and protobuf (the `grpc` extra).

```
    server.py               starts everything: server, interceptor, services
    inference_service.py    jaxllm.v1.Inference: text, chat, tokens
    vllm_service.py         vllm.grpc.engine.VllmEngine: the contract that gateways know
    health.py               grpc.health.v1, with a Watch that watches
    reflection.py           grpc.reflection v1 and v1alpha
    engine_door.py          what both inference services ask the engine through
    convert.py              jaxllm.v1 messages <-> engine types; vllm_convert.py does it for the other contract
    deltas.py               outputs that hold everything -> what is new
    tokenizer_archive.py    the tokenizer as a zip archive, for gateways
    errors.py               our exceptions -> status codes with google.rpc details, in one table
    auth.py                 the API key
    rpc.py                  methods of ours -> handlers of grpc
    settings.py             what the server is started with
    descriptors.py          message classes, from protos/descriptors.binpb (scripts/build_protos makes it)
```
"""
