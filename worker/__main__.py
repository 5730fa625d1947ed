"""`python -m worker`."""

from common.garbage import imports_that_stay
from worker.executor.rank_process import RankProcess


def main() -> None:
    # Before all else is imported: a rank's imports take longer than all of the worker's own start.
    with RankProcess() as first:
        with imports_that_stay():
            from worker.start import start
        start(first)


if __name__ == "__main__":
    main()
