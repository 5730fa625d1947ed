"""`python -m fissile.healthcheck`."""

from fissile.healthcheck import main
from tests.fissile.fake_service import FakeService, serve


def test_serving_exits_0_in_silence(capsys):
    with serve(FakeService()) as address:
        assert main([address]) == 0
    assert capsys.readouterr().err == ""


def test_unknown_service_exits_1(capsys):
    with serve(FakeService()) as address:
        assert main([address, "--service", "no.such"]) == 1
    assert capsys.readouterr().err == f"{address}: NOT_FOUND\n"


def test_nobody_there_exits_1(capsys):
    assert main(["localhost:1", "--wait", "0.3"]) == 1
    assert capsys.readouterr().err == "localhost:1: UNAVAILABLE\n"
