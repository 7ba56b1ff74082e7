"""Progress on stderr: one line rewritten on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """What one task is doing. `update` may be called as often as one likes; `done` ends the line."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._interval = 0.1 if self._is_terminal else 2.0
        self._start = self._last = time.monotonic()
        self._width = 0

    def update(self, text: str) -> None:
        """Show `text`, unless something was shown very recently."""
        now = time.monotonic()
        if now - self._last >= self._interval:
            self._last = now
            self._show(text, end="" if self._is_terminal else "\n")

    def announce(self, text: str) -> None:
        """Show `text` at once, on a terminal only: the next `update` or `done` replaces it."""
        if self._is_terminal:
            self._show(text, end="")

    def done(self, text: str) -> None:
        """Show `text` and the seconds since the start, and leave the line."""
        self._show(f"{text}, {time.monotonic() - self._start:.1f} s", end="\n")

    def _show(self, text: str, end: str) -> None:
        line = f"{self._label}: {text}"
        back = "\r" if self._is_terminal else ""
        self._stream.write(f"{back}{line.ljust(self._width) if self._is_terminal else line}{end}")
        self._stream.flush()
        self._width = len(line)
