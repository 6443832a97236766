"""The endpoint: connections, frames and limits. A process of its own, never in the daemon: a leader must not be slowed by readers.

Requests of one connection are answered in order, as Kafka's clients expect. Records are written from the cache in slices, so that a slow
reader holds only the pieces that it reads.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import socket
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kafka.protocol import consumer
from kafka.protocol.schemas.fields.codecs import UnsignedVarInt32

from compactor.access.tier import Tier
from compactor.config.settings import ServeSettings, Settings
from compactor.errors import CompactorError, UsageError
from compactor.features.serve import access
from compactor.features.serve.fetch import TierReader
from compactor.features.serve.partitions import Node, Partitions
from compactor.features.serve.pieces import DiskBudgetFolder, PieceCache
from compactor.features.serve.protocol import APIS, InvalidFrame, Request, decode_request, encode_response
from compactor.features.serve.requests import Requests, longest_wait_s
from compactor.service import EventLogger, ServiceEventLogger

JOURNAL = ServiceEventLogger(logging.getLogger(__name__))
SLICE: Final = 256 << 10
"""Bytes that are handed to a connection with TLS at once."""
JOINED: Final = 64 << 10
"""Bytes to which the small parts of a frame are joined."""
MOST_VIEWS: Final = 1024
"""Linux' IOV_MAX."""
LEAST_RESPONSE: Final = 64 << 10
"""Bytes of records that a response may hold when all responses together have reached their budget."""
LOAD_THREADS: Final = 16
LOGIN_BYTES: Final = 64 << 10
"""Largest frame before a login."""
CLIENT_ID_CHARS: Final = 100
"""Characters of a client id that are kept."""
REFUSED_S: Final = 0.1
"""Pause before the answer to a login that failed, as Kafka's connection.failed.authentication.delay.ms."""
_MARK: Final = bytes.fromhex("5e7e0a7c16c34f0e9d21b4c8a3f06d11")
"""Stands for records while a Fetch response is encoded, so that megabytes are not copied through the encoder."""


@dataclass
class Connection:
    """A client. since_s: monotonic time at which it connected."""

    peer: str
    since_s: float
    user: str = ""
    client_id: str = ""
    requests: int = 0
    bytes: int = 0


class Deadline:
    """Cancel a connection's task unless the deadline is moved in time. Moving it needs no timer: ``asyncio.timeout`` makes one for each of
    the waits of a request.
    """

    def __init__(self, task: asyncio.Task[None], longest_s: float) -> None:
        self._task, self._longest_s = task, longest_s
        self._loop = task.get_loop()
        self._at_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self.has_passed = False

    def move(self, seconds: float) -> None:
        now = self._loop.time()
        self._at_s = now + seconds
        if self._timer is None or self._at_s < self._timer.when():
            self._arm(now)

    def _arm(self, now: float) -> None:
        self.close()
        # Never further away than the usual deadline, so that a move from a longer one to it finds the timer in time.
        self._timer = self._loop.call_at(min(self._at_s, now + self._longest_s), self._check)

    def _check(self) -> None:
        now = self._loop.time()
        if now < self._at_s:
            self._arm(now)
        else:
            self.has_passed = True
            self._task.cancel()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


@dataclass
class State:
    """Values that pages and metrics show. Written by the event loop, read by other threads."""

    connections: dict[int, Connection] = field(default_factory=dict)
    accepted: int = 0
    refused: int = 0
    invalid_frames: int = 0
    in_flight: int = 0
    problem: str = "starting"
    turned_s: float = field(default_factory=time.monotonic)
    """Monotonic time at which the event loop last came round."""


def parse_nodes(settings: ServeSettings, listen: str) -> tuple[Node, list[Node]]:
    """This replica and all replicas. ``listen``: the address in use. Raises UsageError."""
    host, _, port = (settings.advertised or listen).rpartition(":")
    me = Node(settings.node_id, host.strip("[]"), int(port) or int(listen.rpartition(":")[2]))
    if not settings.nodes:
        if me.host in ("0.0.0.0", "::"):  # noqa: S104
            raise UsageError(
                f"clients cannot connect to {me.host}, and `serve` tells them where to connect",
                hint="Set advertised under [serve] to the name or address of this machine, with its port",
            )
        return me, [me]
    nodes = []
    for text in settings.nodes:
        number, _, address = text.partition("@")
        node_host, _, node_port = address.rpartition(":")
        nodes.append(Node(int(number), node_host.strip("[]"), int(node_port)))
    if len({node.id for node in nodes}) != len(nodes) or all(node.id != me.id for node in nodes):
        raise UsageError("nodes under [serve] must name each replica once, this one (node_id) among them")
    return next(node for node in nodes if node.id == me.id), nodes


