"""A preview of a table of URLs: the sample is fetched by the same rules, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmdata.convert import ConvertConfig, preview
from mmdata.convert.preview_lines import preview_lines
from mmdata.errors import Reason
from tests.convert.conftest import jsonl
from tests.convert.fetch.sites import Answer, Site


def test_preview_fetches_the_sample_only_and_says_what_became_of_it(
    site: Site, tmp_path: Path, photo: Callable[..., bytes]
) -> None:
    data = photo(16, 16)
    rows = [{"url": site.url(f"/{n}.jpg", f"127.0.0.{1 + n % 7}"), "caption": f"photo {n}"} for n in range(1000)]
    site.answers |= {f"/{n}.jpg": Answer(200, data + n.to_bytes(4, "big")) for n in range(1000) if n % 4}
    table = jsonl(tmp_path / "t.jsonl", rows)
    config = ConvertConfig(allow_private_addresses=True, max_bad_share=0.5, max_unfetched_share=0.1)
    found = preview(table, config, out=tmp_path / "out")
    assert (found.sample.rows, found.sample.size, found.sample.urls, site.images()) == (1000, 500, 1000, 500)
    assert found.reasons[Reason.HTTP_STATUS].low <= 250 <= found.reasons[Reason.HTTP_STATUS].high
    assert found.unfetched == found.reasons[Reason.HTTP_STATUS]
    assert found.seconds is None
    assert not (tmp_path / "out").exists()
    lines = preview_lines(found)
    assert "urls: 1,000 images to fetch" in lines
    assert any(line.startswith("time: the servers decide how long it takes, not this machine; ") for line in lines)
    assert lines[-1] == (
        "nothing would be published: more than 10 % of the rows have a URL that gives no image; allow more with "
        "max_unfetched_share=… after OUT"
    )


def test_preview_honours_opt_outs(site: Site, tmp_path: Path, photo: Callable[..., bytes]) -> None:
    site.answers |= {"/a.jpg": Answer(200, photo(16, 16)), "/robots.txt": Answer(200, b"User-agent: *\nDisallow: /")}
    table = jsonl(tmp_path / "t.jsonl", [{"url": site.url("/a.jpg"), "caption": "a"}])
    found = preview(table, ConvertConfig(allow_private_addresses=True))
    assert (found.statuses["written"].likely, list(found.reasons)) == (0, [Reason.OPTED_OUT])
    assert "none of 1 rows could be written" in found.nothing
    assert site.images() == 0


def test_preview_fetches_a_table_and_keeps_it_nowhere(site: Site, tmp_path: Path, photo: Callable[..., bytes]) -> None:
    site.answers["/a.jpg"] = Answer(200, photo(16, 16))
    site.answers["/t.csv"] = Answer(200, f"url,caption\n{site.url('/a.jpg')},a\n".encode())
    found = preview(site.url("/t.csv"), ConvertConfig(allow_private_addresses=True), out=tmp_path / "new" / "out")
    assert (found.statuses["written"].likely, found.sample.urls) == (1, 1)
    assert list(tmp_path.iterdir()) == []
