"""The picture of a run: how latencies are spread, and how many tokens came in each second. Needs matplotlib."""

from collections.abc import Sequence

from jaxllm.bench.serve_result import RequestResult
from jaxllm.exceptions import ConfigError


def check_matplotlib() -> None:
    """Raises ConfigError if there is no matplotlib: before the run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("--plot needs matplotlib: install 'jaxllm[bench]'") from None


def plot(results: Sequence[RequestResult], path: str) -> None:
    """Writes a picture; the suffix of `path` says of what kind."""
    from matplotlib.figure import Figure

    done = [result for result in results if result.is_success]
    figure = Figure(figsize=(12, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _plot_spread(left, [1000 * result.ttft for result in done], "time to first token, ms")
    _plot_spread(middle, [1000 * gap for result in done for gap in result.itl], "inter-token latency, ms")
    begin_s = min((result.start_s for result in done), default=0.0)
    moments = []
    for result in done:
        moment_s = result.start_s + result.ttft - begin_s
        for gap in (0.0, *result.itl):
            moment_s += gap
            moments.append(moment_s)
    right.hist(moments, bins=max(1, min(100, int(max(moments, default=1)) + 1)))
    right.set_xlabel("second of the run")
    right.set_ylabel("output tokens")
    figure.savefig(path)


def _plot_spread(axes, values: Sequence[float], label: str) -> None:  # type: ignore[no-untyped-def]
    ordered = sorted(values)
    axes.plot(ordered, [100 * (index + 1) / len(ordered) for index in range(len(ordered))])
    axes.set_xlabel(label)
    axes.set_ylabel("% of values at most this")
    axes.grid(True)
