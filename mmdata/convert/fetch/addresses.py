"""Which hosts and addresses are asked. An address is checked when a socket is made for it, so nothing comes between.

A URL comes from data: it must not reach services of this machine or of its network, whatever the name in it resolves
to, now or later.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

AddressFault = Callable[[str], str]
"""What speaks against an address, such as "private"; "" for one that may be asked."""

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SPECIAL = tuple(
    ipaddress.ip_network(one)
    for one in (
        "100.64.0.0/10",  # shared, of carriers (RFC 6598)
        "168.63.129.16/32",  # services of Azure for its machines
        "192.0.0.0/24",  # of IETF protocols (RFC 6890); clouds have services here
        "192.88.99.0/24",  # relays of 6to4 (RFC 7526)
        "64:ff9b:1::/48",  # local NAT64 (RFC 8215), whose IPv4 address may lie anywhere
        "3fff::/20",  # documentation (RFC 9637)
        "5f00::/16",  # segment routing (RFC 9602)
    )
)
"""Networks of which patch levels of Python think differently, or think well."""
_KINDS = ("loopback", "link_local", "multicast", "unspecified", "private", "reserved")


class RefusedAddress(OSError):
    """The address is not asked. An OSError, since aiohttp passes these on as causes."""


def address_fault(address: str) -> str:
    """What speaks against an address: "" only for a global unicast one.

    An IPv6 address that holds an IPv4 address (mapped, 6to4, Teredo, NAT64) is judged by that one too.

    Example:
        address_fault("10.0.0.1") == "private"; address_fault("::ffff:127.0.0.1") == "loopback"
    """
    try:
        one = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "malformed"
    if any(one in network for network in _SPECIAL):
        return "special"
    if isinstance(one, ipaddress.IPv6Address):
        for inner in _embedded(one):
            if fault := address_fault(str(inner)):
                return fault
        if one.ipv4_mapped:
            return ""
        if one in _NAT64:
            return ""
        if one.is_site_local:
            return "private"
    for kind in _KINDS:
        if getattr(one, f"is_{kind}"):
            return kind.replace("_", "-")
    return "" if one.is_global else "not global"


def any_address(address: str) -> str:
    """The `AddressFault` that finds none."""
    return ""


def _embedded(one: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses that packets to an IPv6 address may end at."""
    found = [one.ipv4_mapped, one.sixtofour, *(one.teredo or ())]
    if one in _NAT64:
        found.append(ipaddress.IPv4Address(int(one) & 0xFFFFFFFF))
    return [inner for inner in found if inner is not None]


def guarded_socket(fault_of: AddressFault) -> Callable[[Any], socket.socket]:
    """Makes the sockets of a connector. Each is for the one address that it will be connected to.

    Raises:
        RefusedAddress: by the function returned.
    """

    def make(info: Any) -> socket.socket:
        family, kind, protocol, _, address = info
        if fault := fault_of(str(address[0])):
            raise RefusedAddress(f"address {address[0]} is {fault}")
        return socket.socket(family, kind, protocol)

    return make


class CachedResolver(AbstractResolver):
    """Asks for each host once, and keeps the addresses that may be asked, or the failure.

    Args:
        inner: does the asking.
        fault_of: judges addresses.

    A failure of the name service itself (EAI_AGAIN) is not kept. A name that changes its address during a run keeps
    the first one.
    """

    def __init__(self, inner: AbstractResolver, fault_of: AddressFault) -> None:
        self._inner = inner
        self._fault_of = fault_of
        self._found: dict[str, asyncio.Future[list[ResolveResult]]] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Addresses of a host.

        Raises:
            RefusedAddress: none of its addresses may be asked.
            OSError: the host has no address.
        """
        found = self._found.get(host)
        if found is None:
            found = self._found[host] = asyncio.ensure_future(self._ask(host, family))
            found.add_done_callback(lambda done: self._forget(host, done))
        return [{**one, "port": port} for one in await asyncio.shield(found)]

    async def close(self) -> None:
        """Close the inner one."""
        await self._inner.close()

    async def _ask(self, host: str, family: socket.AddressFamily) -> list[ResolveResult]:
        found = await self._inner.resolve(host, 0, family)
        faults = [self._fault_of(one["host"]) for one in found]
        good = [one for one, fault in zip(found, faults, strict=True) if not fault]
        if found and not good:
            raise RefusedAddress(f"address {found[0]['host']} of '{host}' is {faults[0]}")
        return good

    def _forget(self, host: str, done: asyncio.Future[list[ResolveResult]]) -> None:
        if done.cancelled() or is_passing(done.exception()):
            self._found.pop(host, None)


def is_passing(error: BaseException | None) -> bool:
    """Whether an error says that the name service could not answer now."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_AGAIN
        error = error.__cause__ or error.__context__
    return False
