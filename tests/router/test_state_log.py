import asyncio

from router.state_log import StateLog

QUIET = 0.1


def test_many_changes_share_a_line():
    lines = []

    async def scenario():
        log = StateLog(lambda state, note: lines.append((state, note)), QUIET)
        for number in range(40):
            log.changed(number % 2 == 0)
        assert lines == [(True, "")]
        await asyncio.sleep(2.5 * QUIET)
        assert lines == [(True, ""), (False, " (after 39 changes in 0.1 s)")]
        log.changed(True)
        assert lines[2:] == [(True, "")], "it was quiet long enough"
        log.changed(False)
        log.close()
        await asyncio.sleep(2 * QUIET)

    asyncio.run(scenario())
    assert len(lines) == 3