class Endpoint:
    """Service. ``state`` may be read from any thread."""

    def __init__(self, tier: Tier, settings: Settings, listen: str, log: EventLogger = JOURNAL) -> None:
        """Open the socket. Raises UsageError."""
        self.settings = settings.serve
        self.tier = tier
        self.state = State()
        self._log = log
        host, _, port = listen.rpartition(":")
        if not host or not port.isascii() or not port.isdigit():
            raise UsageError(f"{listen!r} is not HOST:PORT", hint="For example --listen 127.0.0.1:9192; port 0 is any free one")
        access.require_safe_listener(self.settings, host.strip("[]"))
        self._tls = access.tls_context(self.settings)
        self._users: Mapping[str, access.User] | None = access.load_users(self.settings.users_file) if self.settings.users_file else None
        if self._users is not None and self._tls is None:
            log("passwords of users are sent unencrypted on this machine: tls_certificate under [serve] is not set")
        self._socket = _open_socket(host.strip("[]"), int(port), listen)
        address = self._socket.getsockname()
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        self.address = f"{shown}:{address[1]}"
        self.me, self.nodes = parse_nodes(self.settings, self.address)
        self._pool = ThreadPoolExecutor(LOAD_THREADS, "loads")
        disk = DiskBudgetFolder(Path(settings.tier.state_dir, "serve"), self.settings.disk_cache_bytes)
        self.cache = PieceCache(self.settings.cache_bytes, disk, self._pool, LOAD_THREADS)
        self.partitions = Partitions(tier, self.settings.refresh_ms / 1000, self._pool)
        self.reader = TierReader(self.partitions, self.cache, self.settings.read_ahead)
        self.requests: Requests | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # --- service ---

    def run(self) -> None:
        asyncio.run(self._serve())

    def request_stop(self) -> None:
        """Return at once. Connections are closed, as when a broker goes away: clients ask again."""
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)

    def request_settings_change(self, settings: Settings) -> None:
        """Only the file of users and the certificate are read again; other settings of [serve] take effect at the next start."""
        if self.settings.users_file:
            try:
                self._users = access.load_users(self.settings.users_file)
            except UsageError as error:
                self._log(f"the users stay as they are: {error}", level=logging.ERROR)
        try:
            self._tls = access.tls_context(self.settings)
        except UsageError as error:
            self._log(f"the certificate stays as it is: {error}", level=logging.ERROR)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        cluster_id = await asyncio.to_thread(_cluster_id, self.tier)
        self.requests = Requests(self.partitions, self.reader, self.me, self.nodes, cluster_id, self._reserve)
        # TLS begins in ``_accept``: a client that does not finish its handshake is a connection, too.
        server = await asyncio.start_server(self._accept, sock=self._socket, limit=SLICE)
        watch = asyncio.ensure_future(self._watch())
        gc.freeze()  # what was loaded until now stays: collections need not pass over it for each few requests
        try:
            await self._stop.wait()
        finally:
            server.close()
            watch.cancel()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=3)
            await self.reader.close()
            self.cache.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _reserve(self, wanted: int) -> Iterator[int]:
        """Reserve up to ``wanted`` bytes for a response's records, and yield how many: all responses together keep their budget."""
        left = max(LEAST_RESPONSE, self.settings.max_in_flight_bytes - self.state.in_flight)
        size = min(wanted, self.settings.max_response_bytes, left)
        self.state.in_flight += size
        try:
            yield size
        finally:
            self.state.in_flight -= size

    async def _watch(self) -> None:
        """Note that the loop comes round, and whether the tier can be read."""
        while True:
            self.state.turned_s = time.monotonic()
            try:
                await self.partitions.topics()
                self.state.problem = ""
            except CompactorError as error:
                self.state.problem = str(error)
            await asyncio.sleep(max(1.0, self.partitions.max_age_s))

    # --- connections ---

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self.state.connections) >= self.settings.max_connections:
            self.state.refused += 1
            writer.close()
            return
        self._tasks.add(task)
        self.state.accepted += 1
        peer = writer.get_extra_info("peername")
        connection = Connection(f"{peer[0]}:{peer[1]}" if peer else "", time.monotonic())
        self.state.connections[id(connection)] = connection
        deadline = Deadline(task, self._limit_s)
        try:
            if self._tls is not None:
                # Nothing is awaited before: what a client sends would not reach the handshake.
                await writer.start_tls(self._tls, ssl_handshake_timeout=self._limit_s)
            # With TLS, the socket must not run empty while the next slice is prepared. Without, what waits in the transport is a copy.
            writer.transport.set_write_buffer_limits(high=SLICE if self._tls is not None else 0)
            await self._converse(reader, writer, connection, deadline)
        except InvalidFrame as error:
            self.state.invalid_frames += 1
            self._log(f"the connection of {connection.peer} is closed: {error}", level=logging.WARNING)
        except (OSError, EOFError):
            pass  # it went away
        except asyncio.CancelledError:
            pass  # the endpoint stops, or the deadline has passed
        except Exception:  # noqa: BLE001
            # A bug, which must not touch other connections.
            self._log(f"a bug: the connection of {connection.peer} is closed: {traceback.format_exc()}", level=logging.CRITICAL)
        finally:
            deadline.close()
            self._tasks.discard(task)
            del self.state.connections[id(connection)]
            writer.close()
            with suppress(Exception):
                await asyncio.wait_for(writer.wait_closed(), 1)

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: Connection, deadline: Deadline
    ) -> None:
        login = access.Login(self._users)
        while True:
            frame = await self._read_frame(reader, login, connection, deadline)
            request = decode_request(frame, login.may_send)
            connection.requests += 1
            connection.client_id = request.client_id[:CLIENT_ID_CHARS] or connection.client_id
            response = login.answer(request)
            if response is None:
                response = await self._answer(request, login.user, deadline)
            connection.user = login.user.name
            name = APIS[request.key].request.__name__
            if self.requests is not None:
                self.requests.counts.by_api[name] = self.requests.counts.by_api.get(name, 0) + 1
            if login.stage is access.Stage.REFUSED:
                await asyncio.sleep(REFUSED_S)
            if response is not None:
                connection.bytes += await self._write(writer, request, response, deadline)
            if login.stage is access.Stage.REFUSED:
                return

    @property
    def _limit_s(self) -> float:
        return self.settings.request_timeout_ms / 1000

    async def _read_frame(self, reader: asyncio.StreamReader, login: access.Login, connection: Connection, deadline: Deadline) -> bytes:
        limit, wait_s = self.settings.max_request_bytes, self.settings.idle_ms / 1000
        if login.stage is not access.Stage.AUTHENTICATED:
            # Who does not log in must not hold one of the connections for long, nor memory.
            limit, wait_s = min(limit, LOGIN_BYTES), connection.since_s + self._limit_s - time.monotonic()
        deadline.move(wait_s)
        head = await reader.readexactly(4)
        size = int.from_bytes(head, "big", signed=True)
        if not 0 < size <= limit:
            raise InvalidFrame(f"a request of {size} bytes; allowed are {limit} (max_request_bytes, less before a login)")
        deadline.move(self._limit_s)
        return await reader.readexactly(size)

    async def _answer(self, request: Request, user: access.User, deadline: Deadline) -> Any:
        if self.requests is None:
            raise EOFError
        limit_s = self._limit_s + longest_wait_s(request)
        deadline.move(limit_s)
        try:
            return await self.requests.answer(request, user)
        except asyncio.CancelledError:
            if deadline.has_passed:
                # What was begun goes on: the client finds it when it asks again.
                self._log(f"a request is given up after {limit_s:.0f} s (request_timeout_ms)", level=logging.WARNING)
            raise
        except CompactorError as error:
            # Nothing of the tier can be read. Clients try again on another connection, as when a broker goes away.
            self.state.problem = str(error)
            self._log(f"a request cannot be answered: {error}", level=logging.ERROR)
            raise EOFError from error

    async def _write(self, writer: asyncio.StreamWriter, request: Request, response: Any, deadline: Deadline) -> int:
        """Return the size. The deadline moves whenever the client takes a part."""
        is_fetch = request.key == consumer.FetchRequest.API_KEY
        views = frame_of_fetch(request, response) if is_fetch else [memoryview(encode_response(request, response))]
        size = sum(map(len, views))
        # Until it is written, a response holds whole pieces, of which it shows parts.
        held = sum({id(view.obj): memoryview(view.obj).nbytes for view in views}.values())
        if held > size and self.state.in_flight + held > self.settings.max_in_flight_bytes:
            views, held = [memoryview(b"".join(views))], size
        self.state.in_flight += held
        try:
            # Asked of the connection, not of the settings: what an encrypted one does not encrypt is sent as it is.
            is_plain = writer.get_extra_info("sslcontext") is None
            if not is_plain:
                for part in slices(views):
                    await self._wait_for_write(writer, part, deadline)
            while is_plain and (views := write_at_once(writer, views)):
                # When the transport has written the next few bytes, the socket takes the most again.
                await self._wait_for_write(writer, views[0][:JOINED], deadline)
                views[0] = views[0][JOINED:]
        finally:
            self.state.in_flight -= held
        return size

    async def _wait_for_write(self, writer: asyncio.StreamWriter, part: bytes | memoryview, deadline: Deadline) -> None:
        writer.write(part)
        deadline.move(self._limit_s)
        await writer.drain()


