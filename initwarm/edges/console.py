"""What the agent says on stderr, and what its children print.

One JSON line per event, or text with a progress bar on a terminal. While children run, their stdout and stderr are a
pipe that the agent reads, so that a library's warning becomes an event of its own and never half of another line.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from typing import Any

from initwarm.report import event_as_json, event_as_text

#: Read at a time from the children, and the longest line of theirs that is kept whole.
CHUNK_BYTES = 1 << 16
#: Lines of the children that are kept for the message when they die without a word.
REMEMBERED_LINES = 20


class Console:
    """The agent's voice.

    Args:
        log_format: `json`, `text`, or `auto`: text where stderr is a terminal.
    """

    def __init__(self, log_format: str = "auto") -> None:
        self._descriptor = os.dup(2)
        self._is_terminal = os.isatty(2)
        self._is_text = log_format == "text" or (log_format == "auto" and self._is_terminal)
        self._saved: tuple[int, int] | None = None
        self.captured = -1
        self._partial = b""
        self._remembered: list[str] = []
        self._bar: Any = None

    def event(self, name: str, **fields: Any) -> None:
        """Print one event; unknown values are printed as text."""
        now = time.time()
        timestamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        line = event_as_text(name, fields, timestamp) if self._is_text else event_as_json(name, fields, timestamp)
        if self._bar is not None:
            self._bar.clear()
        self._write(line + "\n")
        if self._bar is not None:
            self._bar.refresh()

    def progress(self, done: int, total: int, note: str) -> None:
        """Move the bar of a terminal; elsewhere progress comes as events."""
        if not (self._is_text and self._is_terminal):
            return
        if self._bar is None:
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self._bar = tqdm(total=total, unit="unit", file=os.fdopen(os.dup(self._descriptor), "w"), leave=False)
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(done - self._bar.n)

    def close_progress(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def traceback(self) -> None:
        """Print the exception that is being handled: a bug keeps its traceback."""
        self.event("initwarm.bug", message=traceback.format_exc())

    def capture_output(self) -> None:
        """Send what this process and its children print from now on through the agent."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.captured, writer = os.pipe()
        os.set_blocking(self.captured, False)
        self._saved = (os.dup(1), os.dup(2))
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(writer)

    def release_output(self) -> None:
        """Print what is left of the children's output and take the streams back."""
        if self._saved is None:
            return
        for target, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, target)
            os.close(saved)
        self._saved = None
        # A pipe holds at most 16 pieces of this size, and nobody writes any more.
        for _ in range(16):
            self.forward_output()
        if self._partial:
            self._forward(self._partial)
            self._partial = b""
        os.close(self.captured)
        self.captured = -1

    def forward_output(self) -> None:
        """Turn a piece of what the children printed into events, whole lines only.

        One piece a call: a child that prints without end must not keep the agent from a signal or its deadline.
        """
        try:
            chunk = os.read(self.captured, CHUNK_BYTES)
        except OSError:
            return
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) > CHUNK_BYTES:
            lines, self._partial = [*lines, self._partial], b""
        for line in lines:
            self._forward(line)

    def last_output(self) -> str:
        """The last lines that the children printed, for the message of a failure."""
        return ": " + " / ".join(self._remembered[-3:]) if self._remembered else ""

    def _forward(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._remembered = [*self._remembered[1 - REMEMBERED_LINES :], text]
            self.event("initwarm.process.printed", message=text)

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        # A log reader that went away must not end the run.
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]
