"""What can be wrong with a grammar."""


class GrammarError(Exception):
    """A grammar that no output can be held to: malformed, not supported, too large, or nothing matches it."""
