"""What a WebDataset tar says: its members, its samples, and what each is to an index. No index, no network.

- `tar` reads members strictly; `block_reader` reads a tar once, in large blocks, and hashes it in passing.
- `samples` groups members to samples; `scan` makes each sample a `row`, or a line of the list of left-out rows.
- `write` writes samples into a tar, and makes their rows.
- `members` chooses image, caption and label; `texts` and `captions` read them; `member_values` reads other values.
- `foreign` and `braces` find the tars that a user names.
"""

from mmdata.tars.captions import captions_of, clean_caption
from mmdata.tars.tar import Member, read_members

__all__ = ["Member", "captions_of", "clean_caption", "read_members"]
