"""Rows in, the same rows out in the same order: those with a URL have the image's bytes, or the reason why not.

An event loop in one thread fetches ahead of the row that is taken, within a bound of rows and of bytes. Servers decide
the bytes; the order in which they answer decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from mmdata.config.convert import ConvertConfig
from mmdata.convert.fetch.settings import FetchSettings, user_agent
from mmdata.convert.fetch.tally import Tally
from mmdata.convert.sources.rows import InputRow, has_url
from mmdata.errors import BadSample, ConfigError, Reason

if TYPE_CHECKING:  # conversions without URLs do without aiohttp
    from mmdata.convert.fetch.fetcher import Fetcher

logger = logging.getLogger("mmdata.fetch")

_OF_THE_WEB = re.compile(r"\s*https?://", re.IGNORECASE)

_USER = re.compile(r"^(\s*[a-z][a-z0-9+.-]*:[/\\]{2})[^/?#]*@", re.IGNORECASE)


_OF_THE_TABLE = frozenset(
    {Reason.MISSING_CAPTION, Reason.EMPTY_CAPTION, Reason.BAD_CAPTION, Reason.CAPTION_TOO_LONG, Reason.BROKEN_ROW}
)
"""Reasons that lie in a row itself, whatever its URL answers."""


def is_unfetched(path: str, reason: Reason) -> bool:
    """Whether a row is left out because its link is dead; `path` is of its image. s3:// and file: are no links."""
    return reason not in _OF_THE_TABLE and bool(_OF_THE_WEB.match(path))


def without_user(url: str) -> str:
    """A URL without the name and password in it, which are for the server and are stored nowhere.

    Example:
        without_user("https://me:secret@a.example/b.jpg") == "https://a.example/b.jpg"
    """
    return _USER.sub(r"\1", url)


def refuse_urls(rows: Iterable[InputRow], setting: str) -> Iterator[InputRow]:
    """Pass rows through that a setting reads twice; an image behind a URL would be fetched twice.

    Raises:
        ConfigError: a row has a URL.
    """
    for row in rows:
        if has_url(row):
            raise ConfigError(
                f"{row.place}: its image is behind a URL, and {setting} reads every image twice; fetch them first "
                "(`mmdata convert TABLE SHARDS`), then convert the shards with this setting"
            )
        yield row


class FetchStage:
    """Fetches the images of rows. A context manager; without URLs it starts nothing.

    Args:
        settings: of the fetching.
        fetcher: None makes one of the settings.

    Attributes:
        tally: what became of the URLs.
    """

    def __init__(self, settings: FetchSettings, fetcher: Fetcher | None = None) -> None:
        self.tally = Tally()
        self._settings = settings
        self._given = fetcher
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_config(cls, config: ConvertConfig) -> FetchStage:
        """The stage that a recipe asks for."""
        return cls(
            FetchSettings(
                user_agent=user_agent(config.contact),
                ignore_opt_outs=config.ignore_opt_outs,
                allow_private_addresses=config.allow_private_addresses,
                max_bytes=config.max_image_bytes,
                per_host=config.connections_per_host,
            )
        )

    def __enter__(self) -> FetchStage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._loop is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        finally:
            _end(self._loop, self._thread)
            self._loop = None
            if self.tally.urls:  # now that no report can come after it
                logger.info("%s", self.tally.line())

    def __call__(self, rows: Iterable[InputRow]) -> Iterator[InputRow]:
        """The rows, with images in place of URLs.

        Raises:
            ImportError: a row has a URL, and the extra `convert` is not installed.
            OSError: this machine cannot open connections.
        """
        window: deque[tuple[InputRow, Future[InputRow] | None]] = deque()
        ours = 0  # bytes of images in the window that were not fetched
        for row in rows:
            if has_url(row):
                window.append((row, self._submit(row)))
            else:
                if isinstance(row.image, str) and "@" in row.image:  # of a row that is merged, or has a fault
                    row = replace(row, image=without_user(row.image))
                window.append((row, None))
                ours += _size(row)
            while window and (
                window[0][1] is None or len(window) >= self._settings.rows_ahead or ours > self._settings.bytes_ahead
            ):
                first, fetched = window.popleft()
                ours -= _size(first) if fetched is None else 0
                yield self._take(first, fetched)
        while window:
            yield self._take(*window.popleft())

    def _submit(self, row: InputRow) -> Future[InputRow]:
        if self._loop is None:
            self._start()
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._fetch(row), self._loop)

    def _take(self, row: InputRow, fetched: Future[InputRow] | None) -> InputRow:
        """A row of the window, when it is ready; its bytes are not counted any more."""
        if fetched is None:
            return row
        assert self._loop is not None
        if not fetched.done():
            self._loop.call_soon_threadsafe(self._fetcher.room.move, row.number)
        row = fetched.result()
        self._loop.call_soon_threadsafe(self._fetcher.room.free, row.number)
        return row

    async def _fetch(self, row: InputRow) -> InputRow:
        url = str(row.image)
        try:
            image = await self._fetcher.fetch(url, row.number)
        except BadSample as bad:
            self.tally.bad(bad.reason)
            return replace(row, image=without_user(url), fault=(bad.reason, bad.detail))
        self.tally.good(len(image))
        kept = {name: without_user(value) if value == url else value for name, value in row.extra.items()}
        url = without_user(url)
        return replace(row, image=image, url=url, extra={"url": url, **kept})

    def _start(self) -> None:
        try:
            from mmdata.convert.fetch.fetcher import Fetcher
        except ImportError as error:
            raise ImportError(
                f"convert fetches images behind URLs with aiohttp, protego and yarl ({error}): "
                "pip install 'mmdata[convert]'"
            ) from error

        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="fetch", daemon=True)
        try:
            # As many threads as connections, since a dead name takes seconds.
            loop.set_default_executor(ThreadPoolExecutor(self._settings.connections, thread_name_prefix="names"))
            thread.start()
            fetcher = self._given or Fetcher(self._settings)
            asyncio.run_coroutine_threadsafe(fetcher.__aenter__(), loop).result()
        except BaseException:
            _end(loop, thread)
            raise
        self._loop, self._thread, self._fetcher = loop, thread, fetcher
        self._report = asyncio.run_coroutine_threadsafe(self._log(), loop)

    async def _log(self) -> None:
        while True:
            await asyncio.sleep(self._settings.report_s)
            logger.info("%s", self.tally.line())

    async def _stop(self) -> None:
        """End all requests."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._fetcher.__aexit__(None, None, None)


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if thread.is_alive():
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
    loop.close()


def _size(row: InputRow) -> int:
    """Bytes of a row's image, if the row holds it."""
    return len(row.image) if isinstance(row.image, bytes) else 0
