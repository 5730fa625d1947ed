"""The file of API keys: what it says, what is wrong with it, and that it is read again."""

import asyncio
import hashlib
import logging
from pathlib import Path

import pytest

from common.authentication import KeyTable, digest_of
from fissile.errors import InvalidArgumentError, UnauthenticatedError
from router.callers.caller import Caller, Quota
from router.callers.callers import Callers
from router.callers.key_file import parse_keys
from tests.fakes.system import until

ALICE, BOB = "alice-alice-alice-1", "bob-bob-bob-bob-bob"
SHA256 = hashlib.sha256(BOB.encode()).hexdigest()
TWO_KEYS = f"""
[[keys]]
name = "alice"
secret = "{ALICE}"

[[keys]]
name = "bob"
sha256 = "{SHA256}"
tenant = "acme"
models = ["toy", "toy-2"]
max_open_requests = 4
requests_per_minute = 60
tokens_per_minute = 1000
min_priority = -5
"""
QUOTA = Quota(4, 60, 1000, -5, frozenset({"toy", "toy-2"}))


def bearer(key: str) -> bytes:
    return b"Bearer " + key.encode()


def test_a_key_says_who_calls_and_what_it_may(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(TWO_KEYS)
    callers = Callers("for-anybody", path)
    assert callers.identify(bearer(ALICE), "10.0.0.7") == Caller("alice", "alice")
    assert callers.identify(bearer(BOB), "10.0.0.7") == Caller("bob", "acme", QUOTA)
    assert callers.identify(bearer("for-anybody"), "10.0.0.7") == Caller("10.0.0.7")


@pytest.mark.parametrize(
    "header",
    [b"", b"Bearer", b"Bearer ", bearer("other"), bearer(SHA256), b"Basic " + ALICE.encode(), b"Bearer \xff\xfe"],
)
def test_other_headers_are_nobody(header, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(TWO_KEYS)
    with pytest.raises(UnauthenticatedError, match="a valid API key is needed"):
        Callers("", path).identify(header, "10.0.0.7")


def key(**fields: str) -> str:
    """One key as TOML; values as they are written there."""
    given = {"name": '"a"', "secret": f'"{ALICE}"'} | fields
    return "[[keys]]\n" + "".join(f"{name} = {value}\n" for name, value in given.items() if value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "keys: Field required"),
        ("keys = []", "keys: List should have at least 1 item"),
        ("keys = [", "is no TOML: "),
        ("keys = " + "[" * 10_000, "nests too deeply"),
        ("\xff", "is no UTF-8 at byte 0"),
        (key(name='""'), "keys[0].name: "),
        (key(nmae='"a"'), "keys[0].nmae: Extra inputs are not permitted"),
        (key(secret=""), "keys[0]: exactly one of secret and sha256 is needed"),
        (key(sha256=f'"{SHA256}"'), "keys[0]: exactly one of secret and sha256 is needed"),
        (key(secret='"0123456789abcde"'), "keys[0]: secret: must be at least 16 printable ASCII characters, no blanks"),
        (key(secret='"0123456789 abcdef"'), "keys[0]: secret: must be at least 16 "),
        (key(secret="", sha256=f'"{SHA256[1:]}"'), "keys[0].sha256: "),
        (key(max_open_requests="0"), "keys[0].max_open_requests: Input should be greater than or equal to 1"),
        (key(tokens_per_minute='"1"'), "keys[0].tokens_per_minute: Input should be a valid integer"),
        (key(min_priority="2147483648"), "keys[0].min_priority: "),
        (key(models="[]"), "keys[0].models: "),
        (key() + key(secret=f'"{BOB}"'), "keys[1].name: is that of a key before it"),
        (key() + key(name='"b"'), "keys[1]: has the secret of a key before it"),
    ],
)
def test_what_is_wrong_is_named_by_its_place_and_never_shown(text, said):
    with pytest.raises(InvalidArgumentError) as raised:
        parse_keys(text.encode("latin-1"))
    assert said in raised.value.message
    assert ALICE not in raised.value.message and "0123456789" not in raised.value.message


def test_a_file_that_is_not_there_stops_the_start(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"keys\.toml: No such file"):
        Callers("", tmp_path / "keys.toml")


def test_the_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("router.callers.callers.RELOAD_SECONDS", 0.005)
    path = tmp_path / "keys.toml"
    path.write_text(key())
    callers = Callers("", path)

    def knows(secret: str) -> bool:
        try:
            callers.check(bearer(secret))
        except UnauthenticatedError:
            return False
        return True

    async def run():
        following = asyncio.create_task(callers.follow_file())
        path.write_text(key(secret='"short"'))
        await until(lambda: "API keys are not read again" in caplog.text)
        seen = [(knows(ALICE), knows(BOB))]
        path.write_text(key(secret=f'"{BOB}"'))
        await until(lambda: knows(BOB))
        following.cancel()
        return [*seen, (knows(ALICE), knows(BOB))]

    with caplog.at_level(logging.INFO):
        assert asyncio.run(run()) == [(True, False), (False, True)]
    complaints = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(complaints) == 1, "once for each fault, not for each look"
    assert "keys.toml: keys[0]: secret: must be" in complaints[0].getMessage()
    assert "short" not in caplog.text and BOB not in caplog.text


def test_the_example_of_the_documentation_is_a_file_of_keys():
    page = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    example = page.partition("```toml\n")[2].partition("```")[0]
    alice, batch = parse_keys(example.encode()).values()
    assert alice == Caller("alice", "alice")
    assert batch == Caller("batch-jobs", "acme", Quota(64, 600, 500_000, 10, frozenset({"llama-3"})))


def test_neither_keys_nor_their_digests_are_kept():
    """Time to find one would tell of its beginning, and a copy of the memory of all."""
    table = KeyTable({digest_of(ALICE): "alice"})
    assert table.find(bearer(ALICE)) == "alice"
    held = repr({name: value for name, value in vars(table).items() if name != "_blinding"})
    assert ALICE not in held and repr(digest_of(ALICE)) not in held
