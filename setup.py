"""What a wheel holds: the client package, and the services inside it.

`common`, `router` and `worker` are too plain as names for the site-packages that fissile shares with an application: a
wheel carries them in `fissile/_services/`, and `fissile.service` starts them from there. All else is in pyproject.toml.
"""

from pathlib import Path

from setuptools import find_packages, setup

SERVICES = [name for name in ("common", "router", "worker") if Path(name).is_dir()]  # an image has one of them


def with_subpackages(name: str) -> list[str]:
    return [name, *(f"{name}.{inner}" for inner in find_packages(name))]


setup(
    packages=[*find_packages(include=["fissile", "fissile.*"])]
    + [f"fissile._services.{package}" for name in SERVICES for package in with_subpackages(name)],
    package_dir={f"fissile._services.{name}": name for name in SERVICES},
)
