"""A dataset or model of the Hugging Face hub. Nothing is seen before its commit, and the last commit has the manifests.

Files go up before the commit that names them. Each commit names the one that it follows: if somebody else has committed
since, the hub refuses it, so two pushes do not mix their files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, errors
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars

from mmdata.errors import ConfigError, DataError
from mmdata.push.files import PushedFile, StoredFile
from mmdata.storage.attempts import GIVE_CREDENTIALS, cause_of, is_denied, repeated, status_of

COMMIT_FILES = 200
"""Files of a commit: the hub takes long for more. A push of no more files is one commit."""

T = TypeVar("T")


class HubStore:
    """A dataset or model, with the methods and attributes of `S3Store`.

    Args:
        name: "OWNER/NAME".
        revision: a branch, which must exist; None: main.
        private: if it is made.
        kind: "dataset" or "model".
    """

    def __init__(self, name: str, revision: str | None = None, *, private: bool = False, kind: str = "dataset") -> None:
        self._api: Any = HfApi(library_name="mmdata")
        path = f"datasets/{name}" if kind == "dataset" else name
        self.name, self.kind = name, kind
        self.url = f"hf://{path}" + (f"@{revision}" if revision else "")
        self.page = f"{self._api.endpoint}/{path}"
        self.base = f"{self.page}/resolve/{revision or 'main'}/"
        self._where = {"repo_id": name, "repo_type": kind, "revision": revision}
        self._private = private
        self._head: str | None = None
        self._additions: list[CommitOperationAdd] = []
        self._removals: list[str] = []
        disable_progress_bars()  # `push` has one for all files

    def listing(self, prefixes: Sequence[str]) -> dict[str, StoredFile]:
        """See `S3Store`.

        Raises:
            ConfigError: no such branch, or access is denied.
        """
        try:
            self._head = self._find_head()
        except _NoDataset:  # also without credentials: making it will tell
            return {}
        where = self._where | {"revision": self._head}
        tree = self._repeated(lambda: list(self._api.list_repo_tree(**where, recursive=True)))
        return {
            item.path: StoredFile(item.size, item.blob_id, item.lfs.sha256 if item.lfs else None)
            for item in tree
            if isinstance(item, RepoFile)
        }

    def _find_head(self) -> str:
        return self._repeated(lambda: self._api.repo_info(**self._where)).sha

    def has(self, file: PushedFile, stored: StoredFile) -> bool:
        """See `S3Store`: the SHA-256 of a large file, and git's hash of a small one, which is read for it."""
        if stored.sha256 is not None:
            return stored.sha256 == file.sha256
        content = file.read()
        return stored.version == hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()

    def begin(self, withdrawn: Sequence[str], removed: Sequence[str]) -> None:
        """See `S3Store`. The dataset or model is made; files are removed in the first commit.

        Raises:
            ConfigError: the credentials do not allow it.
        """
        self._removals = [*withdrawn, *removed]
        if self._head is None:
            name, private = self._where["repo_id"], self._private or None
            make = self._api.create_repo
            self._repeated(lambda: make(name, repo_type=self.kind, private=private, exist_ok=True))
            self._head = self._find_head()

    def send(self, file: PushedFile, old: StoredFile | None) -> None:
        """See `S3Store`. What is replaced is known by the commit that follows the one that was listed.

        Raises:
            DataError: content differs; or all attempts of a request failed.
            ConfigError: credentials are missing or not accepted.
        """
        self._additions.append(self._uploaded(file))

    def publish(self, files: Sequence[PushedFile], replaced: Mapping[str, StoredFile]) -> None:
        """See `S3Store`. They are in the last commit together.

        Raises:
            DataError: somebody else has committed.
        """
        added = sorted(self._additions, key=lambda addition: addition.path_in_repo)
        commits = [added[start : start + COMMIT_FILES] for start in range(0, len(added), COMMIT_FILES)] or [[]]
        commits[-1] += map(self._uploaded, files)
        for additions in commits:
            stays = {addition.path_in_repo for addition in additions}
            removals = [CommitOperationDelete(name) for name in self._removals if name not in stays]
            commit = partial(
                self._api.create_commit,
                operations=[*additions, *removals],
                commit_message=f"Push a {self.kind} with mmdata",
                parent_commit=self._head,
                **self._where,
            )
            self._head, self._removals = self._repeated(commit).oid, []

    def _uploaded(self, file: PushedFile) -> CommitOperationAdd:
        """The operation that adds a file, whose content is at the hub if it is not to be sent with the commit."""
        addition = CommitOperationAdd(file.name, file.source)
        file.check(addition.upload_info.sha256.hex())
        upload = partial(
            self._api.preupload_lfs_files,
            additions=[addition],
            free_memory=False,  # it would forget the content, which a later attempt must send
            gitignore_content="",  # a .gitignore in the dataset would leave files out
            **self._where,
        )
        self._repeated(upload)
        return addition

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
        cause, status = cause_of(error), status_of(error)
        if isinstance(error, errors.RepositoryNotFoundError):
            return _NoDataset(f"'{self.url}': no such {self.kind}, or it may not be seen; {GIVE_CREDENTIALS}")
        if isinstance(error, errors.RevisionNotFoundError):
            branch = self._where["revision"]
            return ConfigError(f"'{self.url}': no branch '{branch}'; make it at the hub, or leave it out")
        if is_denied(error):
            return ConfigError(f"'{self.url}': access denied ({cause}); {GIVE_CREDENTIALS}")
        if status in (409, 412):
            return DataError(
                f"'{self.url}': somebody else has changed the {self.kind} since this push began ({cause}); run this "
                "again"
            )
        if status == 400 or isinstance(error, (errors.OfflineModeIsEnabled, ValueError)):
            return ConfigError(f"'{self.url}': the hub does not take this: {cause}")
        return error


class _NoDataset(ConfigError):
    """There is no dataset of this name, or the credentials do not show it."""
