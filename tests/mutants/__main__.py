"""Does the core's test suite notice when the core is wrong? `make mutants`

Applies each of `MUTATIONS` to a copy of the tree and runs the tests of `worker/core` there. A mutant that no test fails
for has survived: then a test is missing. Exit status 0 if all died.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("common", "fissile", "worker", "tests/__init__.py", "tests/conftest.py", "tests/core", "pyproject.toml")
SLOW = ("tests/core/test_soak.py", "tests/core/test_beam.py")
"""What they alone would notice is not worth their time, ten times that of the others together."""
SECONDS = 300
"""A mutant that takes longer has died of an endless loop."""

TESTS_FAILED, TESTS_PASSED = 1, 0
"""Exit statuses of pytest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of mutations; default: all")
    parser.add_argument("-n", "--num-processes", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if not arguments.names or mutation.name in arguments.names]
    for mutation in chosen:
        mutation.apply_to(ROOT, dry=True)
    if run_tests(None) != TESTS_PASSED:
        sys.exit("the tests fail without a mutation")
    with ThreadPoolExecutor(arguments.num_processes) as pool:
        survivors = [mutation for mutation, died in zip(chosen, pool.map(dies, chosen), strict=True) if not died]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants died")
    sys.exit(bool(survivors))


def dies(mutation: Mutation) -> bool:
    start = time.monotonic()
    status = run_tests(mutation)
    fate = {TESTS_FAILED: "died", TESTS_PASSED: "SURVIVED"}.get(status, f"BROKE THE RUN (status {status})")
    print(f"{fate:9} {mutation.name} ({mutation.file}, {time.monotonic() - start:.0f} s)", flush=True)
    return status == TESTS_FAILED


def run_tests(mutation: Mutation | None) -> int:
    """Exit status of the core's tests, up to the first failure, in a copy of the tree with `mutation`."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source, target = ROOT / name, tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        if mutation is not None:
            mutation.apply_to(tree)
        command = [sys.executable, "-m", "pytest", "tests/core", "-x", "-q", "-p", "no:cacheprovider"]
        command += [f"--ignore={test}" for test in SLOW]
        # The copy comes before an editable installation of the tree.
        environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return TESTS_FAILED
        return done.returncode


if __name__ == "__main__":
    main()
