"""A dataset of the Hugging Face hub. Nothing is seen before its commit, and the last commit has the manifests.

Large files go up before the commit that names them. Each commit names the one that it follows: if somebody else has
committed since, the hub refuses it, so two pushes do not mix their files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any, TypeVar, cast

from mmdata.errors import ConfigError, DataError
from mmdata.push.files import PushedFile
from mmdata.push.store import Sent, StoredFile
from mmdata.storage.attempts import GIVE_CREDENTIALS, cause_of, is_denied, repeated

COMMIT_FILES = 200
"""Files of a commit: the hub takes long for more. A push of no more files is one commit."""
BATCH_FILES = 32
"""Files that are sent before the progress is shown."""
IN_MEMORY_BYTES = 2**20
"""A smaller file is read once, and kept until its commit."""

T = TypeVar("T")


class HubStore:
    """A dataset; see `Store`.

    Args:
        dataset: "OWNER/NAME".
        revision: a branch, which must exist; None: main.
        private: if the dataset is made.
        threads: files that are sent at the same time.
    """

    def __init__(self, dataset: str, revision: str | None = None, *, private: bool = False, threads: int = 4) -> None:
        self._dataset = dataset
        self._revision = revision
        self._private = private
        self._threads = threads
        self._head: str | None = None
        self._pending: list[Any] = []
        self._removals: list[str] = []

    @property
    def url(self) -> str:
        """See `Store`."""
        return f"hf://datasets/{self._dataset}" + (f"@{self._revision}" if self._revision else "")

    @property
    def page(self) -> str:
        """See `Store`."""
        return f"{self._api.endpoint}/datasets/{self._dataset}"

    @property
    def base(self) -> str:
        """See `Store`."""
        return f"{self.page}/resolve/{self._revision or 'main'}/"

    @cached_property
    def _api(self) -> Any:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # `push` has one for all files
        return HfApi(library_name="mmdata")

    def listing(self, prefixes: Sequence[str]) -> dict[str, StoredFile]:
        """See `Store`.

        Raises:
            ConfigError: no such branch, or access is denied.
        """
        from huggingface_hub.hf_api import RepoFile

        try:
            self._head = self._find_head()
        except _NoDataset:  # also without credentials: making it will tell
            return {}
        tree = self._repeated(
            lambda: list(self._api.list_repo_tree(**self._where, recursive=True, revision=self._head))
        )
        return {
            item.path: StoredFile(item.size, item.blob_id, item.lfs.sha256 if item.lfs else None)
            for item in tree
            if isinstance(item, RepoFile)
        }

    @property
    def _where(self) -> dict[str, str]:
        return {"repo_id": self._dataset, "repo_type": "dataset"}

    def _find_head(self) -> str:
        return self._repeated(lambda: self._api.repo_info(**self._where, revision=self._revision)).sha

    def is_same(self, file: PushedFile, stored: StoredFile) -> bool:
        """See `Store`: the SHA-256 of a large file, and git's hash of a small one, which is read for it."""
        if stored.sha256 is not None:
            return stored.sha256 == file.sha256
        content = file.read()
        return stored.version == hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()

    def read(self, name: str) -> bytes:
        """See `Store`."""
        from huggingface_hub import HfFileSystem

        files = HfFileSystem(endpoint=self._api.endpoint, skip_instance_cache=True)
        path = f"datasets/{self._dataset}/{name}"
        return self._repeated(lambda: cast(bytes, files.cat_file(path, revision=self._head)))

    def begin(self) -> None:
        """See `Store`.

        Raises:
            ConfigError: the credentials do not allow it.
        """
        if self._head is None:
            self._repeated(lambda: self._api.create_repo(**self._where, private=self._private or None, exist_ok=True))
            self._head = self._find_head()

    def remove(self, names: Iterable[str]) -> None:
        """See `Store`: removed in the first commit."""
        self._removals += names

    def send(self, files: Sequence[PushedFile], replaced: Mapping[str, StoredFile], sent: Sent) -> None:
        """See `Store`. What is replaced is known by the commit that follows the one that was listed.

        Raises:
            DataError: content differs, or somebody else has committed; or all attempts of a request failed.
            ConfigError: credentials are missing or not accepted.
        """
        for start in range(0, len(files), BATCH_FILES):
            batch = files[start : start + BATCH_FILES]
            if len(self._pending) + len(batch) > COMMIT_FILES:
                self._commit("Push a part of a folder of shards")
            self._pending += self._uploaded(batch)
            for file in batch:
                sent(file)

    def publish(self, files: Sequence[PushedFile], replaced: Mapping[str, StoredFile]) -> None:
        """See `Store`: all in one commit."""
        self._pending += self._uploaded(files)
        self._commit("Push a folder of shards")

    def _uploaded(self, files: Sequence[PushedFile]) -> list[Any]:
        """The operations that add files, whose content is at the hub if it is not to be sent with the commit."""
        from huggingface_hub import CommitOperationAdd

        additions = [CommitOperationAdd(file.name, _content(file)) for file in files]
        self._repeated(
            lambda: self._api.preupload_lfs_files(
                self._dataset,
                additions,
                repo_type="dataset",
                revision=self._revision,
                num_threads=self._threads,
                free_memory=False,  # it would forget the content of files that a later attempt must send
                gitignore_content="",  # a .gitignore in the dataset would leave files out
            )
        )
        for file, addition in zip(files, additions, strict=True):
            file.check(addition.upload_info.sha256.hex())  # of the bytes that were sent
        return additions

    def _commit(self, message: str) -> None:
        from huggingface_hub import CommitOperationDelete

        stays = {operation.path_in_repo for operation in self._pending}
        removals = [CommitOperationDelete(name) for name in self._removals if name not in stays]
        if not self._pending and not removals:
            return
        done = self._repeated(
            lambda: self._api.create_commit(
                self._dataset,
                [*self._pending, *removals],
                commit_message=message,
                repo_type="dataset",
                revision=self._revision,
                parent_commit=self._head,
                num_threads=self._threads,
            )
        )
        self._head, self._pending, self._removals = done.oid, [], []

    def _repeated(self, ask: Callable[[], T]) -> T:
        """Make requests again that fail and may pass; other errors of the hub are raised as our own."""

        def once() -> T:
            try:
                return ask()
            except Exception as error:
                cause = error.__cause__ if isinstance(error, RuntimeError) else None  # of an upload in a thread
                raise self._as_ours(cause if isinstance(cause, Exception) else error) from error

        return repeated(once, self.url, budget_s=inf)  # uploads take long

    def _as_ours(self, error: Exception) -> Exception:
        """An error of ours for one that another attempt would not change; otherwise the error."""
        from huggingface_hub import errors

        cause = cause_of(error)
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, (ConfigError, DataError)):
            return error
        if isinstance(error, errors.RepositoryNotFoundError):
            return _NoDataset(f"'{self.url}': no such dataset, or it may not be seen; {GIVE_CREDENTIALS}")
        if isinstance(error, errors.RevisionNotFoundError):
            return ConfigError(f"'{self.url}': no branch '{self._revision}'; make it at the hub, or leave it out")
        if is_denied(error):
            return ConfigError(f"'{self.url}': access denied ({cause}); {GIVE_CREDENTIALS}")
        if status in (409, 412):
            return DataError(
                f"'{self.url}': somebody else has changed the dataset since this push began ({cause}); run this again"
            )
        if status == 400 or isinstance(error, (errors.OfflineModeIsEnabled, ValueError)):
            return ConfigError(f"'{self.url}': the hub does not take this: {cause}")
        return error


class _NoDataset(ConfigError):
    """There is no dataset of this name, or the credentials do not show it."""


def _content(file: PushedFile) -> str | bytes:
    """The content of a small file, the path of a large one."""
    if isinstance(file.source, bytes) or file.bytes < IN_MEMORY_BYTES:
        return file.read()
    return str(file.source)
