"""A folder in a bucket of S3. Each file is written under a condition, so that two pushes do not mix their files.

The hash of each file is kept beside it, in its metadata.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmdata.errors import DataError
from mmdata.push.files import PushedFile, StoredFile, wrong_content
from mmdata.storage.attempts import Absent
from mmdata.storage.folder import INNER
from mmdata.storage.s3 import PART_BYTES, Listed, Refused, S3Folder, WrongContent, condition_on


class S3Store:
    """A folder in a bucket that exists. Safe to share between threads. Names of files are relative to its URL.

    Attributes:
        url: for readers of mmdata, without a "/" at the end.
        page: for people: where the folder is seen.
        base: what the URL of each file begins with for those who know HTTP alone; "" as they cannot read it.
    """

    base = ""

    def __init__(self, folder: S3Folder) -> None:
        self._folder = folder
        self.url = self.page = folder.url

    def listing(self, prefixes: Sequence[str]) -> dict[str, StoredFile]:
        """The files in folders with these prefixes and in their `__mmdata__`.

        Other folders below the URL are not listed: they may be other corpora, of millions of files.

        Raises:
            ConfigError: no such bucket, or it may not be listed.
        """
        found: dict[str, Listed] = {}
        for prefix in {"", *prefixes}:
            found |= self._folder.listing(prefix, sub_folders=False)
        for prefix in prefixes:
            found |= self._folder.listing(prefix + INNER)
        return {name: StoredFile(file.bytes, file.tag) for name, file in found.items()}

    def has(self, file: PushedFile, stored: StoredFile | None = None) -> bool:
        """Whether what is stored under the name of a file has its content, as far as the place can tell."""
        try:
            head = self._folder.ask("head_object", file.name)
        except Absent:
            return False
        return (head["ContentLength"], head["Metadata"].get("sha256")) == (file.bytes, file.sha256)

    def begin(self, withdrawn: Sequence[str], removed: Sequence[str]) -> None:
        """Remove files, those of `withdrawn` before any other change."""
        self._folder.remove(withdrawn)
        self._folder.remove(removed)

    def send(self, file: PushedFile, old: StoredFile | None) -> None:
        """Send a file in the place of `old`. Nothing is written over a file that has come since the listing.

        Raises:
            DataError: content differs, or another push writes there; or all attempts of a request failed.
            ConfigError: credentials are missing or not accepted.
        """
        try:
            self._put(file, condition_on(None if old is None else old.version))
        except Refused as refused:
            if refused.status in (400, 501):  # a store that knows no conditions
                if old is None and file.name in self._folder.listing(file.name, sub_folders=False):
                    raise self._conflict(file) from refused
                self._put(file, {})
            elif not self.has(file):
                raise self._conflict(file) from refused

    def publish(self, files: Sequence[PushedFile], replaced: Mapping[str, StoredFile]) -> None:
        """Send the last files, in this order; returns when all that was sent can be read."""
        for file in files:
            self.send(file, replaced.get(file.name))

    def _put(self, file: PushedFile, condition: dict[str, str]) -> None:
        if isinstance(file.source, bytes) or file.bytes <= PART_BYTES:
            self._folder.put(file.name, file.read(), file.sha256, condition=condition)
            return
        try:
            self._folder.put_in_parts(file.name, file.source, file.sha256, condition=condition)
        except WrongContent as error:
            raise wrong_content(file.source) from error

    def _conflict(self, file: PushedFile) -> DataError:
        return DataError(
            f"'{self._folder.url_of(file.name)}': another push wrote or removed this file since this one began; let "
            "one push end, then run this again"
        )
