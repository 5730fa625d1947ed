"""The one form of all benchmarks: `make bench-NAME`, `--quick`, the last line one JSON object, `RECORD=1` keeps it."""

import argparse
import datetime
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"

Figure = float | int | str | None
"""None: not measured, for a reason that was printed."""


def parse_arguments(description: str | None, *, parts: Sequence[str] = (), **switches: str) -> argparse.Namespace:
    """The arguments that every benchmark takes (`quick`), and switches of its own: name → help. `parts`: those that can
    be chosen from by `--parts`, all of them unless some are named."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; never recorded")
    for name, explanation in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=explanation)
    if parts:
        parser.add_argument(
            "--parts", type=lambda text: _chosen(text, parts), default=list(parts), metavar="PART,…",
            help=f"some of {', '.join(parts)}",
        )  # fmt: skip
    return parser.parse_args()


def _chosen(text: str, parts: Sequence[str]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in parts]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(parts)}")
    return names


def finish(
    name: str,
    figures: Mapping[str, Figure],
    *,
    quick: bool,
    dtype: str,
    threads: int | None = None,
    device: str = "",
    packages: Sequence[str] = (),
) -> None:
    """Print the figures as the last line; with RECORD=1, add them to `results/NAME.jsonl` with where and when."""
    print(json.dumps(figures), flush=True)
    if os.environ.get("RECORD") != "1" or quick:
        return
    setting: dict[str, object] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "machine": machine(),
        "device": device or "cpu",
        "threads": threads if threads is not None else num_cores(),
        "dtype": dtype,
        "versions": versions(packages),
    }
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps({**figures, **setting}) + "\n")


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> str:
    """Processor, its instruction sets that matter here, and the number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    sets = [
        name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile") if name in facts.get("flags", "")
    ]
    return f"{facts.get('model name', platform.machine())}, {num_cores()} cores, {' '.join(sets)}"


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Installed versions of `packages` and of Python; a package that is not there is left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def median(values: Sequence[float], digits: int = 2) -> float:
    return round(statistics.median(values), digits)


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Ours over theirs, or None where either was not measured."""
    return round(ours / theirs, 2) if ours and theirs else None
