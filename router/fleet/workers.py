"""The set of workers that sources have found, and what can be asked of it as a whole."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from fissile.errors import InvalidArgumentError, NotFoundError, UnavailableError
from router.callers.caller import Caller
from router.config import RouterSettings
from router.fleet.catalogue import Catalogue, catalogue, differences
from router.fleet.discovery.source import Endpoint, Source
from router.fleet.health.lockstep import LockstepGroups
from router.fleet.link import WorkerLink
from router.model.served import ServedModel, Version
from router.model.tokenizer import TokenizerStore

logger = logging.getLogger(__name__)

RESTART_SECONDS = 1.0
"""Before a source whose watch failed by a fault of ours is watched again."""
IDLE_LOOK_SECONDS = 0.1


class WorkerSet:
    """Links by address, one for each endpoint that a source has. `start` returns at once: workers may come later."""

    def __init__(self, settings: RouterSettings, tokenizers: TokenizerStore, sources: Sequence[Source]) -> None:
        self.links: dict[str, WorkerLink] = {}
        self._found = {source: source.known for source in sources}
        self._tokenizers = tokenizers
        self._settings = settings
        self._aliases = settings.aliases()
        self._tls = settings.client_tls()
        self._groups = LockstepGroups(self._on_change)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Of the links."""
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """By address: each drops a link that no source has any more, once nothing runs there."""
        self._watches: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._catalogue: Catalogue | None = None
        """None: there was a change since it was last asked for."""
        self._told: set[tuple[str, frozenset[Version]]] = set()
        """What the log has of models with several versions."""

    def start(self) -> None:
        self._follow_endpoints()
        self._watches = [asyncio.create_task(self._watch(source)) for source in self._found]

    async def close(self) -> None:
        tasks = [*self._watches, *self._leaving.values(), *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._groups.close()
        self._tasks.clear()
        self._leaving.clear()
        self.links.clear()

    @property
    def is_ready(self) -> bool:
        """A request would find a worker."""
        return any(self.catalogue.available.values())

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
                logger.warning("workers of %s differ: %s", model.id, differences(model, now.known[model.id]))

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
        """The caller's model called `name`, by id or alias; empty: the only one. Waits for a first worker, and for the
        first attempts to reach the others if none so far has the model. Raises NotFoundError, InvalidArgumentError
        (empty, but there are several), UnavailableError (no worker has come)."""
        model = self._find(name, self.models_of(caller)) or await self._wait_for(name, wait, caller)
        models = self.models_of(caller)
        if not name and len(models) > 1:
            raise InvalidArgumentError.of("model", f"must be one of {', '.join(sorted(models))}")
        if model is None:
            raise NotFoundError(f"model {name!r} is not served here; there is {', '.join(sorted(models)) or 'none'}")
        return model

    def _find(self, name: str, models: Mapping[str, ServedModel]) -> ServedModel | None:
        if not name:
            return next(iter(models.values()), None)
        return models.get(name) or models.get(self.catalogue.ids.get(name, ""))

    async def _wait_for(self, name: str, wait: float, caller: Caller) -> ServedModel | None:
        """Until it comes, or all workers were tried and it is known that none has it. Raises UnavailableError."""
        model = None
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                while not model and (not self.catalogue.models or any(link.is_new for link in self.links.values())):
                    await self.wait_for_change()
                    model = self._find(name, self.models_of(caller))
        if not self.catalogue.models:
            raise UnavailableError(f"no worker has come within {wait:g} s", retry_after=wait)
        return model

    async def wait_for_change(self) -> None:
        """Until a worker comes, goes or changes."""
        await self._changed.wait()

    def _on_change(self) -> None:
        self._catalogue = None
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch(self, source: Source) -> None:
        while True:
            try:
                async for endpoints in source.watch():
                    self._found[source] = endpoints
                    self._follow_endpoints()
                return
            except Exception:
                logger.exception("looking for workers failed")
                await asyncio.sleep(RESTART_SECONDS)

    def _follow_endpoints(self) -> None:
        """A link for each endpoint. Of the others nothing new is asked; each is dropped once nothing runs there."""
        wanted = {endpoint.address: endpoint for found in self._found.values() for endpoint in found}
        for address, endpoint in wanted.items():
            if address not in self.links:
                self._add(endpoint)
            elif address in self._leaving:
                self._leaving.pop(address).cancel()
                self.links[address].set_retired(False)
        for address in self.links.keys() - wanted.keys() - self._leaving.keys():
            self.links[address].set_retired(True)
            self._leaving[address] = asyncio.create_task(self._drop_when_idle(address))

    def _add(self, endpoint: Endpoint) -> None:
        address, tls = endpoint.address, self._tls
        if tls and endpoint.tls_name:
            tls = replace(tls, server_name=tls.server_name or endpoint.tls_name)
        link = WorkerLink(address, self._tokenizers, self._settings, tls, self._groups, self._on_change)
        self.links[address] = link
        self._tasks[address] = asyncio.create_task(link.run())
        self._on_change()

    async def _drop_when_idle(self, address: str) -> None:
        while self.links[address].load.num_open:
            await asyncio.sleep(IDLE_LOOK_SECONDS)
        logger.info("worker %s left", address)
        del self.links[address], self._leaving[address]
        self._on_change()
        task = self._tasks.pop(address)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
