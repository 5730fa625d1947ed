"""The router. Nothing here needs torch or transformers."""
