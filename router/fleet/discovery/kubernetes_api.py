"""Lists and watches EndpointSlices through the Kubernetes API, as the account of the router's pod.

Plain HTTPS: the few calls need no client library with a class for everything that a cluster has.
"""

import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from fissile.errors import FailedPreconditionError
from router.fleet.discovery.kubernetes_objects import ChangeEvent, EndpointSliceList, ErrorEvent, WatchEvent

M = TypeVar("M", bound=BaseModel)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_SECONDS = 30.0
WATCH_SECONDS = 60
"""The server ends a watch after so long; it then begins anew where it ended."""
SILENCE_SECONDS = WATCH_SECONDS + 15.0
"""A watch that says nothing for longer has lost its connection without a word."""
MAX_EVENT_BYTES = 16 * 1024 * 1024


class GoneError(Exception):
    """The version to watch from is too old: list again."""


class ApiError(Exception):
    """The API refused, or said what cannot be understood; the text says what."""


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """How to reach the API, and as whom."""

    server: str
    """URL."""
    account: Path
    """Folder with token, ca.crt and namespace. The token is read for each call: it lasts an hour and is replaced."""

    @property
    def namespace(self) -> str:
        """The pod's own."""
        return (self.account / "namespace").read_text().strip()


def in_cluster(account: Path = ACCOUNT, environment: Mapping[str, str] = os.environ) -> ClusterAccess:
    """Of the pod that this process runs in. Raises FailedPreconditionError outside of a cluster."""
    host, port = (environment.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
    if not host or not port or not (account / "token").is_file():
        raise FailedPreconditionError(
            "workers: kubernetes:/// needs a pod with a service account: KUBERNETES_SERVICE_HOST or _PORT is not set, "
            f"or {account}/token is not there"
        )
    return ClusterAccess(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", account)


class EndpointSlices:
    """Those of one service. Methods raise ApiError, GoneError, OSError and httpx2.TransportError."""

    def __init__(self, client: httpx2.AsyncClient, access: ClusterAccess, namespace: str, service: str) -> None:
        self._client = client
        self._access = access
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={service}"}

    async def list(self) -> EndpointSliceList:
        response = await self._client.get(self._path, params=self._selector, headers=self._headers())
        if response.status_code != httpx2.codes.OK:
            raise _refusal(response.status_code, response.content)
        return _read(EndpointSliceList, response.content)

    async def watch(self, version: str) -> AsyncIterator[ChangeEvent]:
        """What changes after `version`, until the server ends the watch, as it does from time to time."""
        params = {
            **self._selector,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = httpx2.Timeout(REQUEST_SECONDS, read=SILENCE_SECONDS)
        call = self._client.stream("GET", self._path, params=params, headers=self._headers(), timeout=timeout)
        async with call as response:
            if response.status_code != httpx2.codes.OK:
                raise _refusal(response.status_code, await response.aread())
            async for line in _lines(response.aiter_bytes()):
                event = _read(WatchEvent, b'{"event":' + line + b"}").event
                if isinstance(event, ErrorEvent):
                    raise _refusal(event.object.code, line)
                yield event

    def _headers(self) -> dict[str, str]:
        token = (self._access.account / "token").read_text().strip()
        return {"authorization": f"Bearer {token}", "accept": "application/json"}


@asynccontextmanager
async def connected(access: ClusterAccess) -> AsyncIterator[httpx2.AsyncClient]:
    """Raises OSError for a ca.crt that cannot be used."""
    trust = ssl.create_default_context(cafile=access.account / "ca.crt")
    # trust_env: a proxy of the environment is for the world outside of the cluster.
    async with httpx2.AsyncClient(
        base_url=access.server, verify=trust, timeout=REQUEST_SECONDS, trust_env=False
    ) as client:
        yield client


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """JSON objects stand one a line. Raises ApiError for one that is too long."""
    waiting = bytearray()
    async for part in parts:
        waiting += part
        *lines, rest = waiting.split(b"\n")
        waiting = bytearray(rest)
        if len(waiting) > MAX_EVENT_BYTES:
            raise ApiError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.strip():
                yield bytes(line)


def _read(kind: type[M], content: bytes) -> M:
    """Raises ApiError for anything else."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise ApiError(f"the API said what cannot be understood: {place}: {fault['msg']}") from error


def _refusal(code: int, content: bytes) -> Exception:
    if code == httpx2.codes.GONE:
        return GoneError()
    hint = ""
    if code in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
        hint = " (the router's service account must be allowed to list and watch endpointslices)"
    return ApiError(f"the API answered {code}{hint}: {content[:300].decode(errors='replace')}")
