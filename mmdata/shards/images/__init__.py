"""What bytes say of an image before it is decoded.

- `probe`: format, size and orientation from the header, and limits on them; `png`: checksums of a PNG; `heif` and
  `jxl`: headers of formats whose decoders may be missing; `plugins`: the decoders, and what installs those.
- `unread`: formats that are recognised and not read; `decoder_warnings`: what libraries print while they decode.
"""
