"""Heartbeats cost what messages do: a client gets so many, over however many streams."""

from contextlib import ExitStack

from router.answering.heartbeats import MAX_PER_SECOND, Heartbeats


def test_a_client_with_many_streams_has_fewer_of_each_and_others_have_theirs():
    heartbeats = Heartbeats()
    with ExitStack() as streams:
        for _ in range(3 * MAX_PER_SECOND):
            silence = streams.enter_context(heartbeats.counted("many", 0.01))
        with heartbeats.counted("other", 0.01) as other, heartbeats.counted("other", None) as none:
            assert (silence(), other(), none) == (3.0, 0.01, None)
    with heartbeats.counted("many", 0.5) as again:
        assert again() == 0.5, "those that ended do not count"
