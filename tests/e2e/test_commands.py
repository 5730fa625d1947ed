"""The `fissile` command against real services."""

import json
import os
import subprocess
import sys
from pathlib import Path

FISSILE = str(Path(sys.executable).parent / "fissile")


def fissile(cluster, *arguments, stdin=None):
    environment = {**os.environ, "FISSILE_ADDRESS": cluster.router_address}
    return subprocess.run(
        [FISSILE, *arguments], env=environment, input=stdin, capture_output=True, text=True, timeout=120
    )


def test_generate(cluster):
    result = fissile(cluster, "generate", "The capital of France is", "--max-tokens", "3", "--temperature", "0")
    assert result.returncode == 0 and "Paris" in result.stdout, result


def test_chat_through_a_pipe(cluster):
    result = fissile(cluster, "chat", "--temperature", "0", stdin="What is the capital of France?\n/exit\n")
    assert result.returncode == 0 and "Paris" in result.stdout, result


def test_the_demo_with_weights_as_they_are_stored():
    """As a new user runs it: other tests have float32."""
    result = subprocess.run([FISSILE, "demo"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "Paris" in result.stdout, result


def test_bench_json(cluster):
    arguments = ("bench", "-n", "6", "-c", "3", "-i", "16", "-o", "8", "--warmup", "0", "--json")
    result = fissile(cluster, *arguments)
    figures = json.loads(result.stdout)
    assert figures["num_requests"] == 6 and figures["num_errors"] == 0 and figures["output_tok_s"] > 0


def test_bench_open_loop(cluster):
    result = fissile(cluster, "bench", "-n", "6", "-r", "10", "-i", "8-24", "-o", "4", "--json")
    assert json.loads(result.stdout)["num_errors"] == 0, result


def test_no_router_is_one_clear_line():
    result = subprocess.run(
        [FISSILE, "generate", "x", "--address", "127.0.0.1:1", "--timeout", "3"], capture_output=True, text=True
    )
    assert result.returncode != 0
    assert result.stderr.startswith("Error: no router at 127.0.0.1:1. Start one with `fissile up`"), result.stderr
