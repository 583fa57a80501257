"""A word about what takes long, so that nobody takes a server or a tool for dead that says nothing for seconds."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

INTERVAL_S = 5.0  # without a line
_MOST_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


@contextmanager
def announced(
    what: str, say: Callable[[str], None] = logger.info, interval_s: float = INTERVAL_S, has_bar: bool = False
) -> Iterator[None]:
    """While the block runs, ``say`` after ``interval_s`` seconds that it does, for example "Still loading weights (5
    s)", and then each time when twice as much time has passed, at least once a minute. ``has_bar``: not on a terminal,
    where it shows a progress bar itself."""
    is_heard = say != logger.info or logger.isEnabledFor(logging.INFO)
    if not is_heard or (has_bar and sys.stderr.isatty()):
        yield
        return
    done = threading.Event()

    def watch() -> None:
        waited, pause = 0.0, interval_s
        while not done.wait(pause):
            waited += pause
            say(f"Still {what} ({waited:.0f} s)")
            pause = min(waited, max(_MOST_INTERVAL_S, interval_s))

    threading.Thread(target=watch, name="announcer", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def progress_bar(total: int, unit: str, shown: bool = True) -> tqdm:
    """tqdm's bar on a terminal; in a file or a pipe a line every :data:`INTERVAL_S` seconds."""
    if not shown or sys.stderr.isatty():
        return tqdm(total=total, unit=unit, disable=not shown)
    form = f"{{n_fmt}} of {{total_fmt}} {unit}s in {{elapsed}}"
    # tqdm's own file gets nothing but the line end with which it leaves its bar.
    return _Lines(total=total, mininterval=INTERVAL_S, miniters=1, bar_format=form, file=io.StringIO())


class _Lines(tqdm):
    @staticmethod
    def status_printer(file: object) -> Callable[[str], None]:
        """How tqdm shows its state: here a line."""
        return lambda text: print(text, file=sys.stderr, flush=True) if text else None
