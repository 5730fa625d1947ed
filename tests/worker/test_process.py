"""The worker as a process with the real model: start, answer, stop, and every way not to start."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fissile.channel import channel
from fissile.healthcheck import health
from fissile.v1 import (
    ExecuteCommand,
    ExecuteRequest,
    FinishReason,
    GetWorkerRequest,
    SamplingParams,
    Sequence,
    SequenceGroup,
    WorkerServiceStub,
)
from tests.fakes.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
START_SECONDS = 120
# "The capital of France is" in SmolLM2's tokens; greedy decoding goes on with " Paris".
PROMPT, PARIS = [504, 3575, 282, 4649, 314], 7042


@contextlib.contextmanager
def worker(port_file, *flags):
    process = subprocess.Popen(
        [sys.executable, "-m", "worker", "--port", "0", "--port-file", str(port_file), "--num-threads", "1",
         "--num-blocks", "256", *flags],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_serving(process, port_file):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if port_file.exists() and health(address := f"127.0.0.1:{port_file.read_text().strip()}") == "SERVING":
            return address
        time.sleep(0.1)
    raise AssertionError(f"not serving; exit code {process.poll()}")


def execute(stub, *groups):
    request = ExecuteRequest(commands=[ExecuteCommand(group=group) for group in groups])
    return stub.Execute(iter([request]), timeout=60)


def test_it_starts_answers_and_stops(tmp_path):
    port_file = tmp_path / "port"
    greedy = SamplingParams(temperature=0)
    with worker(port_file, "--log-format", "json") as process:
        address = wait_until_serving(process, port_file)
        with channel(address) as connection:
            stub = WorkerServiceStub(connection)
            assert stub.GetWorker(GetWorkerRequest()).model == "smollm2"
            group = SequenceGroup(prompt_token_ids=PROMPT, sequences=[Sequence(id=1)], max_tokens=1, sampling=greedy)
            outputs = [output for response in execute(stub, group) for output in response.outputs]
        assert [list(output.token_ids) for output in outputs] == [[PARIS]]
        assert outputs[0].finish_reason == FinishReason.FINISH_REASON_LENGTH
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    entries = [json.loads(line) for line in errors.splitlines()]
    assert entries[-1]["message"] == "stopped"
    assert "worker.runner.rank" in {entry["logger"] for entry in entries}
    assert "Traceback" not in errors
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_device_process_that_is_killed_ends_the_worker_with_an_error(tmp_path, is_idle):
    port_file, model = tmp_path / "port", write_tiny_model(tmp_path / "model")
    ends = []
    with worker(port_file, "--model", str(model), "--load-format", "dummy") as process:
        address = wait_until_serving(process, port_file)
        (rank,) = psutil.Process(process.pid).children()
        with channel(address) as connection:
            if is_idle:
                os.kill(rank.pid, signal.SIGKILL)
            else:
                group = SequenceGroup(
                    prompt_token_ids=[1, 2], sequences=[Sequence(id=1)], max_tokens=4000, ignore_eos=True
                )
                with contextlib.suppress(Exception):
                    for number, response in enumerate(execute(WorkerServiceStub(connection), group)):
                        ends += [output for output in response.outputs if output.finish_reason]
                        if number == 3:
                            os.kill(rank.pid, signal.SIGKILL)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.rstrip().splitlines()[-1] == "worker: rank 0 was killed by signal 9"
    if not is_idle:
        (end,) = ends
        assert end.finish_reason == FinishReason.FINISH_REASON_ERROR
        assert end.detail == "the worker failed: rank 0 was killed by signal 9"


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--model", "no-such-model"], 1, "worker: no model 'no-such-model'"),
        (["--model", "no-such-model", "--log-format", "json"], 1, '"message": "worker: no model \'no-such-model\''),
        (["--tensor-parallel-size", "100"], 1, "worker: tensor_parallel_size 100: the 9 attention heads of Llama"),
        (["--max-model-len", "100000"], 1, "worker: max_model_len 100000 is more than the model's own 8192"),
        (["--block-size", "7"], 2, "block_size: is 7; 1 or a multiple of 16 is needed"),
        (["--nonsense"], 2, "No such option"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(tmp_path, flags, code, said):
    with worker(tmp_path / "port", *flags) as process:
        _, errors = process.communicate(timeout=START_SECONDS)
    assert process.returncode == code
    assert said in errors.rstrip().splitlines()[-1]
    assert "Traceback" not in errors


def test_a_model_that_cannot_be_served_is_named_by_file_field_and_value(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "squeeze"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with worker(tmp_path / "port", "--model", str(tmp_path)) as process:
        _, errors = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 1
    assert errors.rstrip().splitlines()[-1] == (
        "worker: config.json: quantization_config.quant_method is 'squeeze'; one of awq, compressed-tensors, "
        "fbgemm_fp8, fp8, gptq, mxfp4 is needed"
    )
    assert "Traceback" not in errors


def test_a_port_that_is_taken_says_so():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "worker", "--port", str(port)], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1] == f"worker: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_help_names_every_flag():
    done = subprocess.run([sys.executable, "-m", "worker", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "--scheduling-policy" in done.stdout and "Longest context in tokens" in done.stdout
