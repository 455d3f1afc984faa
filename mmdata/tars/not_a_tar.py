"""Names files that are often found in a tar's place, each with the remedy."""

from __future__ import annotations


def other_file(block: bytes) -> tuple[str, str] | None:
    """What a file is that is often found in a tar's place, and the remedy; None if it may be a tar."""
    start = block.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<script")):
        return (
            "is an HTML page, not a tar: a page of login or of an error was saved in its place",
            "open its URL in a browser, and fetch it again with credentials",
        )
    if start.startswith((b"<?xml", b'{"')):
        return "is text, not a tar: a server's error was saved in its place", "read it, and fetch the shard again"
    for magic, name, remedy in _OTHERS:
        if block.startswith(magic):
            return f"is {name}, not a tar", remedy
    return None


_OTHERS = (
    (b"PK\x03\x04", "a ZIP archive", "use `mmdata convert`, which reads it in place"),
    (b"PAR1", "a Parquet table", "use `mmdata convert`"),
    (b"BZh", "compressed (bzip2), which has no random access", "`bunzip2` it first"),
    (b"\xfd7zXZ\0", "compressed (xz), which has no random access", "`unxz` it first"),
    (b"\x28\xb5\x2f\xfd", "compressed (zstd), which has no random access", "`unzstd` it first"),
    (b"version https://git-lfs", "a pointer of Git LFS", "fetch the file itself with `git lfs pull`"),
)
