"""Image formats that mmdata recognises by their first bytes but does not read."""

from __future__ import annotations

_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"II\xbc\x01", "JPEG XR"),
    (b"8BPS", "Photoshop"),
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"SIMPLE  =", "FITS"),
    (b"\0\0\x01\0", "ICO"),
    (b"\0\0\x02\0", "CUR"),
    (b"icns", "ICNS"),
    (b"\x76\x2f\x31\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"#?RGBE", "Radiance HDR"),
    (b"DDS ", "DDS"),
    (b"qoif", "QOI"),
    (b"gimp xcf", "XCF"),
    (b"FLIF", "FLIF"),
    (b"BPG\xfb", "BPG"),
    (b"AT&TFORM", "DjVu"),
    (b"\x8aMNG\r\n\x1a\n", "MNG"),
    (b"\x8bJNG\r\n\x1a\n", "JNG"),
    (b"\xd7\xcd\xc6\x9a", "WMF"),
    (b"FUJIFILMCCD-RAW", "camera raw"),
    (b"IIRO", "camera raw"),
    (b"IIU\0", "camera raw"),
)


def unread_format(data: bytes | memoryview) -> str | None:
    """Name of a file's format if it is recognised but not read, else None.

    Args:
        data: at least the first 1,024 bytes; Netpbm, SVG and DICOM have no fixed first bytes.
    """
    head = bytes(data[:1024])
    for start, name in _STARTS:
        if head.startswith(start):
            return name
    if head[4:12] == b"ftypcrx ":
        return "camera raw"
    if head[:1] == b"P" and head[1:2] in b"1234567fF" and head[2:3].isspace():
        return "Netpbm"
    if head[128:132] == b"DICM":
        return "DICOM"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    is_svg = text.startswith((b"<svg", b"<!doctype svg")) or (text.startswith(b"<?xml") and b"<svg" in text)
    return "SVG" if is_svg else None
