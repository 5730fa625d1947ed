"""Long versions of tests, which run with --soak only."""

from hypothesis import settings


def is_long() -> bool:
    """Whether they are asked for; known before tests are imported, for what they are parametrized with."""
    return settings.get_current_profile_name() == "soak"
