"""The source for each kind of target."""

from router.fleet.discovery.dns import DnsSource, Resolver
from router.fleet.discovery.file import FileSource
from router.fleet.discovery.kubernetes import KubernetesSource
from router.fleet.discovery.kubernetes_api import in_cluster
from router.fleet.discovery.source import Source
from router.fleet.discovery.static import StaticSource
from router.targets import DnsTarget, FileTarget, StaticTarget, Target

FILE_SECONDS = 1.0
"""Between looks at a file, at most."""


def make_source(target: Target, resolver: Resolver, interval: float) -> Source:
    """`interval`: seconds between questions, where one has to ask. Raises FailedPreconditionError for a target of
    Kubernetes outside of a cluster."""
    if isinstance(target, StaticTarget):
        return StaticSource(target)
    if isinstance(target, DnsTarget):
        return DnsSource(target, resolver, interval)
    if isinstance(target, FileTarget):
        return FileSource(target, min(interval, FILE_SECONDS))
    return KubernetesSource(target, in_cluster())
