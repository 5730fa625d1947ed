"""The commands against a service that wants TLS and a certificate of its clients, or an API key."""

import pytest
from click.testing import CliRunner

from common.authentication import digest_of
from fissile.cli import main
from fissile.tls import ClientTls
from router.callers.caller import Caller
from router.callers.key_file import parse_keys
from tests.fakes.certificates import Authority
from tests.fissile.fake_service import FakeService, serve

COMMANDS = {
    "generate": ("generate", "hello"),
    "chat": ("chat",),
    "models": ("models",),
    "stats": ("stats",),
    "bench": ("bench", "-n", "1", "-i", "4", "-o", "2", "--warmup", "0"),
}


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "ca")


@pytest.fixture
def address(authority):
    with serve(FakeService(), authority.server("localhost", mutual=True)) as bound:
        yield bound


def run(address, *arguments, **environment):
    return CliRunner().invoke(main, [*arguments, "-a", address], input="hello\n", env=environment)


def flags(tls: ClientTls) -> tuple[str, ...]:
    return "--tls-ca", str(tls.ca), "--tls-certificate", str(tls.certificate), "--tls-key", str(tls.key)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_certificate_is_shown(name, address, authority):
    result = run(address, *COMMANDS[name], *flags(authority.client(with_certificate=True)))
    assert result.exit_code == 0, result.output


def test_files_may_come_from_the_environment(address, authority):
    tls = authority.client(with_certificate=True)
    environment = {
        "FISSILE_TLS_CA": str(tls.ca),
        "FISSILE_TLS_CERTIFICATE": str(tls.certificate),
        "FISSILE_TLS_KEY": str(tls.key),
    }
    assert run(address, "models", **environment).exit_code == 0
    assert run(address, "models", "--no-tls", **environment).exit_code == 1


@pytest.mark.parametrize("without", ["--tls-key", "--tls-certificate"])
def test_half_a_pair_is_refused(without, address, authority):
    given = flags(authority.client(with_certificate=True))
    at = given.index(without)
    result = run(address, "models", *given[:at], *given[at + 2 :])
    assert result.exit_code == 2 and "--tls-certificate and --tls-key go together" in result.output


def test_a_client_without_certificate_is_told_in_one_line(address, authority):
    result = run(address, "generate", "hello", "--timeout", "5", "--tls-ca", str(authority.certificate))
    assert result.exit_code == 1 and len(result.output.strip().splitlines()) == 1, result.output


def test_a_file_that_is_not_there_is_named():
    result = run("localhost:1", "models", "--tls-ca", "/no/such/file")
    assert result.exit_code == 2 and "'/no/such/file' does not exist" in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_a_key_is_shown(name):
    with serve(FakeService(), api_key="secret") as address:
        result = run(address, *COMMANDS[name], "--api-key", "secret")
        assert result.exit_code == 0, result.output


def test_a_key_may_come_from_the_environment_and_a_wrong_one_is_told_in_one_line():
    with serve(FakeService(), api_key="secret") as address:
        assert run(address, "models", FISSILE_API_KEY="secret").exit_code == 0
        result = run(address, "models", FISSILE_API_KEY="other")
    assert result.exit_code == 1
    assert result.output == "Error: unauthenticated: authorization: a valid API key is needed\n"


def test_a_key_is_an_entry_of_the_routers_file_and_the_secret_apart():
    made = [CliRunner().invoke(main, ["key", *given]) for given in (['a "b" ü'], ["c", "--tenant", ""])]
    first, second = (result.stderr.strip() for result in made)
    assert parse_keys("".join(result.stdout for result in made).encode()) == {
        digest_of(first): Caller('a "b" ü', 'a "b" ü'),
        digest_of(second): Caller("c", ""),
    }
    assert first not in made[0].stdout and len(first) >= 40


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 65])
def test_a_key_with_a_name_that_the_router_would_refuse_is_not_made(name):
    assert CliRunner().invoke(main, ["key", name]).exit_code == 2
