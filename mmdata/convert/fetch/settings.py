"""How images behind URLs are fetched: who asks, how much at once, how long, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from mmdata.version import VERSION

PRODUCT = "mmdata"
"""Name by which robots.txt and X-Robots-Tag may address this program."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class FetchSettings:
    """Settings of a `Fetcher`. Those of a time or a number change how long a run takes; servers decide the rest.

    Attributes:
        user_agent: header of every request.
        ignore_opt_outs: whether images are taken whose owners opted out.
        allow_private_addresses: whether hosts of this machine and of private networks are asked.
        max_bytes: largest image, in bytes.
        connections: requests at once, over all hosts.
        per_host: requests at once to one host.
        rows_ahead: rows that are fetched before the first of them is taken.
        bytes_ahead: most bytes of these rows. The first of them may exceed it, by `max_bytes`.
        connect_s: timeout of a connection, TLS included.
        silence_s: timeout of a read that gets no byte of a body.
        answer_s: timeout from a request to the end of the answer's headers. The host's name is looked up before.
        patience_s: a URL whose requests have timed out after so long in all is not asked again. It is at most
            `answer_s` and `silence_s`, so that one that hangs is asked once, and holds up no run.
        body_s: timeout of a body, while one waits for its bytes.
        slow_s: a body of fewer than `least_bytes_per_s` for this long is given up.
        least_bytes_per_s: see `slow_s`.
        attempts: requests for one URL, redirects not counted.
        backoff_s: pause after the first failure, at most; it doubles each time, and is random from 0.
        longest_wait_s: longest pause; a host that asks for a longer one is not asked again.
        budget_s: time after which no further attempt is made for a URL, without waits for its turn.
        rules_again_s: time after which rules of a site that could not be read are asked for again.
        silent_urls: URLs of a host in a row without an answer, or with 429, after which it is left alone.
        silent_s: time that they take at least, so that a host may start anew.
        alone_s: time that it is left alone.
        report_s: time between two lines of the log.
    """

    user_agent: str
    ignore_opt_outs: bool = False
    allow_private_addresses: bool = False
    max_bytes: int = 256 * MIB
    connections: int = 128
    per_host: int = 2
    rows_ahead: int = 8192
    bytes_ahead: int = 512 * MIB
    connect_s: float = 10.0
    silence_s: float = 20.0
    answer_s: float = 15.0
    patience_s: float = 15.0
    body_s: float = 120.0
    slow_s: float = 10.0
    least_bytes_per_s: int = 1000
    attempts: int = 4
    backoff_s: float = 1.0
    longest_wait_s: float = 60.0
    budget_s: float = 120.0
    rules_again_s: float = 300.0
    silent_urls: int = 20
    silent_s: float = 30.0
    alone_s: float = 300.0
    report_s: float = 10.0


def user_agent(contact: str | None) -> str:
    """A truthful User-Agent.

    Args:
        contact: URL or mail address of who runs the conversion; None leaves it out.

    Example:
        user_agent("https://lab.example/crawl") == "mmdata/0.1.0 (+https://lab.example/crawl)"
    """
    name = f"{PRODUCT}/{VERSION}"
    return f"{name} (+{contact})" if contact else name
