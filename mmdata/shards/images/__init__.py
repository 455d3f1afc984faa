"""What bytes say of an image before it is decoded.

- `probe`: format, size and orientation from the header, and limits on them; `png`: checksums of a PNG.
- `unread`: formats that are recognised and not read; `decoder_warnings`: what libraries print while they decode.
"""
