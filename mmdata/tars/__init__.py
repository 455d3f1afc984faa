"""What a WebDataset tar says: its members, its samples, and what each is to an index. No index, no network.

- `tar` reads members strictly, and writes their headers.
- `samples` groups members to samples; `scan` makes each a row of the index, or a line of the list of left-out rows.
- `write` writes samples into a tar, and makes their rows.
- `members` chooses image, caption and label, and reads other values; `texts` and `captions` read texts.
- `foreign` finds the tars that a user names.
"""

from mmdata.tars.captions import captions_of, clean_caption
from mmdata.tars.tar import Member, read_members

__all__ = ["Member", "captions_of", "clean_caption", "read_members"]
