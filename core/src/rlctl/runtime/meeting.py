"""Where the ranks of a group meet when they are not all on one host: a TCP store that listens on one address only."""

from __future__ import annotations

import datetime
import socket
import struct
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

SCHEME = "tcp://"
_BACKLOG = 2048
_SIOCGIFADDR = 0x8915


def reserve(address: str) -> tuple[socket.socket, str]:
    """Take a free port of ``address`` and keep it from being given to anybody else.

    Returns:
        the bound socket, which does not listen, and the URL of the meeting place. While the socket lives, only one who
        asks for this very port gets it, which is rank 0 in :func:`tcp_store`.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    port = holder.getsockname()[1]
    return holder, f"{SCHEME}[{address}]:{port}" if family == socket.AF_INET6 else f"{SCHEME}{address}:{port}"


def tcp_store(url: str, rank: int, world_size: int, timeout: datetime.timedelta) -> TCPStore:
    """The store at ``url``. Rank 0 serves it, on that address and no other."""
    from torch._C._distributed_c10d import TCPStore

    place = urlsplit(url)
    assert place.hostname, url
    assert place.port, url
    descriptor: int | None = None
    if rank == 0:
        listener = socket.socket(socket.AF_INET6 if ":" in place.hostname else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((place.hostname, place.port))
        listener.listen(_BACKLOG)
        descriptor = listener.detach()
    return TCPStore(
        place.hostname,
        place.port,
        world_size,
        rank == 0,
        timeout,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )


def interface_of(address: str) -> str | None:
    """Name of the network interface that has this IPv4 address (``lo``, ``eth0``); None where it cannot be told."""
    if sys.platform != "linux" or ":" in address:
        return None
    if address.startswith("127."):
        return "lo"
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
