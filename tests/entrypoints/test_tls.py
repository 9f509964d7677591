"""TLS: files that can't be used are refused by their flags' names; HTTPS works as the flags say."""

import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from jaxllm.entrypoints.tls import TlsFiles
from jaxllm.exceptions import ConfigError
from tests.fakes.certificates import make_certificate
from tests.fakes.fake_server import start_server


def test_no_flags_no_tls() -> None:
    assert TlsFiles.from_flags(None, None, None) is None


@pytest.mark.parametrize("flags", [("a", None, None), (None, "a", None), (None, None, "a"), ("a", None, "a")])
def test_a_part_isnt_enough(flags: tuple[str | None, str | None, str | None]) -> None:
    with pytest.raises(ConfigError, match="set --ssl-certfile and --ssl-keyfile"):
        TlsFiles.from_flags(*flags)


def test_files_that_cant_be_used(tmp_path: Path) -> None:
    (certificate, key), (_, other_key) = (make_certificate(tmp_path, name) for name in ("one", "two"))
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkcs8", "-topk8", "-in", key, "-out", locked, "-passout", "pass:secret"]
    subprocess.run(command, check=True, capture_output=True)
    TlsFiles(certfile=str(certificate), keyfile=str(key))
    for bad_key in (tmp_path / "none.key", other_key, certificate, locked):
        with pytest.raises(ConfigError, match="are no certificate with its key: .*; set --ssl-certfile"):
            TlsFiles(certfile=str(certificate), keyfile=str(bad_key))
    for bad_roots in (tmp_path / "none.crt", key):
        with pytest.raises(ConfigError, match="holds no certificates: .*; set --ssl-ca-certs"):
            TlsFiles(certfile=str(certificate), keyfile=str(key), ca_certs=str(bad_roots))


@pytest.mark.slow
def test_https_both_ways(tmp_path: Path) -> None:
    (certificate, key), (client, client_key) = (make_certificate(tmp_path, name) for name in ("server", "client"))
    flags = ["--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-ca-certs", client]
    with start_server("tests.fakes.fake_cores:AlphabetExecutor", *map(str, flags), waits=False) as server:
        url = server.url.replace("http:", "https:")
        known = ssl.create_default_context(cafile=str(certificate))
        known.load_cert_chain(client, client_key)
        with urllib.request.urlopen(url + "/live", context=known, timeout=60) as answer:
            assert answer.status == 200
        stranger = ssl.create_default_context(cafile=str(certificate))
        for context, bad_url in ((stranger, url), (None, server.url)):
            with pytest.raises((urllib.error.URLError, OSError)):
                urllib.request.urlopen(bad_url + "/live", context=context, timeout=60)
