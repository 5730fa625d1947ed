"""How ranks of other hosts join: who is let in, and that those who are not do no harm."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from common.config import parse_settings
from common.version import package_version
from tests.leaks import leaving_nothing_open
from worker.config import WorkerSettings
from worker.executor import listener as listening
from worker.executor.errors import ExecutorStartError
from worker.executor.remote import RankListener, RemoteRank, RemoteRanks
from worker.join import JoinError, JoinSettings, _introduce
from worker.processes import tcp
from worker.processes.messages import encode, receive, send
from worker.processes.tcp import HandshakeError, TcpConnection, accept, connect
from worker.runner.messages import Join

HOST = "127.0.0.1"
SECRET = b"a secret of ranks"
JOIN = Join(1, 2, package_version())


@pytest.fixture
def listener():
    made = RankListener(RemoteRanks(count=1, host=HOST, port=0, secret=SECRET), world_size=2)
    yield made
    made.close()


@contextmanager
def joining(port: int, message: Join = JOIN, secret: bytes = SECRET) -> Iterator[TcpConnection]:
    with closing(connect(HOST, port, secret)) as connection:
        send(connection, message)
        yield connection


def assert_a_rank_joins(listener: RankListener) -> None:
    with joining(listener.port), closing(listener.wait_for(1)) as joined:
        assert joined.peer == HOST


@pytest.fixture
def connected_pair() -> Iterator[tuple[TcpConnection, TcpConnection]]:
    """(the side that listened, the side that connected)."""
    sides: list[TcpConnection] = []
    with socket.create_server((HOST, 0)) as server:
        thread = threading.Thread(target=lambda: sides.append(accept(server.accept()[0], SECRET)))
        thread.start()
        other = connect(HOST, server.getsockname()[1], SECRET)
        thread.join()
    with closing(sides[0]), closing(other):
        yield sides[0], other


def test_messages_arrive_whole_and_in_order_both_ways(connected_pair):
    here, there = connected_pair
    for message in ("a", b"b" * 1_000_000, None):
        send(here, message)
        assert receive(there) == message
        send(there, [message])
        assert receive(here) == [message]
    there.close()
    with pytest.raises(EOFError):
        receive(here)


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame[:-1] + b"!",  # contents
        lambda frame: frame[:4] + bytes(32) + frame[36:],  # proof
    ],
)
def test_a_frame_that_the_peer_did_not_send_is_not_unpickled(connected_pair, change):
    here, there = connected_pair
    message = encode("hello")
    frame = struct.pack(">I", len(message)) + tcp._proof(there._send_key, struct.pack(">Q", 0), message) + message
    there._sock.sendall(change(frame))
    with pytest.raises(ConnectionError, match="not what it sent"):
        receive(here)


def test_a_frame_cannot_be_sent_twice(connected_pair):
    here, there = connected_pair
    message = encode("hello")
    frame = struct.pack(">I", len(message)) + tcp._proof(there._send_key, struct.pack(">Q", 0), message) + message
    there._sock.sendall(frame * 2)
    assert receive(here) == "hello"
    with pytest.raises(ConnectionError, match="not what it sent"):
        receive(here)


def test_frames_are_bounded(connected_pair, monkeypatch):
    here, there = connected_pair
    there._sock.sendall(struct.pack(">I", tcp.MAX_FRAME_BYTES + 1) + bytes(32))
    with pytest.raises(ConnectionError, match="sends a frame of"):
        receive(here)
    monkeypatch.setattr(tcp, "MAX_FRAME_BYTES", 3)
    with pytest.raises(ValueError, match="larger than 3"):
        here.send_bytes(b"four")


def test_a_rank_joins(listener):
    with joining(listener.port) as theirs:
        transport = RemoteRank(1, listener)
        transport.open()
        transport.send(encode("setup"))
        assert receive(theirs) == "setup"
    with pytest.raises(EOFError):
        transport.receive()
    transport.close()
    assert transport.epitaph() == "rank 1 on 127.0.0.1 is gone; its host has its log"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((HOST, listener.port))  # all are there: nobody else is heard


def test_who_does_not_know_the_secret_is_refused(listener):
    with pytest.raises(HandshakeError, match="refuses the secret"):
        connect(HOST, listener.port, b"another secret of ranks")
    assert_a_rank_joins(listener)


def test_a_worker_that_does_not_know_the_secret_is_refused():
    """It answers with what it was sent, as if that were its own proof."""
    with socket.create_server((HOST, 0)) as server:

        def pretend() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"fissile1" + bytes(32))
                sock.sendall(sock.recv(4096)[-32:])

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(HandshakeError, match="does not know the secret"):
            connect(HOST, server.getsockname()[1], SECRET)
        thread.join()


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"fissile1" + bytes(64)])
def test_garbage_does_no_harm(listener, garbage):
    with socket.create_connection((HOST, listener.port)) as sock:
        sock.sendall(garbage)
        with suppress(OSError):  # it may have been refused and closed before
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
    assert_a_rank_joins(listener)


def test_who_connects_and_is_silent_keeps_nobody_out(listener):
    with socket.create_connection((HOST, listener.port)):
        assert_a_rank_joins(listener)


def test_more_who_knock_than_can_be_heard_are_turned_away(monkeypatch):
    monkeypatch.setattr(listening, "MAX_HANDSHAKES", 1)
    listener = RankListener(RemoteRanks(count=1, host=HOST, port=0, secret=SECRET), world_size=2)
    with socket.create_connection((HOST, listener.port)) as silent:
        assert silent.recv(8) == b"fissile1"
        with socket.create_connection((HOST, listener.port)) as other:
            assert other.recv(8) == b""
    listener.close()


@leaving_nothing_open()
def test_who_knows_the_secret_and_hangs_up_is_let_go(listener):
    with closing(connect(HOST, listener.port, SECRET)) as connection:
        connection._sock.settimeout(20)
        connection._sock.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            connection.recv_bytes()


@pytest.mark.parametrize(
    ("rank", "world_size", "reason"),
    [(1, 4, "there are 4 ranks, this worker has 2"), (0, 2, "rank 0 is not missing"), (2, 2, "rank 2 is not missing")],
)
def test_a_rank_that_does_not_fit_is_told_why(listener, monkeypatch, rank, world_size, reason):
    settings = join_settings(monkeypatch, RANK=str(rank), WORLD_SIZE=str(world_size))
    with closing(connect(HOST, listener.port, SECRET)) as connection, pytest.raises(JoinError, match=reason):
        _introduce(connection, settings)


def test_another_version_is_refused(listener):
    with joining(listener.port, Join(1, 2, "0.0.0")) as connection:
        answer = receive(connection)
    assert answer.reason == f"it runs version 0.0.0, this worker {package_version()}"


def test_a_rank_that_never_joins_can_be_given_up(listener):
    transport = RemoteRank(1, listener)
    failures: list[OSError] = []

    def open_it() -> None:
        try:
            transport.open()
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=open_it)
    thread.start()
    with pytest.raises(ConnectionError, match="has not joined"):
        transport.send(b"")
    transport.kill()
    thread.join()
    assert len(failures) == 1
    assert transport.epitaph() == "rank 1 did not join"


def test_an_address_that_cannot_be_listened_at_is_named(listener):
    with pytest.raises(ExecutorStartError, match=rf"^cannot listen for ranks at {HOST}:{listener.port}: "):
        RankListener(RemoteRanks(count=1, host=HOST, port=listener.port, secret=SECRET), world_size=2)


def join_settings(monkeypatch, *arguments: str, **variables: str) -> JoinSettings:
    given = {"MASTER_ADDR": HOST, "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1"}
    for name, value in (given | {"FISSILE_RANKS_SECRET": SECRET.decode()} | variables).items():
        monkeypatch.setenv(name, value)
    return parse_settings(JoinSettings, list(arguments), "join")


def test_the_variables_of_torchrun_are_read(monkeypatch):
    settings = join_settings(monkeypatch, "--first-rank", "2", LOCAL_WORLD_SIZE="2")
    assert (settings.master_addr, settings.master_port, settings.world_size) == (HOST, 29500, 4)
    assert (settings.rank, settings.first_rank, settings.local_rank, settings.local_world_size) == (1, 2, 1, 2)


def test_a_short_secret_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        join_settings(monkeypatch, FISSILE_RANKS_SECRET="short")
    assert "FISSILE_RANKS_SECRET: must have at least 16 characters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--remote-ranks", "1", "--ranks-secret", "x" * 16], "--remote-ranks 1 is not below --tensor-parallel-size 1"),
        (["--remote-ranks", "1", "--tensor-parallel-size", "2"], "--remote-ranks needs a --ranks-secret"),
    ],
)
def test_settings_that_do_not_fit_are_refused(flags, complaint, capsys):
    with pytest.raises(SystemExit):
        parse_settings(WorkerSettings, flags, "worker")
    assert complaint in capsys.readouterr().err
