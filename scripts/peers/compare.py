"""Runs jaxllm and vLLM in turn on the same prompts and prints their decode speeds side by side.

Both get token ids, generate greedily past end-of-sequence without making text, warm up first and keep 1 GiB
of KV cache; of the timed runs in a process the fastest counts. jaxllm runs in float32, its default on CPU, and in
bfloat16, the peer's type. vLLM leaves one core to its scheduler unless told otherwise, which helps or harms by batch
size and machine: it runs as it comes and on all cores. Ratios are to the faster of the two. Progress goes to stderr.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from export_hf import export_hf

ROOT = Path(__file__).parents[2]
PEER = ROOT / ".peers" / "vllm"
PROMPTS = ROOT / "tests" / "golden" / "smollm2-135m-instruct-q4_1.json"
MAX_MODEL_LEN = 1024
KV_CACHE_MEMORY_BYTES = 1 << 30
DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/compare_peers", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="as jaxllm's --model (default: smollm2)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 32, 64], metavar="N")
    parser.add_argument("--output-len", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="timed runs in each process")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()

    export_hf(args.model, PEER / "models" / Path(args.model).stem)
    cases = json.loads(PROMPTS.read_text(encoding="utf-8"))["cases"]
    prompts = [case["prompt_token_ids"] for case in cases]
    rows = []
    for concurrency in args.concurrency:
        batch = [prompts[idx % len(prompts)] for idx in range(concurrency)]
        with tempfile.TemporaryDirectory() as folder:
            row = {f"jaxllm {dtype}": measure_jaxllm(args, batch, Path(folder), dtype) for dtype in DTYPES}
            row |= {
                f"vLLM on {name}": measure_vllm(args, batch, Path(folder), cores)
                for name, cores in (("default cores", "auto"), ("all cores", all_cores()))
            }
        rows.append({"sequences": concurrency, **row, **ratios(row)})
    sys.stdout.write((json.dumps(rows) if args.json else table(rows)) + "\n")


def measure_jaxllm(args: argparse.Namespace, prompts: list[list[int]], folder: Path, dtype: str) -> float:
    """Returns output tokens a second."""
    progress(f"jaxllm in {dtype}, {len(prompts)} sequences")
    prompts_file = folder / "prompts.jsonl"
    prompts_file.write_text("".join(f"{prompt}\n" for prompt in prompts), encoding="utf-8")
    flags = {
        "--model": args.model,
        "--dtype": dtype,
        "--prompts-file": prompts_file,
        "--output-len": args.output_len,
        "--repeats": args.repeats,
        "--max-num-seqs": len(prompts),
        "--max-model-len": MAX_MODEL_LEN,
        "--kv-cache-memory": KV_CACHE_MEMORY_BYTES,
    }
    command = [sys.executable, "-m", "jaxllm.bench", "throughput", "--json", "--disable-detokenize"]
    command += [str(word) for flag in flags.items() for word in flag]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    speed = float(json.loads(done.stdout)["output_tokens_per_second"])
    progress(f"jaxllm in {dtype}: {speed:.1f} output tokens/s")
    return speed


def measure_vllm(args: argparse.Namespace, prompts: list[list[int]], folder: Path, cores: str) -> float:
    """Returns output tokens a second. The peer's own log is shown only if it fails.

    Args:
      cores: What the peer computes on: "auto", or core numbers such as "0,1".
    """
    progress(f"vllm on cores {cores}, {len(prompts)} sequences")
    job = {
        "model": str(PEER / "models" / Path(args.model).stem),
        "prompts": prompts,
        "output_len": args.output_len,
        "repeats": args.repeats,
        "max_num_seqs": len(prompts),
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": KV_CACHE_MEMORY_BYTES,
    }
    job_file, result_file = folder / "job.json", folder / f"result-{cores}.json"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    command = [
        PEER / "env" / "bin" / "python",
        Path(__file__).with_name("vllm_throughput.py"),
        job_file,
        result_file,
    ]
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CACHE_ROOT": str(PEER / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not result_file.exists():
        sys.exit(f"{done.stdout}\nvllm failed, exit code {done.returncode}")
    speed = float(json.loads(result_file.read_text(encoding="utf-8"))["output_tokens_per_second"])
    progress(f"vllm on cores {cores}: {speed:.1f} output tokens/s")
    return speed


def all_cores() -> str:
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


def ratios(row: dict[str, float]) -> dict[str, float]:
    """Returns our speeds as shares of the peer's better one."""
    peer = max(speed for name, speed in row.items() if name.startswith("vLLM"))
    return {f"ratio {dtype}": row[f"jaxllm {dtype}"] / peer for dtype in DTYPES}


def table(rows: list[dict[str, float]]) -> str:
    """Returns a markdown table: output tokens a second, and ratios."""
    lines = [f"| {' | '.join(rows[0])} |", "|---:" * len(rows[0]) + "|"]
    for row in rows:
        cells = [f"{value:.2f}" if name.startswith("ratio") else f"{value:.0f}" for name, value in row.items()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def progress(line: str) -> None:
    sys.stderr.write(f"compare_peers: {line}\n")


if __name__ == "__main__":
    main()
