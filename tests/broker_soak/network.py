"""TCP links on loopback that a test can cut: what one node of a cluster says to the others passes through one of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.support.kafka_broker import HOST

_CHUNK = 1 << 16


class Link:
    """One listening port whose connections are forwarded to ``target`` while the link is up.

    A link that is down holds connections open and forwards nothing, as a network that loses packets does. When it comes up again, these
    connections are reset, because both ends have given them up by then.
    """

    def __init__(self, port: int, target: int) -> None:
        self.port = port
        self.target = target
        self._is_down = False
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self) -> None:
        await asyncio.start_server(self._connected, HOST, self.port)

    def cut(self) -> None:
        self._is_down = True

    def mend(self) -> None:
        self._is_down = False
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while self._is_down:
                await asyncio.sleep(0.05)
                if writer.transport.is_closing():
                    return
            back, forth = await asyncio.open_connection(HOST, self.target)
            self._writers.add(forth)
            with suppress(OSError):
                await asyncio.gather(self._pump(reader, forth), self._pump(back, writer))
        except OSError:
            writer.transport.abort()
        finally:
            self._writers.discard(writer)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(_CHUNK):
                while self._is_down:  # noqa: ASYNC110 - two flags a second are simpler than an event for each link
                    await asyncio.sleep(0.05)
                sink.write(data)
                await sink.drain()
        finally:
            self._writers.discard(sink)
            sink.close()


class Network:
    """All links of one test, served by a thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network", daemon=True)
        self._thread.start()

    def connect(self, port: int, target: int) -> Link:
        """Start a link from ``port`` to the port ``target``; both on loopback."""
        link = Link(port, target)
        asyncio.run_coroutine_threadsafe(link.listen(), self._loop).result(10)
        return link

    def run(self, change: Callable[[], None]) -> None:
        """Cut or mend links, in the thread that serves them."""
        self._loop.call_soon_threadsafe(change)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
