"""The set of workers: from a static list or from DNS, and what can be asked of it as a whole."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import chain

from fissile.channel import ClientTls
from fissile.errors import InvalidArgumentError, NotFoundError, UnavailableError
from router.callers.caller import Caller
from router.config import DNS_PREFIX, RouterSettings
from router.fleet.catalogue import Catalogue, catalogue, differences
from router.fleet.link import WorkerLink
from router.model.served import ServedModel, Version
from router.model.tokenizer import TokenizerStore

logger = logging.getLogger(__name__)

Resolver = Callable[[str], Awaitable[list[str]]]
"""All addresses of `host:port`, each as `host:port`. Raises OSError, and UnicodeError for what cannot be a name."""


async def resolve_name(name: str) -> list[str]:
    """The `Resolver` of this machine."""
    host, _, port = name.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


class WorkerSet:
    """Links by address. `start` returns at once: workers may come later."""

    def __init__(
        self,
        settings: RouterSettings,
        tokenizers: TokenizerStore,
        resolver: Resolver = resolve_name,
    ) -> None:
        self.links: dict[str, WorkerLink] = {}
        targets = settings.workers
        self._static = [target for target in targets if not target.startswith(DNS_PREFIX)]
        self._names = [target.removeprefix(DNS_PREFIX) for target in targets if target.startswith(DNS_PREFIX)]
        self._found: dict[str, list[str]] = {}
        """Addresses by name, from the last time that it could be resolved."""
        self._tokenizers = tokenizers
        self._settings = settings
        self._aliases = settings.aliases()
        self._tls = settings.client_tls()
        self._resolver = resolver
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._resolving: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._catalogue: Catalogue | None = None
        """None: there was a change since it was last asked for."""
        self._told: set[tuple[str, frozenset[Version]]] = set()
        """What the log has of models with several versions."""

    def start(self) -> None:
        for address in self._static:
            self._add(address, self._tls)
        if self._names:
            self._resolving = asyncio.create_task(self._resolve_forever())

    async def close(self) -> None:
        tasks = [*self._tasks.values(), *([self._resolving] if self._resolving else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self.links.clear()

    @property
    def is_ready(self) -> bool:
        """A request would find a worker."""
        return any(link.is_available for link in self.links.values())

    @property
    def catalogue(self) -> Catalogue:
        """As of now."""
        if self._catalogue is None:
            self._catalogue = catalogue(self.links.values(), self._aliases)
            self._tell_differences(self._catalogue)
        return self._catalogue

    def _tell_differences(self, now: Catalogue) -> None:
        for model in now.models.values():
            told = model.id, frozenset(one.version for one in model.versions)
            if len(model.versions) > 1 and told not in self._told:
                self._told.add(told)
                logger.warning("workers of %s differ: %s", model.id, differences(model, now.available[model.id]))

    def candidates(
        self, model: str, is_wanted: Callable[[Version], bool], dp_rank: int | None = None
    ) -> list[WorkerLink]:
        """Available workers of a model, of versions that are wanted and, when given, with this rank."""
        return [
            link
            for version, links in self.catalogue.available.get(model, {}).items()
            if is_wanted(version)
            for link in links
            if dp_rank is None or (link.info is not None and link.info.dp_rank == dp_rank)
        ]

    def models_of(self, caller: Caller) -> Mapping[str, ServedModel]:
        """Those that it may use: the others are not there for it."""
        models = self.catalogue.models
        if caller.quota.models is None:
            return models
        return {id: model for id, model in models.items() if caller.may_use((id, *model.aliases))}

    async def model(self, name: str, wait: float, caller: Caller) -> ServedModel:
        """The caller's model called `name`, by id or alias; empty: the only one. Waits for a first worker. Raises
        NotFoundError, InvalidArgumentError (empty, but there are several), UnavailableError (no worker has come)."""
        await self._wait_for_models(wait)
        models = self.models_of(caller)
        if not name and len(models) > 1:
            raise InvalidArgumentError.of("model", f"must be one of {', '.join(sorted(models))}")
        id = name if name in models else self.catalogue.ids.get(name, "")
        model = models.get(id) if name else next(iter(models.values()), None)
        if model is None:
            raise NotFoundError(f"model {name!r} is not served here; there is {', '.join(sorted(models)) or 'none'}")
        return model

    async def _wait_for_models(self, wait: float) -> None:
        """Until there is one. Raises UnavailableError."""
        try:
            async with asyncio.timeout(wait):
                while not self.catalogue.models:
                    await self.wait_for_change()
        except TimeoutError:
            raise UnavailableError(f"no worker has come within {wait:g} s", retry_after=wait) from None

    async def wait_for_change(self) -> None:
        """Until a worker comes, goes or changes."""
        await self._changed.wait()

    def _on_change(self) -> None:
        self._catalogue = None
        self._changed.set()
        self._changed = asyncio.Event()

    def _add(self, address: str, tls: ClientTls | None) -> None:
        if address in self.links:
            return
        link = WorkerLink(address, self._tokenizers, self._settings, tls, self._on_change)
        self.links[address] = link
        self._tasks[address] = asyncio.create_task(link.run())

    async def _resolve_forever(self) -> None:
        while True:
            for name in self._names:
                await self._resolve(name)
            await self._retire_all_but({*self._static, *chain.from_iterable(self._found.values())})
            await asyncio.sleep(self._settings.resolve_interval)

    async def _resolve(self, name: str) -> None:
        """Add what is new behind the name. One that cannot be resolved now keeps what it had: an outage of DNS is none
        of the workers."""
        try:
            self._found[name] = await self._resolver(name)
        except (OSError, UnicodeError) as error:
            # A name that was never there may come with its first worker.
            logger.log(logging.WARNING if name in self._found else logging.INFO, "cannot resolve %s: %s", name, error)
            return
        # Certificates name the service; its addresses come and go.
        host = name.rpartition(":")[0]
        tls = replace(self._tls, server_name=self._tls.server_name or host) if self._tls else None
        for address in self._found[name]:
            self._add(address, tls)
            self.links[address].set_retired(False)

    async def _retire_all_but(self, wanted: set[str]) -> None:
        """Nothing new goes to the others; each is dropped once nothing runs there."""
        for address in set(self.links) - wanted:
            link = self.links[address]
            link.set_retired(True)
            if link.load.num_open == 0:
                logger.info("worker %s left", address)
                del self.links[address]
                self._on_change()
                task = self._tasks.pop(address)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
