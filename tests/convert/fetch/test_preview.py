"""A preview of a table of URLs: the sample is fetched by the same rules, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmdata.cli.preview_lines import preview_lines
from mmdata.convert import ConvertConfig, preview
from mmdata.convert.sampling import Estimate
from mmdata.errors import Reason
from tests.convert.conftest import jsonl
from tests.convert.fetch.sites import Answer, Site


def test_preview_fetches_the_sample_only_and_says_what_became_of_it(
    site: Site, tmp_path: Path, photo: Callable[..., bytes]
) -> None:
    data = photo(16, 16)
    rows = [{"url": site.url(f"/{n}.jpg", f"127.0.0.{1 + n % 7}"), "caption": f"photo {n}"} for n in range(1000)]
    site.answers |= {f"/{n}.jpg": Answer(200, data) for n in range(1000) if n % 4}
    table = jsonl(tmp_path / "t.jsonl", rows)
    found = preview(table, ConvertConfig(allow_private_addresses=True, max_bad_share=0.5), out=tmp_path / "out")
    assert (found.rows, found.sample.size, found.urls, site.images()) == (1000, 500, 500, 500)
    assert found.fetched == 500 - found.reasons[Reason.HTTP_STATUS].sampled
    assert found.reasons[Reason.HTTP_STATUS].low <= 250 <= found.reasons[Reason.HTTP_STATUS].high
    assert found.seconds is None
    assert not (tmp_path / "out").exists()
    lines = preview_lines(found, "out")
    assert f"fetched: {found.fetched} of the sample's 500 URLs ({found.fetched / 5:.1f} %)" in lines
    assert any(line.startswith("time: the servers decide how long it takes, not this machine; ") for line in lines)


def test_preview_names_each_limit_that_is_exceeded(site: Site, tmp_path: Path) -> None:
    rows = [{"url": site.url("/gone.jpg"), "caption": "a photo"}, {"url": "s3://bucket/a.jpg", "caption": "a photo"}]
    table = jsonl(tmp_path / "t.jsonl", rows)
    found = preview(table, ConvertConfig(allow_private_addresses=True, max_unfetched_share=0.2))
    assert preview_lines(found, "out")[-2:] == [
        "nothing would be published: more than 5 % of the rows cannot be used; repair the corpus, or allow more with "
        "--max-bad-share",
        "nothing would be published: more than 20 % of the rows have a URL that gives no image; allow more with "
        "max_unfetched_share in the recipe",
    ]


def test_preview_honours_opt_outs(site: Site, tmp_path: Path, photo: Callable[..., bytes]) -> None:
    site.answers |= {"/a.jpg": Answer(200, photo(16, 16)), "/robots.txt": Answer(200, b"User-agent: *\nDisallow: /")}
    table = jsonl(tmp_path / "t.jsonl", [{"url": site.url("/a.jpg"), "caption": "a"}])
    found = preview(table, ConvertConfig(allow_private_addresses=True))
    assert found.reasons == {Reason.OPTED_OUT: Estimate(1, 1, 1, 1)}
    assert (found.urls, found.fetched, site.images()) == (1, 0, 0)
    site.answers["/robots.txt"] = Answer(404)
    table = jsonl(tmp_path / "ftp.jsonl", [{"url": "ftp://host/a.jpg", "caption": "a"}])
    assert preview(table).reasons == {Reason.REFUSED_ADDRESS: Estimate(1, 1, 1, 1)}


def test_preview_fetches_a_table_and_keeps_it_nowhere(site: Site, tmp_path: Path, photo: Callable[..., bytes]) -> None:
    site.answers["/a.jpg"] = Answer(200, photo(16, 16))
    site.answers["/t.csv"] = Answer(200, f"url,caption\n{site.url('/a.jpg')},a\n".encode())
    found = preview(site.url("/t.csv"), ConvertConfig(allow_private_addresses=True), out=tmp_path / "new" / "out")
    assert (found.written.likely, found.fetched) == (1, 1)
    assert found.free_bytes is not None
    assert list(tmp_path.iterdir()) == []
