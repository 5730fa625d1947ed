"""Who may call what on the worker's port: routers serve requests, operators do all the rest as well."""

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

import grpc

from common.authentication import KeyTable, digest_of, header_of
from common.entrance import OPEN_SERVICES, service_of
from fissile.errors import PermissionDeniedError, UnauthenticatedError

logger = logging.getLogger(__name__)

SERVICE_NAME = "fissile.v1.WorkerService"
FOR_ROUTERS = frozenset(
    f"/{SERVICE_NAME}/{name}" for name in ("Execute", "GetWorker", "GetTokenizer", "GetLoad", "WatchKvEvents")
)
"""All other methods are for operators, also ones to come."""


class Role(IntEnum):
    """A higher one may do what a lower one may."""

    ROUTER = 1
    OPERATOR = 2


@dataclass(frozen=True, slots=True)
class Grant:
    """Who has a role: whoever shows one of the keys, or a certificate with one of the names."""

    role: Role
    keys: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()


class Access:
    """Open to all who connect while nothing is granted to anyone."""

    def __init__(self, grants: Iterable[Grant] = ()) -> None:
        """Where a key or name has two roles, the higher one counts."""
        in_order = sorted(grants, key=lambda grant: grant.role)
        self._by_key = KeyTable({digest_of(key): grant.role for grant in in_order for key in grant.keys})
        self._by_name = {name: grant.role for grant in in_order for name in grant.names}

    @property
    def is_open(self) -> bool:
        return not self._by_name and not len(self._by_key)

    def check(self, method: str, context: grpc.aio.ServicerContext) -> None:
        """Raises UnauthenticatedError for a caller without any role, PermissionDeniedError for a router that calls what
        is for operators. What operators do is logged, and who is refused."""
        if service_of(method) in OPEN_SERVICES:
            return
        role = Role.OPERATOR if self.is_open else max(self._roles(context), default=None)
        if role == Role.OPERATOR or (role == Role.ROUTER and method in FOR_ROUTERS):
            if method not in FOR_ROUTERS:
                logger.info("%s by %s", method, _described(context))
            return
        logger.info("%s by %s is refused", method, _described(context))
        if role is None:
            raise UnauthenticatedError("a key or a certificate of a router or an operator is needed")
        raise PermissionDeniedError(f"{method} is for operators")

    def _roles(self, context: grpc.aio.ServicerContext) -> list[Role]:
        roles = [self._by_name[name] for name in certificate_names(context) if name in self._by_name]
        header = header_of(context.invocation_metadata())
        if header:
            with suppress(UnauthenticatedError):
                roles.append(self._by_key.find(header))
        return roles


def _described(context: grpc.aio.ServicerContext) -> str:
    return ", ".join([context.peer(), *sorted(certificate_names(context))])


def certificate_names(context: grpc.aio.ServicerContext) -> set[str]:
    """Of the certificate that the caller has shown, which TLS has checked: subject alternative names (DNS names,
    addresses, URIs) and the common name."""
    properties = context.auth_context()
    found = {*properties.get("x509_subject_alternative_name", ()), *properties.get("x509_common_name", ())}
    return {name.decode(errors="replace") for name in found if name}