def frame_of_fetch(request: Request, response: Any) -> list[memoryview]:
    """Frame of a Fetch response in parts; records are views of cached bytes.

    The response is encoded with a mark in place of each partition's records: kafka-python would copy the records twice.
    """
    records = []
    for topic in response.responses:
        for row in topic.partitions:
            if row.records:
                records.append(row.records)
                row.records = _MARK
    encoded = encode_response(request, response)
    whole = memoryview(encoded)
    if not records:
        return [whole]
    is_flexible = request.version >= 12
    head = len(UnsignedVarInt32.encode(len(_MARK) + 1)) if is_flexible else 4
    parts: list[memoryview] = []
    at = 4
    for chunks in records:
        found = encoded.index(_MARK, at)
        size = sum(map(len, chunks))
        length = UnsignedVarInt32.encode(size + 1) if is_flexible else size.to_bytes(4, "big")
        parts += [whole[at : found - head], memoryview(length), *chunks]
        at = found + len(_MARK)
    parts.append(whole[at:])
    return [memoryview(sum(map(len, parts)).to_bytes(4, "big")), *parts]


def write_at_once(writer: asyncio.StreamWriter, views: Sequence[memoryview]) -> list[memoryview]:
    """Write to the socket itself, which must not wait for its transport, and return what it does not take now.

    A transport would write each view by a system call, and copy what the socket does not take. Raises OSError.
    """
    number, left = writer.get_extra_info("socket").fileno(), list(views)
    with suppress(BlockingIOError):
        while left:
            size, done = os.writev(number, left[:MOST_VIEWS]), 0
            while done < len(left) and size >= len(left[done]):
                size -= len(left[done])
                done += 1
            del left[:done]
            if size:
                left[0] = left[0][size:]
    return left


