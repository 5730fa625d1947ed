"""A router without its fronts, put together: what takes requests, and whom it asks."""

from concurrent.futures import ThreadPoolExecutor

from common.metrics import new_registry
from common.tracers import tracer_of
from router.admission.admission import make_admission
from router.answering.pacing import Pacer
from router.api import GenerationApi
from router.config import RouterSettings
from router.fleet.discovery.dns import Resolver
from router.fleet.discovery.sources import make_source
from router.fleet.dispatch import Dispatcher
from router.fleet.policies.catalogue import goes_by_prefix, make_policy
from router.fleet.prefixes.following import PrefixFollower
from router.fleet.prefixes.prefixes import Prefixes
from router.fleet.workers import WorkerSet
from router.gauges import Gauges, WorkerGauge
from router.metrics import RouterMetrics
from router.model.chat_template import template_of_operator
from router.model.tokenizer import TokenizerStore
from router.open_requests import OpenRequests


class RouterParts:
    """`start`, then `close` once, even if it was not started."""

    def __init__(self, settings: RouterSettings, resolver: Resolver) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(max(2, settings.tokenizer_threads), thread_name_prefix="tokenizer")
        self._tracer = tracer_of("router", settings.otlp_traces_endpoint)
        self.metrics = RouterMetrics(new_registry())
        self.admission = make_admission(settings)
        self.open_requests = OpenRequests(self.admission.places)
        self.pacer = Pacer(settings.max_message_rate, self.admission.ration)
        self.workers = self._make_workers(resolver)
        self.prefixes = Prefixes(settings.prefix_index_mib << 20)
        self._follower = PrefixFollower(
            self.workers, self.prefixes, self.metrics, use_events=settings.policy == "prefix"
        )
        self.api = GenerationApi(
            settings,
            self.workers,
            self._make_dispatcher(),
            self.open_requests,
            self.admission,
            self.metrics,
            self.pacer,
            self._tracer,
        )
        self.metrics.watch(self._gauges)

    def _make_workers(self, resolver: Resolver) -> WorkerSet:
        settings = self._settings
        tokenizers = TokenizerStore(self._threads, template_of_operator(settings.chat_template))
        sources = [make_source(target, resolver, settings.resolve_interval) for target in settings.targets()]
        return WorkerSet(settings, tokenizers, sources)

    def _make_dispatcher(self) -> Dispatcher:
        return Dispatcher(
            self.workers,
            make_policy(self._settings.policy, self.prefixes),
            self._settings,
            self.metrics,
            self.admission.queue,
            self.admission.ration,
        )

    def start(self) -> None:
        """Look for workers."""
        self.workers.start()
        if goes_by_prefix(self._settings.policy):
            self._follower.start()

    async def close(self) -> None:
        await self._follower.close()
        await self.workers.close()
        await self._tracer.close()
        self._threads.shutdown(cancel_futures=True)

    def _gauges(self) -> Gauges:
        """Called by another thread."""
        workers = [
            WorkerGauge(
                link.info.model if link.info else "",
                link.version.name if link.version else "",
                link.address,
                is_available=link.is_available,
                is_ejected=not link.breaker.is_closed,
                num_open_requests=link.num_open_requests,
            )
            for link in list(self.workers.links.values())
        ]
        return Gauges(
            num_open_requests=len(self.open_requests),
            num_waiting_requests=self.admission.turns.num_waiting,
            num_queued_requests=len(self.admission.queue),
            num_waiting_streams=self.pacer.num_waiting,
            held_bytes=self.admission.held_bytes.num_taken,
            prefix_index_bytes=self.prefixes.index.num_bytes,
            workers=workers,
        )
