"""What is served, worked out from what workers say of themselves: models, their versions, who has them, their names."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from router.fleet.link import WorkerLink
from router.model.served import ServedModel, ServedVersion, Version

Workers = Mapping[Version, Sequence[WorkerLink]]

MAX_ADDRESSES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Catalogue:
    """True until a worker comes, goes or changes."""

    models: Mapping[str, ServedModel]
    """By id."""
    ids: Mapping[str, str]
    """Of models, by alias."""
    known: Mapping[str, Workers]
    """By model: its workers, the last that they said of themselves."""
    available: Mapping[str, Workers]
    """By model: its workers that take new sequences."""


def catalogue(links: Iterable[WorkerLink], router_aliases: Mapping[str, str]) -> Catalogue:
    """An id goes before an alias, this router's aliases (name → id) before those of workers; of several models with one
    alias the first by id has it."""
    by_model: defaultdict[str, defaultdict[Version, list[WorkerLink]]] = defaultdict(lambda: defaultdict(list))
    for link in sorted(links, key=lambda link: link.address):
        if link.info is not None and link.version is not None:
            by_model[link.info.model][link.version].append(link)
    available = {id: _available(versions) for id, versions in by_model.items()}
    ids = _ids_by_alias(by_model, router_aliases)
    models = {
        id: ServedModel(
            id,
            _served(id, available[id] or versions, available[id]),
            _served(id, _without(versions, available[id]), available[id]) if available[id] else (),
            tuple(sorted(alias for alias, owner in ids.items() if owner == id)),
        )
        for id, versions in by_model.items()
    }
    return Catalogue(models, ids, by_model, available)


def _available(versions: Workers) -> Workers:
    found = {version: [link for link in links if link.is_available] for version, links in versions.items()}
    return {version: links for version, links in found.items() if links}


def _without(known: Workers, available: Workers) -> Workers:
    return {version: links for version, links in known.items() if version not in available}


def _served(model: str, workers: Workers, available: Workers) -> tuple[ServedVersion, ...]:
    served = []
    for version, links in workers.items():
        info, tokenizer = links[0].info, links[0].tokenizer
        if info is not None and tokenizer is not None:
            num_workers = len(available.get(version, ()))
            served.append(ServedVersion(model, version, info, tokenizer, num_workers))
    return tuple(sorted(served, key=lambda one: (-one.num_workers, -one.info.max_model_len)))


def _ids_by_alias(by_model: Mapping[str, Workers], router_aliases: Mapping[str, str]) -> dict[str, str]:
    """Of all workers of a model: while they are restarted with another alias, some have it and some do not."""
    ids = {alias: id for alias, id in router_aliases.items() if id in by_model}
    for id in sorted(by_model):
        infos = (link.info for links in by_model[id].values() for link in links)
        for alias in (alias for info in infos if info is not None for alias in info.model_aliases):
            ids.setdefault(alias, id)
    return {alias: id for alias, id in ids.items() if alias not in by_model}


def differences(model: ServedModel, workers: Workers) -> str:
    """What its versions differ in, in words, with the workers that each has."""
    fields = {
        "name": [one.version.name or "none" for one in model.versions],
        "tokenizer and template": [one.version.tokenizer_fingerprint[:12] for one in model.versions],
        "weights": [one.version.model_fingerprint[:12] or "unknown" for one in model.versions],
        "dtype": [one.version.dtype or "unknown" for one in model.versions],
        "context": [str(one.version.max_model_len) for one in model.versions],
        "vocabulary": [str(one.version.vocab_size) for one in model.versions],
        "abilities": [" ".join(sorted(one.version.capabilities)) or "none" for one in model.versions],
    }
    parts = []
    for i, one in enumerate(model.versions):
        addresses = [link.address for link in workers.get(one.version, ())]
        shown = ", ".join(addresses[:MAX_ADDRESSES_SHOWN]) + (", …" if len(addresses) > MAX_ADDRESSES_SHOWN else "")
        what = ", ".join(f"{name} {values[i]}" for name, values in fields.items() if len(set(values)) > 1)
        parts.append(f"{shown}: {what}")
    return "; ".join(parts)
