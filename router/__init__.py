"""The router. Nothing here needs torch, and of transformers only its renderer of chat templates is used."""

import os

# Imported without torch, transformers advises that its models are not available: true, and of no concern here.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
