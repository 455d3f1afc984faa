"""Which addresses are asked, and how often a name is looked up."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver

from mmdata.convert.fetch.addresses import CachedResolver, RefusedAddress, address_fault, any_address, guarded_socket
from tests.convert.fetch.conftest import fetch_all
from tests.convert.fetch.sites import Answer, Site


class Names(AbstractResolver):
    """A name service. `names`: addresses by host, one list for each question in turn, or an error."""

    def __init__(self, names: dict[str, Any] | None = None, default: Any = ("127.0.0.1",)) -> None:
        self.names, self.default = names or {}, default
        self.asked: Counter[str] = Counter()

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
        found = self.names.get(host, self.default)
        if isinstance(found, list):
            found = found[min(self.asked[host], len(found) - 1)]
        self.asked[host] += 1
        await asyncio.sleep(0)
        if isinstance(found, OSError):
            raise found
        return [
            {"hostname": host, "host": one, "port": port, "proto": 0, "flags": 0, "family": socket.AF_INET}
            for one in found
        ]

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("93.184.215.14", ""),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", ""),
        ("::ffff:93.184.215.14", ""),
        ("64:ff9b::5db8:d70e", ""),
        ("127.0.0.1", "loopback"),
        ("127.255.0.9", "loopback"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("64:ff9b::7f00:1", "loopback"),
        ("2002:7f00:1::", "loopback"),
        ("2002:a00:1::", "private"),
        ("10.1.2.3", "private"),
        ("172.16.0.1", "private"),
        ("192.168.1.1", "private"),
        ("fd00::1", "private"),
        ("fec0::1", "private"),
        ("169.254.169.254", "link-local"),
        ("::ffff:169.254.169.254", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("0.0.0.0", "unspecified"),
        ("::", "unspecified"),
        ("0.1.2.3", "private"),
        ("100.64.0.1", "special"),
        ("100.127.255.255", "special"),
        ("::ffff:100.64.0.1", "special"),
        ("168.63.129.16", "special"),
        ("168.63.129.17", ""),
        ("64:ff9b::a83f:8110", "special"),
        ("192.0.0.9", "special"),
        ("192.0.0.192", "special"),
        ("192.88.99.1", "special"),
        ("64:ff9b:1::7f00:1", "special"),
        ("64:ff9b:1:ffff::5db8:d70e", "special"),
        ("3fff::1", "special"),
        ("3fff:fff::1", "special"),
        ("5f00::1", "special"),
        ("192.0.2.1", "private"),
        ("198.18.0.1", "private"),
        ("224.0.0.1", "multicast"),
        ("224.0.1.9", "multicast"),
        ("ff02::1", "multicast"),
        ("240.0.0.1", "private"),
        ("255.255.255.255", "private"),
        ("2001:db8::1", "private"),
        ("::7f00:1", "reserved"),
        ("nonsense", "malformed"),
    ],
)
def test_only_global_addresses_may_be_asked(address: str, fault: str) -> None:
    assert address_fault(address) == fault
    assert any_address(address) == ""


def test_socket_is_refused_for_the_address_that_it_would_be_connected_to() -> None:
    make = guarded_socket(address_fault)
    with pytest.raises(RefusedAddress, match=r"^address 10\.0\.0\.1 is private$"):
        make((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 80)))
    make((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", 80))).close()


def test_name_of_a_private_address_is_refused(site: Site) -> None:
    site.answers["/a.jpg"] = Answer()
    names = Names({"inside.example": ("10.0.0.1",)})
    urls = [f"http://{host}:{site.port}/a.jpg" for host in ("inside.example", "rebound.example")]
    found = fetch_all(urls, resolver=names, fault_of=address_fault)
    words = "; --allow-private-addresses allows it"
    assert found[0] == ("refused_address", f"address 10.0.0.1 of 'inside.example' is private{words}")
    assert found[1] == ("refused_address", f"address 127.0.0.1 of 'rebound.example' is loopback{words}")
    assert not site.requests


def test_name_that_moves_to_a_private_address_is_not_followed_there(site: Site) -> None:
    """The answer that was checked is the one that is used, as long as the run lasts; the next is never asked for."""
    site.answers["/a.jpg"] = [Answer(503), Answer(200, b"an image", {"Connection": "close"})]
    names = Names({"moves.example": [("127.0.0.1",), ("127.0.0.2",)]})
    urls = [f"http://moves.example:{site.port}/a.jpg?{number}" for number in range(4)]
    found = fetch_all(urls, resolver=names, fault_of=lambda one: "" if one == "127.0.0.1" else "private")
    assert found == [b"an image"] * 4
    assert names.asked == {"moves.example": 1}


def test_addresses_that_may_be_asked_are_kept_of_several() -> None:
    async def run() -> Any:
        names = Names({"both.example": ("10.0.0.1", "93.184.215.14")})
        return await CachedResolver(names, address_fault).resolve("both.example", 443)

    assert [(one["host"], one["port"]) for one in asyncio.run(run())] == [("93.184.215.14", 443)]


def test_name_without_an_address_is_unreachable_and_asked_once() -> None:
    gone = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    names = Names({"gone.example": gone})
    found = fetch_all(
        [f"http://gone.example/{number}.jpg" for number in range(5)], resolver=names, ignore_opt_outs=True
    )
    assert found == [("unreachable", "no address of 'gone.example' is known: Name or service not known")] * 5
    assert names.asked == {"gone.example": 1}


def test_name_service_that_fails_is_asked_again(site: Site) -> None:
    site.answers["/a.jpg"] = Answer(200, b"an image")
    busy = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    names = Names({"busy.example": [busy, busy, ("127.0.0.1",)], "never.example": busy})
    urls = [f"http://{host}.example:{site.port}/a.jpg" for host in ("busy", "never")]
    found = fetch_all(urls, resolver=names, ignore_opt_outs=True)
    assert found[0] == b"an image"
    detail = "no address of 'never.example' is known: Temporary failure in name resolution (4 times asked)"
    assert found[1] == ("unreachable", detail)


class BlockedNames(Names):
    """A name service in the loop's threads, of which each question takes one for `block_s`.

    Attributes:
        most_at_once: questions that were open together.
    """

    def __init__(self, names: dict[str, Any], block_s: float) -> None:
        super().__init__(names)
        self.most_at_once = 0
        self._block_s = block_s
        self._open = 0

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        await asyncio.get_running_loop().run_in_executor(None, time.sleep, self._block_s)
        self._open -= 1
        return await super().resolve(host, port, family)


@pytest.mark.sweep
def test_slow_names_cost_neither_their_urls_nor_those_of_other_hosts(site: Site) -> None:
    site.answers["/a.jpg"] = Answer(200, b"an image")
    busy = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    names = BlockedNames({f"dead{number}.example": busy for number in range(3)}, block_s=2.5)
    urls = [f"http://{host}.example:{site.port}/a.jpg" for host in ("dead0", "dead1", "dead2", "good0", "good1")]
    settings: dict[str, Any] = {"connections": 2, "attempts": 2, "answer_s": 2, "patience_s": 2}
    found = fetch_all(urls, resolver=names, ignore_opt_outs=True, **settings)
    detail = "no address of '{}' is known: Temporary failure in name resolution (2 times asked)"
    assert found[:3] == [("unreachable", detail.format(f"dead{number}.example")) for number in range(3)]
    assert found[3:] == [b"an image"] * 2
    assert names.most_at_once == 2


def test_lookups_of_a_whole_run_are_one_a_host(site: Site) -> None:
    site.answers["/a.jpg"] = Answer(200, b"an image")
    names = Names()
    urls = [f"http://host{number % 100}.example:{site.port}/a.jpg?{number}" for number in range(1000)]
    assert fetch_all(urls, resolver=names) == [b"an image"] * 1000
    assert len(names.asked) == 100
    assert set(names.asked.values()) == {1}
    assert {count for name, count in site.requests.items() if name.endswith("/robots.txt")} == {1}
