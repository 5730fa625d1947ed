"""The `fissile` command against a service that answers by rote: what is printed, and the exit code."""

import json
import re
import signal
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from fissile.cli import main
from fissile.cli.up import _heed_signals
from tests.fissile.conftest import FISSILE


def test_help_of_every_command():
    for name, command in main.commands.items():
        if command.add_help_option:  # others become a service, which has its own
            result = CliRunner().invoke(main, [name, "--help"])
            assert result.exit_code == 0 and len(result.output) > 100


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_the_end_of_a_terminal_ends_up_unless_nohup_says_otherwise(before, monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: before if number == signal.SIGHUP else signal.SIG_DFL)
    heeded = []
    monkeypatch.setattr(signal, "signal", lambda number, _: heeded.append(number))
    _heed_signals()
    assert heeded == [signal.SIGTERM] + [signal.SIGHUP] * (before == signal.SIG_DFL)


def test_importing_the_command_loads_neither_grpc_nor_rich():
    code = "import sys, fissile.cli; print([m for m in ('grpc', 'rich', 'google.protobuf') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", "--no-such"], "No such option"),
        (["generate", "x", "--max-tokens", "0"], "'--max-tokens'"),
        (["generate", "x", "--token-ids", "1"], "not both"),
        (["generate", "--token-ids", "1,a"], "must be numbers separated by commas"),
        (["generate", "x", "--regex", "a", "--choice", "b"], "exclude each other"),
        (["generate", "x", "--json-schema", "/no/such"], "No such file"),
        (["bench", "--rate", "1", "--concurrency", "2"], "exclude each other"),
        (["bench", "--input-length", "9-3"], "the first is not above the second"),
        (["generate", "x", "--timeout", "nan"], "Invalid value for '--timeout': nan is not a finite number."),
        (["bench", "--rate", "inf"], "Invalid value for '-r' / '--rate': inf is not a finite number."),
        (["top", "--interval", "1e999"], "Invalid value for '--interval': inf is not a finite number."),
        (["drain", "localhost:1", "--timeout", "nan"], "Invalid value for '--timeout': nan is not"),
        (["up", "--start-timeout", "-1"], "Invalid value for '--start-timeout': -1.0 is not in the range x>0."),
        (["up", "--drain-timeout", "inf"], "inf is not a finite number."),
        (["up", "--workers", "0"], "'-w' / '--workers'"),
        (["up", "--", "--host", "127.0.0.2"], "--host: said by FISSILE_WORKER_HOST in the environment"),
        (["up", "--", "--tls-client-ca=a"], "--tls-client-ca: said by FISSILE_WORKER_TLS_CLIENT_CA in the environment"),
        (["up", "--", "--port-file", "a"], "--port-file: `fissile up` has one of its own for each worker"),
        (["up", "--block-size", "16"], "What is meant for the workers goes after `--`."),
        (["nonsense"], "No such command"),
    ],
)
def test_wrong_usage_is_one_clear_line_and_exit_2(run, arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    (error,) = [line for line in result.output.splitlines() if line.startswith("Error:")]
    assert said in error


def test_ctrl_c_is_130_for_every_command(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fissile.Client.models", interrupted)
    result = run("models")
    assert (result.exit_code, result.output) == (130, "\n")


def test_what_no_message_can_hold_is_named_without_a_traceback(run):
    result = run("generate", "--token-ids", "1,-1")
    assert result.exit_code == 1
    assert result.output == "Error: invalid argument: prompt[1]: -1 is not an integer from 0 to 4294967295\n"


def test_generate_streams_the_text(run):
    assert run("generate", "one two").output == "one two\n"


def test_generate_from_stdin(run):
    assert run("generate", stdin="three four").output == "three four\n"


def test_generate_token_ids(run):
    assert run("generate", "--token-ids", "5, 6").output == "5 6\n"


def test_generate_json_is_one_object(run):
    answer = json.loads(run("generate", "one two", "--json").output)
    assert answer["completions"][0]["token_ids"] == [0, 1]
    assert answer["usage"]["num_cached_tokens"] == 1


def test_what_is_asked_for_reaches_the_request(run, service, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    numbers = ["--min-p", "0.5", "--repetition-penalty", "1.5", "--presence-penalty", "-1", "--frequency-penalty", "2"]
    run("generate", "x", *numbers, "--bad-word", "a", "--bad-word", "b", "--json-schema", str(schema))
    run("generate", "x", "--regex", "a+")
    run("generate", "x", "--choice", "a", "--choice", "b")
    first, second, third = (request.options for request in service.requests)
    sampling = first.sampling
    assert (sampling.min_p, sampling.repetition_penalty) == (0.5, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 2)
    assert list(first.bad_words) == ["a", "b"]
    assert sampling.structured_output.json_schema == '{"type": "object"}'
    assert second.sampling.structured_output.regex == "a+"
    assert list(third.sampling.structured_output.choice.choices) == ["a", "b"]


def test_what_is_not_given_is_left_to_the_model(run, service):
    run("generate", "x")
    assert [field.name for field, _ in service.requests[0].options.sampling.ListFields()] == []


def test_a_schema_that_is_no_utf8(run, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_bytes(b'{"\xff')
    result = run("generate", "x", "--json-schema", str(schema))
    assert result.exit_code == 2
    assert "Invalid value for --json-schema: is no valid UTF-8 at byte 2" in result.output


def test_generate_logprobs(run):
    result = run("generate", "one two", "--logprobs", "1")
    assert result.stdout == "one two\n"
    assert result.stderr == "'\ufffd' 13.53% (rank 3)  'l' 36.79%\n" * 2
    answer = json.loads(run("generate", "one", "--logprobs", "0", "--json").stdout)
    assert answer["completions"][0]["logprobs"][0][0]["rank"] == 3


def test_generate_timings(run):
    result = run("generate", "one", "--timings")
    assert result.stdout == "one\n"
    assert result.stderr == "1 tokens in (1 cached) · 1 out · ended by stop_string · TTFT 250 ms · 0.7 tokens/s\n"


def test_a_servers_error_is_one_line_and_exit_1(run):
    result = run("generate", "fail")
    assert result.exit_code == 1
    assert result.output == "Error: invalid argument: options.sampling.top_p: must be in (0, 1], is 2\n"


@pytest.mark.parametrize("command", [["models"], ["stats"], ["generate", "x"], ["chat"], ["bench"]])
def test_nobody_there_is_a_hint_and_exit_1(command):
    result = CliRunner().invoke(main, [*command, "--address", "localhost:1"])
    assert result.exit_code == 1
    assert result.output == (
        "Error: no router at localhost:1. Start one with `fissile up`, or name another with --address.\n"
    )


def test_a_host_that_does_not_exist_is_said_to_be_none():
    result = CliRunner().invoke(main, ["models", "--address", "no-such-host.invalid"])
    assert result.exit_code == 1
    assert result.output == "Error: no router at no-such-host.invalid: there is no such host\n"


def test_tls_with_a_router_that_speaks_none_is_one_line(address):
    result = subprocess.run([FISSILE, "models", "--tls", "-a", address], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"Error: no router at {address}: the server does not speak TLS\n"


def test_an_address_that_is_none_is_refused():
    result = CliRunner().invoke(main, ["models", "--address", "http://localhost:50051"])
    assert result.exit_code == 1
    assert result.output == (
        "Error: invalid argument: address: 'http://localhost:50051' is a URL; wanted is HOST:PORT, with the gRPC port\n"
    )


@pytest.mark.parametrize("flags", [("-a", "localhost:1", "-a", "{}"), ("-a", "localhost:1,{}")])
def test_several_routers(address, flags):
    result = CliRunner().invoke(main, ["generate", "hello you", *(flag.format(address) for flag in flags)])
    assert (result.exit_code, "hello you" in result.output) == (0, True)


def test_prompt_that_is_no_utf8():
    result = subprocess.run([FISSILE, "generate"], input=b"ab\xff", capture_output=True)
    assert (result.returncode, result.stderr) == (1, b"Error: the prompt is no valid UTF-8 at byte 2\n")


def test_interrupt_ends_generate_with_130(address, service):
    process = subprocess.Popen([FISSILE, "generate", "slow", "-a", address], stdout=subprocess.PIPE)
    assert process.stdout.read(5) == b"slow "
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert service.cancelled.wait(5)


def test_no_models_is_said(run, monkeypatch):
    monkeypatch.setattr("fissile.Client.models", lambda *_, **__: ())
    assert "no model: the router has no worker yet" in run("models").output
    assert run("models", "--json").output == "[]\n"


def test_models(run):
    assert json.loads(run("models", "--json").output)[0]["id"] == "fake"
    shown = run("models").output
    assert "FakeForCausalLM" in shown
    about = "version canary: context 128 · float32 · workers 1\n    tokenizer cccccccccccc · weights bbbbbbbbbbbb\n"
    assert about in shown


def test_stats(run):
    assert json.loads(run("stats", "--json").output)["finished"] == {"eos": 7}
    shown = run("stats").output
    assert "KV blocks 5 of 10 used" in shown and "15 of 20 drafts right" in shown
    assert "127.0.0.1:50062\n  down: connection refused\n" in shown


def test_nothing_is_cut_in_a_narrow_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    shown = run("stats").output + run("models").output
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 60
    assert re.search(r"│ max\s+│ 1000\.0 │", shown)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(["genrate"], "'generate'"), (["up", "--worker"], "'--workers'"), (["generate", "x", "--sed", "1"], "'--seed'")],
)
def test_what_was_meant_is_suggested(run, arguments, meant):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Did you mean" in result.output and meant in result.output


def test_short_flags_mean_the_same_in_every_command():
    meanings = {}
    for command in main.commands.values():
        for parameter in command.params:
            for flag in parameter.opts:
                if not flag.startswith("--") and isinstance(parameter, click.Option):
                    meanings.setdefault(flag, set()).add(parameter.name)
    assert {flag: names for flag, names in meanings.items() if len(names) > 1} == {}
