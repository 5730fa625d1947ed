"""Tells who calls, by the key that is shown or by the host."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.authentication import KeyTable, digest_of, header_of
from common.hosts import host_of_peer
from fissile.errors import InvalidArgumentError
from router.callers.caller import Caller, caller_at
from router.callers.key_file import read_keys

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 2.0


class Callers:
    """Whose keys are known. With neither a key nor a file of keys, everyone may call."""

    def __init__(self, api_key: str = "", key_file: Path | None = None) -> None:
        """`api_key` may be shown by anybody, so it tells nobody from another. Raises InvalidArgumentError for a file
        that cannot be used."""
        self._api_key = api_key
        self._file = key_file
        self._keys: Mapping[bytes, Caller] = read_keys(key_file) if key_file else {}
        self._table = self._new_table()

    @property
    def wants_key(self) -> bool:
        return bool(self._api_key) or self._file is not None

    def check(self, header: bytes) -> None:
        """Raises UnauthenticatedError for one without a key of ours."""
        self.identify(header, "")

    def identify(self, header: bytes, host: str) -> Caller:
        """Who shows this header, from this host. Raises UnauthenticatedError, as `check` does."""
        if not self.wants_key:
            return caller_at(host)
        return self._table.find(header) or caller_at(host)

    def of_call(self, context: Any) -> Caller:
        """Who makes a gRPC call; raises as `identify` does. Headers are only read where they count: that takes as long
        as all the rest of it."""
        header = header_of(context.invocation_metadata()) if self.wants_key else b""
        return self.identify(header, host_of_peer(context.peer()))

    async def follow_file(self) -> None:
        """For ever: what changes in the file counts soon after. While it cannot be used, the keys are those from
        before."""
        complaint = ""
        while self._file is not None:
            await asyncio.sleep(RELOAD_SECONDS)
            try:
                keys = await asyncio.to_thread(read_keys, self._file)
            except InvalidArgumentError as error:
                if error.message != complaint:
                    logger.error("API keys are not read again: %s", error.message)
                complaint = error.message
                continue
            complaint = ""
            if keys != self._keys:
                self._keys = keys
                self._table = self._new_table()
                logger.info("API keys have been read again: %s", ", ".join(sorted(c.name for c in keys.values())))

    def _new_table(self) -> KeyTable[Caller | None]:
        """None: the key that anybody may show."""
        anybody = {digest_of(self._api_key): None} if self._api_key else {}
        return KeyTable({**anybody, **self._keys})
