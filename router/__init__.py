"""The router. Nothing here needs torch, and of transformers only its renderer of chat templates is used."""

import os

# When transformers is imported without torch it advises that models are not available: true, and no concern of a router.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
