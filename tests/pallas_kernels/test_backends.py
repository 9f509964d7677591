"""Which backend is chosen, by device, by environment and by argument."""

import pytest

from pallas_kernels import choose_backend, describe_backends
from pallas_kernels.backends import default_backend


@pytest.mark.parametrize(
    ("platform", "device_kind", "capability", "expected"),
    [
        ("cpu", "cpu", None, "xla"),
        ("gpu", "Tesla T4", "7.5", "xla"),
        ("gpu", "NVIDIA A100-SXM4-40GB", "8.0", "triton"),
        ("gpu", "NVIDIA B200", "10.0", "triton"),
        ("tpu", "TPU v5 lite", None, "tpu"),
        ("tpu", "TPU7x", None, "tpu"),
        ("tpu", "TPU v3", None, "xla"),
    ],
)
def test_the_device_decides(platform: str, device_kind: str, capability: str | None, expected: str) -> None:
    assert default_backend(platform, device_kind, capability) == expected


def test_argument_before_environment_before_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXLLM_ATTENTION", raising=False)
    assert choose_backend() == "xla"
    assert describe_backends() == ("kernel backend xla (default of cpu); available: tpu, triton, xla, reference")
    monkeypatch.setenv("JAXLLM_ATTENTION", "reference")
    assert choose_backend() == "reference"
    assert choose_backend("tpu") == "tpu"
    assert describe_backends().startswith("kernel backend reference (JAXLLM_ATTENTION=reference)")
    monkeypatch.setenv("JAXLLM_ATTENTION", "fast")
    with pytest.raises(ValueError, match="JAXLLM_ATTENTION must be one of tpu, triton, xla, reference, got 'fast'"):
        choose_backend()
