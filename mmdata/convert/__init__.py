"""Converts raw corpora to shards. Rows in = written + merged + duplicate + filtered + quarantined, or all is undone.

`open_source` opens a folder, a table or tars as a `Source`, which gives `Row`s in one fixed order, and `open_rows` the
dicts of a program. `fetched` brings tables behind a URL to this machine first. `annotations` are sources whose images
have boxes.
`fetch` replaces URLs in rows by the bytes of the images.
`GroupedSource` merges the rows of one image. `Conversion` runs the whole: one folder, or `train` and `val`.
An `Examiner` turns a row into a sample or a fault: it reads and decodes the image and cleans the captions.
An engine applies the examiner to rows, in threads or with Ray, and returns the results in the order of the rows.
`Accounts` count what becomes of each row; `ShardWriter` writes the samples; the ledger names each row left out.
`Retry` names rows that an earlier conversion (`Earlier`) left out; `RetriedRows` is the source of these rows.
`preview` examines a sample of the rows, and writes nothing: how many will be written, what is wrong with the others.
`Output` is the folder: the conversion is made in a hidden sub-folder and moved into place whole, the manifest last.
"""

from mmdata.convert.accounts import Accounts
from mmdata.convert.convert import PartReport, Report, convert, convert_part
from mmdata.convert.preview import Preview, preview
from mmdata.convert.recipe import ConvertConfig, load_recipe
from mmdata.convert.retry import Retry

__all__ = [
    "Accounts",
    "ConvertConfig",
    "PartReport",
    "Preview",
    "Report",
    "Retry",
    "convert",
    "convert_part",
    "load_recipe",
    "preview",
]
