"""The part of the Kubernetes API that discovery uses, over HTTPS, as strict as the real one: versions grow with each
change, old ones are forgotten, tokens expire, rights are asked for, and a watch ends after its time."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from router.admission.budget import Budget
from router.fleet.discovery.kubernetes_api import ClusterAccess
from router.http.connections import ConnectionBounds
from router.http.server import HttpServer
from tests.fakes.certificates import Authority

NAMESPACE = "prod"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
SELECTOR = "kubernetes.io/service-name=pool"


def pod(host: str, **conditions: bool | None) -> dict:
    """An endpoint of a slice."""
    return {"addresses": [host], "conditions": conditions, "targetRef": {"kind": "Pod", "name": f"pod-{host}"}}


class FakeKubernetes:
    """Of one namespace with one service, "pool"."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority(folder / "authority")
        self.account = folder / "account"
        self.account.mkdir()
        (self.account / "ca.crt").write_bytes(self._authority.certificate.read_bytes())
        (self.account / "namespace").write_text(NAMESPACE)
        self.set_token("first")
        self.version = 100
        self._oldest = 100
        """Changes before are forgotten."""
        self._slices: dict[str, dict] = {}
        self._log: list[dict] = []
        """All events, in order."""
        self._changed = asyncio.Event()
        self.may = {"list", "watch"}
        self.requests: list[str] = []
        """Verbs, and from where a watch began."""
        self.watches: set[asyncio.Task] = set()
        self.seconds_of_a_watch = 60.0
        """The least of this and of what was asked for."""
        self._server: HttpServer | None = None

    async def start(self) -> ClusterAccess:
        self._server = HttpServer(
            Starlette(routes=[Route(PATH, self._serve)]),
            ConnectionBounds(Budget(100, "connections", "max-connections"), 30.0),
            30.0,
            self._authority.server("127.0.0.1"),
        )
        port = await self._server.start("127.0.0.1", 0, 1)
        return ClusterAccess(f"https://127.0.0.1:{port}", self.account)

    async def stop(self) -> None:
        self.end_watches()
        await self._server.stop()

    def set_token(self, token: str) -> None:
        """The one before holds no more."""
        self._token = token
        (self.account / "token").write_text(token)

    def put(self, name: str, endpoints: list | None, family: str = "IPv4", port: int = 50061) -> None:
        kind = "MODIFIED" if name in self._slices else "ADDED"
        self._slices[name] = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "namespace": NAMESPACE, "annotations": {"note": "a\u0085b\u2028c"}},
            "addressType": family,
            "endpoints": endpoints,
            "ports": [{"name": "metrics", "port": 9101}, {"name": "grpc", "port": port, "protocol": "TCP"}],
        }
        self._note(kind, self._slices[name])

    def delete(self, name: str) -> None:
        self._note("DELETED", self._slices.pop(name))

    def bookmark(self) -> None:
        about = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": {}}
        self._note("BOOKMARK", about)

    def forget(self) -> None:
        """All changes so far."""
        self._oldest = self.version

    def end_watches(self) -> None:
        """Their connections break."""
        for task in self.watches:
            task.cancel()

    def _note(self, kind: str, about: dict) -> None:
        self.version += 1
        copy = json.loads(json.dumps(about))
        copy["metadata"]["resourceVersion"] = str(self.version)
        if kind != "DELETED" and copy["metadata"].get("name"):
            self._slices[copy["metadata"]["name"]] = copy
        self._log.append({"type": kind, "object": copy})
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve(self, request: Request) -> JSONResponse | StreamingResponse:
        if request.headers.get("authorization") != f"Bearer {self._token}":
            return _status(401, "Unauthorized")
        verb = "watch" if request.query_params.get("watch") in ("1", "true") else "list"
        if verb not in self.may:
            return _status(403, f'endpointslices is forbidden: User cannot {verb} resource "endpointslices"')
        if request.query_params.get("labelSelector") != SELECTOR:
            return self._list({})
        if verb == "list":
            self.requests.append("list")
            return self._list(self._slices)
        return self._watch(request.query_params)

    def _list(self, slices: Mapping[str, dict]) -> JSONResponse:
        about = {"resourceVersion": str(self.version)}
        return JSONResponse({"kind": "EndpointSliceList", "metadata": about, "items": list(slices.values()) or None})

    def _watch(self, params: Mapping[str, str]) -> JSONResponse | StreamingResponse:
        first = int(params["resourceVersion"])
        self.requests.append(f"watch {first}")
        if first > self.version:
            return _status(504, "Too large resource version")
        limit = min(float(params["timeoutSeconds"]), self.seconds_of_a_watch)
        return StreamingResponse(self._events(first, params, limit), media_type="application/json")

    async def _events(self, version: int, params: Mapping[str, str], limit: float):
        """Each in two parts: a line is not a chunk. An expired version is told in the stream, as the real one does."""
        self.watches.add(asyncio.current_task())
        try:
            async with asyncio.timeout(limit):
                while True:
                    changed = self._changed
                    if version < self._oldest:
                        yield _line({"type": "ERROR", "object": _status_object(410, "too old resource version")})
                        return
                    for event in [e for e in self._log if int(e["object"]["metadata"]["resourceVersion"]) > version]:
                        version = int(event["object"]["metadata"]["resourceVersion"])
                        if event["type"] != "BOOKMARK" or params.get("allowWatchBookmarks") == "true":
                            line = _line(event)
                            yield line[:20]
                            yield line[20:]
                    await changed.wait()
        except TimeoutError:
            return
        finally:
            self.watches.discard(asyncio.current_task())


def _line(event: dict) -> bytes:
    return json.dumps(event, ensure_ascii=False).encode() + b"\n"


def _status(code: int, message: str) -> JSONResponse:
    return JSONResponse(_status_object(code, message), status_code=code)


def _status_object(code: int, message: str) -> dict:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
