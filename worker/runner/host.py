"""What this host has for ranks, as far as it can be known without torch."""

import ctypes
from pathlib import Path

AMD_DEVICES = Path("/dev/kfd")


def num_visible_gpus() -> int | None:
    """As many as a rank would find; None: only a rank can tell, on AMD's. Asks NVIDIA's driver as torch does, which
    takes a tenth of a second and makes no context on a device."""
    if AMD_DEVICES.exists():
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
