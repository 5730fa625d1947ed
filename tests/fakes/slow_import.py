"""A module whose import takes long: it says that it has begun, and waits."""

import time

print("importing", flush=True)
time.sleep(60)
