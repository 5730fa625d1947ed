"""What this host has for ranks, as far as it can be known without torch."""

import ctypes
import importlib.util
from pathlib import Path

AMD_DEVICES = Path("/dev/kfd")


def num_visible_gpus() -> int | None:
    """As many as a rank would find; None: only a rank can tell, on AMD's, or with a torch that may know none of them.
    Asks NVIDIA's driver as torch does, which takes a tenth of a second and makes no context on a device."""
    if AMD_DEVICES.exists():
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value if torch_has_cuda() else None


def torch_has_cuda() -> bool:
    """By its files: without this one it runs on CPUs, whatever GPUs there are, or was not built as wheels are."""
    spec = importlib.util.find_spec("torch")
    folders = (spec and spec.submodule_search_locations) or ()
    return any(Path(folder, "lib", "libtorch_cuda.so").is_file() for folder in folders)
