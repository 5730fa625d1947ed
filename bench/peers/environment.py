"""Virtual environments of the peers, and peers as running processes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from bench.peers.protocol import Job, Report

HERE = Path(__file__).resolve().parent
HOME = HERE.parents[1] / ".venv-bench"


class PeerError(Exception):
    """A peer could not be installed or did not answer."""


def python_of(name: str, requirements: Sequence[str], without: Sequence[str] = ()) -> Path:
    """The interpreter of environment `name`, made and filled at first use but for `without`. Raises PeerError."""
    python = HOME / name / "bin" / "python"
    stamp = HOME / name / ".installed"
    made_of = "\n".join((*requirements, *(f"without {name}" for name in without)))
    if stamp.exists() and stamp.read_text() == made_of:
        return python
    print(f"installing {name} ...", flush=True)
    _run([sys.executable, "-m", "venv", str(HOME / name)], name)
    for requirement in requirements:  # one by one: torch first, so that nothing pulls another build of it
        _run(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirement.split()], name
        )
    if without:
        _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *without], name)
    stamp.write_text(made_of)
    return python


def float32_model(python: Path, gguf: Path) -> Path:
    """The embedded model as a float32 directory, converted once."""
    directory = HOME / "models" / f"{gguf.stem}-float32"
    if not (directory / "model.safetensors").exists():
        print("converting the model ...", flush=True)
        _run([str(python), str(HERE / "convert.py"), str(gguf), str(directory)], "convert")
    return directory


def _run(command: list[str], name: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise PeerError(f"{name}: {' '.join(command[:4])} ... failed: {result.stderr.strip()[-500:]}")


class Peer:
    """A peer that is running."""

    def __init__(self, name: str, process: "subprocess.Popen[str]") -> None:
        self.name = name
        self._process = process
        self._answer()

    def run(self, job: Job) -> Report:
        """Raises PeerError if it has died."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        return Report(**self._answer())

    def _answer(self) -> dict[str, float]:
        """Libraries, and processes of theirs, may print before and between answers."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise PeerError(f"{self.name} ended with code {self._process.wait()}")


@contextmanager
def running(name: str, python: Path, script: str, *arguments: str) -> Iterator[Peer]:
    """Start `script` and yield the peer when it is ready."""
    command = [str(python), str(HERE / script), *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    log = (HOME / f"{name}.log").open("w")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
    )
    try:
        yield Peer(name, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()
