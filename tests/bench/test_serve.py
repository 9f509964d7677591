"""bench serve: its figures on hand-written runs, its load, and the whole of it against a server process."""

import asyncio
import json
import random
import statistics
from pathlib import Path

import pytest

from jaxllm.bench.http_client import HttpError, get_json, parse_base_url, post_json, post_stream
from jaxllm.bench.serve import main
from jaxllm.bench.serve_load import Load, start_times
from jaxllm.bench.serve_result import METRICS, RequestResult, percentile, summarize, to_table
from tests.fakes.fake_server import start_server

RESULTS = [
    RequestResult(10, 100.0, True, "", 3, 0.1, [0.2, 0.4], 0.7, "abc"),
    RequestResult(20, 100.5, True, "", 1, 0.3, [], 0.3, "a"),
    RequestResult(30, 100.0, False, "refused"),
]


def test_the_summary_of_a_run_by_hand() -> None:
    summary = summarize(RESULTS, 2.0, [50.0, 99.9], METRICS)
    assert summary["completed"] == 2 and summary["failed"] == 1
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (30, 4)
    assert (summary["request_throughput"], summary["output_throughput"]) == (1.0, 2.0)
    assert summary["total_token_throughput"] == 17.0
    assert summary["max_concurrent_requests"] == 2
    assert summary["max_output_tokens_per_s"] == 4.0  # at 0.1, 0.3, 0.7 and 0.8 s
    assert summary["mean_ttft_ms"] == pytest.approx(200.0)
    assert summary["std_ttft_ms"] == pytest.approx(100.0)
    assert summary["mean_tpot_ms"] == summary["p50_tpot_ms"] == pytest.approx(300.0)
    assert summary["median_itl_ms"] == pytest.approx(300.0)
    assert summary["mean_e2el_ms"] == pytest.approx(500.0)
    assert summary["p99.9_itl_ms"] == pytest.approx(200 + 200 * 0.999)
    table = to_table(summary, [50.0, 99.9], METRICS)
    assert "Successful requests:                     2 " in table
    assert "P99.9 ITL (ms):" in table and "Mean TTFT (ms):                          200.00" in table


@pytest.mark.parametrize(("percent", "expected"), [(0, 1), (50, 2.5), (100, 4), (90, 3.7)])
def test_percentiles_lie_between_their_neighbours(percent: float, expected: float) -> None:
    assert percentile([4, 1, 3, 2], percent) == pytest.approx(expected)


def test_requests_come_at_their_rate() -> None:
    assert start_times(3, Load(request_rate=float("inf"), burstiness=1.0, max_concurrency=None), 0) == [0.0] * 3
    for burstiness in (0.25, 1.0, 16.0):
        times = start_times(4000, Load(request_rate=10.0, burstiness=burstiness, max_concurrency=None), 1)
        gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.15)
        # A gamma distribution's deviation is its mean divided by the root of its shape.
        assert statistics.pstdev(gaps) == pytest.approx(0.1 / burstiness**0.5, rel=0.2)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an http"):
        parse_base_url(url, {})


def test_the_client_reads_answers_however_they_are_cut() -> None:
    draw = random.Random(0)
    events = b"".join(b'data: {"n": %d}\n\n' % number for number in range(50)) + b"data: [DONE]\n\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/missing" in head:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone")
        elif b"/broken" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndat")
        elif b"/plain" in head:
            writer.write(b'HTTP/1.1 200 OK\r\n\r\n{"a": 1}')
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            rest = events
            while rest:
                size = draw.randint(1, 30)
                piece, rest = rest[:size], rest[size:]
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            server = parse_base_url(f"http://127.0.0.1:{port}", {})
            numbers = [chunk["n"] async for chunk in post_stream(server, "/stream", {})]
            assert numbers == list(range(50))
            assert await get_json(server, "/plain") == {"a": 1}
            with pytest.raises(HttpError, match="404: none"):
                await post_json(server, "/missing", {})
            with pytest.raises(HttpError, match="broke off"):
                await post_json(server, "/broken", {})

    asyncio.run(run())


@pytest.mark.slow
def test_the_whole_against_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, picture = tmp_path / "result.json", tmp_path / "run.svg"
    with start_server("tests.fakes.fake_cores:AlphabetExecutor") as server:
        flags = ["--base-url", server.url, "--num-prompts", "12", "--random-input-len", "20", "--max-concurrency", "4"]
        flags += ["--random-output-len", "8", "--result-filename", str(result), "--plot", str(picture)]
        assert main(flags) == 0
        assert main([*flags[:4], "--backend", "chat", "--random-output-len", "3"]) == 0
        assert main(["--base-url", server.url + "/nowhere"]) == 2
    out, err = capsys.readouterr()
    assert "Successful requests:                     12" in out
    assert "error: 404" in err
    record = json.loads(result.read_text())
    assert (record["completed"], record["failed"], record["model_id"]) == (12, 0, "fake")
    assert (record["total_input_tokens"], record["total_output_tokens"]) == (240, 96)
    assert record["output_lens"] == [8] * 12
    assert all(1 <= len(itl) <= 7 for itl in record["itls"])  # tokens that came together share a chunk
    assert record["max_concurrent_requests"] <= 4
    assert {"p99_ttft_ms", "median_tpot_ms", "std_itl_ms", "mean_e2el_ms"} <= set(record)
    assert picture.read_text().lstrip().startswith("<?xml")
