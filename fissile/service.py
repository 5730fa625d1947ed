"""Run a service, or a module of one, in this process: `python -P -m fissile.service router FLAGS...`.

The services' packages are called `common`, `router` and `worker`, as an application's own may be. Ours are put before
all others here, and in the path of what the service starts; `-P` keeps the current directory from coming first.
"""

import os
import runpy
import signal
import sys
from pathlib import Path


def services_root() -> Path:
    """Where the services' packages lie: inside this one in a wheel, beside it in the source tree."""
    here = Path(__file__).resolve().parent
    bundled = here / "_services"
    return bundled if bundled.is_dir() else here.parent


def is_installed(name: str) -> bool:
    """Images have only the service that they are for."""
    return (services_root() / name).is_dir()


def service_command(name: str, arguments: list[str]) -> list[str]:
    """The command line of a service, from any directory and whatever that holds."""
    return [sys.executable, "-P", "-m", "fissile.service", name, *arguments]


def main() -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Ctrl-C ends a service that only imports, without a traceback; once it starts, it has handlers of its own.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    root = str(services_root())
    sys.path.insert(0, root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    name = sys.argv.pop(1)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
