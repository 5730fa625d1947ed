"""The forward context refuses nesting and is cleared on error."""

import pytest

from worker.attention.context import ForwardContext, current_context, forward_context


def context() -> ForwardContext:
    return ForwardContext(())


def test_is_there_inside_only() -> None:
    mine = context()
    with forward_context(mine):
        assert current_context() is mine
    with pytest.raises(RuntimeError, match="no forward pass"):
        current_context()


def test_refuses_nesting_and_keeps_the_outer_one() -> None:
    outer = context()
    with forward_context(outer):
        with pytest.raises(RuntimeError, match="do not nest"), forward_context(context()):
            pass
        assert current_context() is outer


def test_is_cleared_on_error() -> None:
    with pytest.raises(KeyError), forward_context(context()):
        raise KeyError
    with forward_context(context()):
        pass
