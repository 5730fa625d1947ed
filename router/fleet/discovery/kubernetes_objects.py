"""The parts of Kubernetes' objects that discovery reads; others are passed over."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field


def _or_empty(value: object) -> object:
    """A list that has nothing may be written as null."""
    return [] if value is None else value


class Metadata(BaseModel):
    name: str = ""
    version: str = Field("", alias="resourceVersion")


class Conditions(BaseModel):
    terminating: bool | None = None


class PodEndpoint(BaseModel):
    addresses: Annotated[list[str], Field(min_length=1)]
    """Of one pod, which one is enough to reach."""
    conditions: Conditions = Conditions()


class Port(BaseModel):
    name: str | None = None
    port: int | None = None
    """Of the pods."""


class EndpointSlice(BaseModel):
    """Some of a service's pods; all of them have the same ports."""

    metadata: Metadata
    family: str = Field("", alias="addressType")
    endpoints: Annotated[list[PodEndpoint], BeforeValidator(_or_empty)] = []
    ports: Annotated[list[Port], BeforeValidator(_or_empty)] = []


class EndpointSliceList(BaseModel):
    metadata: Metadata
    items: Annotated[list[EndpointSlice], BeforeValidator(_or_empty)] = []


class Status(BaseModel):
    """Why there is none of what was asked for."""

    code: int = 0
    message: str = ""


class ChangeEvent(BaseModel):
    """A slice changed. A bookmark has nothing but the version that the watch has come to."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: EndpointSlice


class ErrorEvent(BaseModel):
    type: Literal["ERROR"]
    object: Status


class WatchEvent(BaseModel):
    """A line of a watch."""

    event: Annotated[ChangeEvent | ErrorEvent, Field(discriminator="type")]
