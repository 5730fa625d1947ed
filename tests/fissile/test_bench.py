"""`fissile bench`: its arithmetic with exact figures, its loops against the fake service."""

import asyncio
import io
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from fissile import AsyncClient
from fissile.cli import main
from fissile.cli.lengths import Lengths
from fissile.cli.load import LoadConfig, Outcome, Request, make_requests, measure, run_load
from fissile.cli.report import Goal, quantile, report
from fissile.cli.tables import STATISTICS, latency_table
from fissile.errors import UnavailableError

FISSILE = str(Path(sys.executable).parent / "fissile")


def config(**changes) -> LoadConfig:
    values = {
        "num_requests": 3,
        "input_length": Lengths.parse("4"),
        "output_length": Lengths.parse("2-5"),
        "rate": None,
        "concurrency": 1,
        "model": "",
        "seed": 7,
        "temperature": 0.0,
        "timeout": None,
    }
    return LoadConfig(**(values | changes))


@pytest.mark.parametrize(("text", "low", "high"), [("5", 5, 5), ("3-9", 3, 9), ("1-1", 1, 1)])
def test_lengths_stay_between_their_bounds(text, low, high):
    rng = random.Random(1)
    drawn = {Lengths.parse(text).draw(rng) for _ in range(200)}
    assert drawn == set(range(low, high + 1))


def test_normal_lengths_have_their_mean_and_are_at_least_1():
    rng = random.Random(1)
    drawn = [Lengths.parse("10~20").draw(rng) for _ in range(2000)]
    assert min(drawn) == 1 and 10 < sum(drawn) / len(drawn) < 15


@pytest.mark.parametrize("text", ["", "0", "-3", "9-3", "a", "5-b", "5~-1", "5~nan", "5~inf", "1-1e400", "99999999999"])
def test_wrong_lengths(text):
    with pytest.raises(ValueError):
        Lengths.parse(text)


def test_requests_are_different_and_repeat_with_the_seed():
    first, again = list(make_requests(config(), 50000)), list(make_requests(config(), 50000))
    assert first == again
    assert len({tuple(request.prompt) for request in first}) == 3
    assert list(make_requests(config(seed=8), 50000)) != first


def test_a_router_without_a_model_has_nothing_to_load():
    class Client:
        async def models(self, timeout):
            return ()

    with pytest.raises(UnavailableError, match="the router has no worker yet"):
        asyncio.run(run_load(Client(), config(), lambda _: None))


def test_what_no_message_can_hold_is_an_outcome(address):
    async def measured():
        async with AsyncClient(address) as client:
            return await measure(client, config(), Request([2**32], 1), 0.0)

    outcome = asyncio.run(measured())
    assert (outcome.error, outcome.complaint) == (
        "INVALID_ARGUMENT", "prompt[0]: 4294967296 is not an integer from 0 to 4294967295"
    )  # fmt: skip


def test_prompts_stay_inside_a_small_vocabulary():
    assert all(id_ < 10 for request in make_requests(config(), 10) for id_ in request.prompt)


@pytest.mark.parametrize(("share", "value"), [(0, 1.0), (0.5, 2.0), (0.75, 2.5), (1, 3.0)])
def test_quantile_is_linear_between_neighbours(share, value):
    assert quantile([1.0, 2.0, 3.0], share) == value


def test_latencies_count_from_the_due_time():
    outcome = Outcome(due=10.0, end=14.0, arrivals=[(12.0, 1), (13.0, 2), (13.5, 2)])
    assert outcome.ttft == 2.0
    assert outcome.tpot == 1.5 / 4
    assert outcome.itls == [1.0, 0.5]


def test_report_puts_errors_and_goodput_beside_the_throughput():
    outcomes = [
        Outcome(due=0.0, end=2.0, num_prompt_tokens=10, arrivals=[(1.0, 1), (2.0, 1)]),
        Outcome(due=1.0, end=4.0, num_prompt_tokens=10, arrivals=[(3.0, 1), (4.0, 1)]),
        Outcome(due=2.0, end=3.0, num_prompt_tokens=10, error="RESOURCE_EXHAUSTED"),
    ]
    figures = report(outcomes, Goal(ttft=1.5))
    assert (figures["num_errors"], figures["error_rate"]) == (1, 0.3333)
    assert figures["errors"] == {"RESOURCE_EXHAUSTED": 1}
    assert (figures["requests_s"], figures["goodput_requests_s"]) == (0.5, 0.25)
    assert (figures["output_tok_s"], figures["total_tok_s"]) == (1.0, 6.0)
    assert figures["ttft_ms"] == {"mean": 1500, "p50": 1500, "p90": 1900, "p95": 1950, "p99": 1990, "max": 2000}


def bench(address, *arguments):
    return CliRunner().invoke(main, ["bench", "-a", address, "--warmup", "1", "-i", "3-6", *arguments])


@pytest.mark.parametrize("loop", [["--concurrency", "3"], ["--rate", "200"]])
def test_loops_send_every_request_once(address, service, loop):
    figures = json.loads(bench(address, "-n", "10", "--json", *loop).stdout)
    assert (figures["num_requests"], figures["num_errors"]) == (10, 0)
    assert figures["num_output_tokens"] == figures["num_prompt_tokens"]  # the fake echoes
    assert len({tuple(request.tokens.token_ids) for request in service.requests}) == 11


def test_table_for_people(address):
    result = bench(address, "-n", "4")
    assert result.exit_code == 0
    assert "TTFT" in result.stdout and "4 requests in" in result.stdout


def test_no_digit_is_cut_in_60_columns():
    console = Console(width=60, file=io.StringIO())
    console.print(latency_table(dict.fromkeys(["TTFT", "TPOT", "ITL", "E2E"], dict.fromkeys(STATISTICS, 1234567.89))))
    assert console.file.getvalue().count("1234567.9") == 4 * len(STATISTICS)


@pytest.mark.parametrize("num_answered", [3, 0])
def test_an_interrupt_leaves_the_figures_so_far(address, service, num_answered):
    service.num_answered = num_answered
    command = [FISSILE, "bench", "-a", address, "-n", "5", "-c", "1", "--warmup", "0", "-i", "3", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(service.requests) <= num_answered:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err == f"interrupted after {num_answered} of 5 requests\n"
    assert not out if num_answered == 0 else json.loads(out)["num_requests"] == num_answered


def test_when_all_fail_the_reason_is_said_and_no_table(address):
    result = bench(address, "-n", "2", "-m", "other")
    assert (result.exit_code, result.stdout) == (1, "")
    said = "every request failed: {'NOT_FOUND': 2}; the first one: model 'other' is not served here"
    assert said in result.stderr
