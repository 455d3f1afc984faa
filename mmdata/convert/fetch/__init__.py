"""Fetches the images of tables that hold URLs. Owners who opted out, and private addresses, are left alone.

`FetchStage` maps rows to rows in their order, fetching ahead within a bound of rows and bytes (`room`).
`Fetcher` fetches one URL: redirects by hand, each checked, and retries.
`request` asks once, and reads no more than may come. `hosts` holds the connections, pauses and rules of each host.
`addresses` refuses private addresses where the socket is made. `tally` counts for the log.
`tables` fetches the tables themselves, where they are behind a URL.
"""

from mmdata.convert.fetch.stage import FetchStage, is_unfetched, refuse_urls

__all__ = ["FetchStage", "is_unfetched", "refuse_urls"]
