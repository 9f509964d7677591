"""The host benchmark with a clock that is made up."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.bench import executor_cost, host
from jaxllm.bench.__main__ import main

ROOT = Path(__file__).parents[2]


def test_every_timed_step_decodes_one_token_a_sequence() -> None:
    loop = host.HostLoop(24)
    loop.run_to_decode()
    for _ in range(20):
        step, times = loop.step()
        assert step.num_scheduled_tokens == dict.fromkeys(range(24), 1)
        assert step.new_seqs == [] and step.dropped_seq_ids == []
        assert len(times) == 4


def test_the_device_is_not_timed() -> None:
    # The clock is read around schedule, prepare, the device, update and output: 1, 2, 3, 4 and 5 ms.
    now_ns = itertools.accumulate(itertools.chain([0], itertools.cycle([1, 2, 3, 4, 5, 0])))
    times = host.measure(2, num_steps=3, clock_ns=lambda: next(now_ns) * 1_000_000)
    assert times == host.HostTimes(num_seqs=2, schedule=1000, prepare=2000, update=4000, output=5000, total=7000)


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("host --json --num-seqs 1 3 --steps 2".split()) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["num_seqs"] for result in results] == [1, 3]
    assert all(sorted(result) == ["num_seqs", "output", "prepare", "schedule", "total", "update"] for result in results)


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = host.HostTimes(num_seqs=64, schedule=1.4, prepare=20.6, update=300.0, output=4.0, total=322.0)
    monkeypatch.setattr(host, "measure", lambda num_seqs, num_steps: times)
    assert main("host --num-seqs 64".split()) == 0
    assert capsys.readouterr().out == (
        "microseconds a step\n"
        "    seqs  schedule   prepare    update     total    output\n"
        "      64         1        21       300       322         4\n"
    )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--num-seqs 0", "must be an integer of at least 1, got '0'"),
        ("--steps 513", "must be at most 512, got 513"),
        ("--step 3", "unknown flag --step"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(argv: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["host", *argv.split()])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_the_other_benchmarks_load_no_device_side() -> None:
    code = "import sys, jaxllm.bench.__main__; print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "False\n"


def test_what_worker_processes_add(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("host --executor mp --num-seqs 4 --steps 3 --json".split()) == 0
    (line,) = capsys.readouterr().out.splitlines()
    times = json.loads(line)
    assert times["num_seqs"] == 4
    assert times["added"] == times["other"] - times["uni"]
    assert times["other"] > 0 and times["uni"] > 0


def test_the_table_of_executors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = executor_cost.ExecutorTimes(num_seqs=64, uni=15.4, other=217.0, added=201.6)
    monkeypatch.setattr(executor_cost, "measure", lambda backend, num_seqs, num_steps: times)
    assert main("host --executor mp --num-seqs 64".split()) == 0
    assert capsys.readouterr().out == (
        "microseconds a step, 2 workers\n"
        "    seqs       uni        mp     added\n"
        "      64        15       217       202\n"
    )
