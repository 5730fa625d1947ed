"""When a worker's garbage collector walks through all that exists: when nobody waits for it, or while the device runs a
step.

With 10,000 requests waiting that takes a tenth of a second, in whichever thread made the last object, with all others
kept out.
"""

import gc

from common import garbage


def leave_to_engine() -> None:
    """Once a worker's process is ready: only new objects are looked at by themselves."""
    garbage.freeze_loaded()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, garbage.NEVER)