def slices(views: Iterable[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield parts of at most SLICE bytes for TLS. Small ones are joined: each is a system call, and wakes the client."""
    joined = b""
    for view in views:
        taken = min(len(view), JOINED - len(joined)) if joined or len(view) < JOINED else 0
        joined += view[:taken]
        if len(joined) == JOINED:
            yield joined
            joined = b""
        for begin in range(taken, len(view), SLICE):
            yield view[begin : begin + SLICE]
    if joined:
        yield joined


def _open_socket(host: str, port: int, listen: str) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"`serve` cannot listen on {listen}: {why}", hint="Set serve.listen to a free address, or port 0") from error


def _cluster_id(tier: Tier) -> str:
    """The tier's id, so that no client takes the endpoint for the cluster that wrote the tier."""
    with suppress(CompactorError):
        if tier_id := tier.identity.read_catalog().tier_id:
            return tier_id
    return "tiered-compactor"


def client_lines(endpoint: Endpoint, topics: Sequence[str]) -> list[str]:
    host = f"[{endpoint.me.host}]" if ":" in endpoint.me.host else endpoint.me.host
    address, topic = f"{host}:{endpoint.me.port}", next(iter(topics), "TOPIC")
    return [
        f"serving {len(topics)} topics of {endpoint.tier.ports.layout.url} on {endpoint.address}, read only",
        f"kcat -b {address} -C -t {topic} -o beginning -e",
        f"Java, Python, Go: bootstrap.servers={address}, no group.id, assign() partitions and seek to the beginning",
        f"Kafka Streams, for a GlobalKTable: global.consumer.bootstrap.servers={address}",
    ]
