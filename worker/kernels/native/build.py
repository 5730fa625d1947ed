"""Compiles the C++ of this folder, once for each state of it and each level of instructions.

A library is looked for beside the sources (images bring it), then in the user's cache, and made there. Compiling takes
ten to fifteen seconds. Run as a program this file does it beforehand: for this machine into the cache, or, given a
folder, for every level into that. It imports nothing of ours, so an image can compile before anything is installed.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
BROUGHT = SOURCES / "built"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O3", "-shared", "-fPIC", "-pthread")
COMPILE_SECONDS = 300.0


class BuildError(Exception):
    """The library cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions that kernels are compiled for."""

    name: str
    cpu_flags: frozenset[str]
    """As Linux names them: what a processor must have."""
    flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_AVX512_NAMES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl")
_VNNI, _VNNI_NAMES = (*_AVX512, "-mavx512vnni"), (*_AVX512_NAMES, "avx512_vnni")
LEVELS = (
    Level("avx512bf16", frozenset((*_VNNI_NAMES, "avx512_bf16")), (*_VNNI, "-mavx512bf16")),
    Level("avx512vnni", frozenset(_VNNI_NAMES), _VNNI),
    Level("avx512", frozenset(_AVX512_NAMES), _AVX512),
    Level("avx2", frozenset(("avx2", "fma", "f16c")), _AVX2),
)
"""The best first."""


def best_level(cpu_flags: frozenset[str]) -> Level:
    """Raises BuildError where the processor has none of them."""
    for level in LEVELS:
        if level.cpu_flags <= cpu_flags:
            return level
    raise BuildError("the processor has no AVX2 with FMA and F16C")


def this_cpu() -> frozenset[str]:
    """The flags that Linux lists; none elsewhere."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def library(level: Level, folder: Path | None = None) -> Path:
    """The compiled library, made in `folder` (by default the user's cache) if nobody has it. Raises BuildError."""
    name = f"{level.name}-{_digest(level)}.so"
    folder = folder or user_cache()
    for place in (BROUGHT, folder):
        if (place / name).is_file():
            return place / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not (folder / name).is_file():
                _compile(level, folder / name)
    except OSError as error:
        advice = "XDG_CACHE_HOME may name a folder that can"
        raise BuildError(f"{folder} cannot hold what is compiled: {error.strerror}; {advice}") from error
    return folder / name


def user_cache() -> Path:
    """Raises BuildError."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "fissile" / "kernels"
    except RuntimeError as error:
        raise BuildError(f"XDG_CACHE_HOME must name a folder for what is compiled: {error}") from error


def _digest(level: Level) -> str:
    digest = hashlib.sha256(" ".join((*FLAGS, *level.flags)).encode())
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Ranks that start together compile once."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(level: Level, target: Path) -> None:
    compiler = _compiler()
    logger.info("compiling kernels for %s, once", level.name)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "library.so"
        command = [compiler, *FLAGS, *level.flags, "-o", str(made), str(SOURCES / "library.cpp")]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if "error" in line]
            raise BuildError(f"{compiler} cannot compile them: {lines[0] if lines else error}") from error
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{compiler} took more than {COMPILE_SECONDS:.0f} s") from error
        made.replace(target)  # whole, or not there


def _compiler() -> str:
    for name in (os.environ.get("CXX"), *COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("there is no C++ compiler (on Debian and Ubuntu: apt-get install g++)")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    try:
        for level in (best_level(this_cpu()),) if folder is None else LEVELS:
            print(library(level, folder))
    except BuildError as error:
        sys.exit(f"no native kernels: {error}")


if __name__ == "__main__":
    main()
