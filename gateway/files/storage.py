"""Objects at an fsspec URL: a folder (`file://`), or a bucket (`s3://`). Keys are made of random ids only.

An object is valid once a row in SQL names it. Incomplete objects are deleted, at the latest by a sweep.
"""

import io
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import fsspec  # pyright: ignore[reportMissingTypeStubs]  # it has no types

from sluice.gateway.faults import ContentMissing, StorageUnavailable
from sluice.producer.errors import InvalidSetting

PIECE_BYTES = 1024 * 1024
DOWNLOAD_BYTES = 64 * 1024
"""Bytes that are read at once. A client that does not read its response keeps twice as much in memory."""

BLOCK_BYTES = 8 * 1024 * 1024
"""Bytes that are sent to or read from a bucket at once; folders use the buffers of the file system."""

IDENTITY_FILE = ".sluice-files"
S3_PACKAGES = ("aiobotocore", "aiohttp", "botocore", "s3fs")
"""Packages whose errors mean that a bucket failed. s3fs translates most of them to OSError."""


class Storage:
    """A store of objects by key. Thread-safe.

    Args:
        url: The fsspec URL of the folder or bucket.

    Raises:
        InvalidSetting: the URL has an unknown scheme, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        if "://" not in url:
            raise InvalidSetting(f"SLUICE_FILES_URL must be file:///FOLDER or s3://BUCKET, got {url!r}")
        try:
            opened: Any = fsspec  # Any: it is untyped
            self._fs, self._root = cast("tuple[Any, str]", opened.url_to_fs(url, use_listings_cache=False))
        except (ImportError, ValueError) as error:
            raise InvalidSetting(
                f"SLUICE_FILES_URL cannot be used: {error}. s3:// needs: pip install 'sluice-llm[gateway-s3]'"
            ) from error
        self._is_folder = urlsplit(url).scheme in ("file", "local")

    @property
    def is_folder(self) -> bool:
        """Whether the storage is a folder, which only this host can read."""
        return self._is_folder

    @property
    def buffer_bytes(self) -> int:
        """Memory that an object needs while it is written or read."""
        return 0 if self._is_folder else BLOCK_BYTES

    def identity(self) -> str:
        """Return an id that distinguishes this storage from others; for a folder, it is stored in a file there.

        Raises:
            StorageUnavailable: the storage cannot be written.
        """
        if not self._is_folder:
            return blake2b(self._url.encode(), digest_size=12).hexdigest()
        path = Path(self._root) / IDENTITY_FILE
        with _explained():
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                part = path.with_name(f"{IDENTITY_FILE}.{token_hex(4)}")
                part.write_text(token_hex(12))
                with suppress(FileExistsError):
                    os.link(part, path)
                part.unlink()
            return path.read_text()

    def create(self, key: str) -> "ObjectWriter":
        """Start to write an object.

        Raises:
            StorageUnavailable: the storage cannot be written.
        """
        path = self._path(key)
        with _explained():
            if self._is_folder:
                Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            return ObjectWriter(self._fs, path, is_folder=self._is_folder)

    def put(self, key: str, data: bytes) -> None:
        """Write a whole object.

        Raises:
            StorageUnavailable: the storage cannot be written.
        """
        writer = self.create(key)
        try:
            writer.write(data)
            writer.close()
        except BaseException:
            writer.abandon()
            raise

    def get(self, key: str) -> bytes:
        """Read a whole object.

        Raises:
            StorageUnavailable: the object cannot be read.
        """
        with _explained(), self._fs.open(self._path(key), "rb", block_size=BLOCK_BYTES) as file:
            return file.read()

    @contextmanager
    def reading(self, key: str) -> Generator[BinaryIO]:
        """Open an object for reading.

        Raises:
            StorageUnavailable: the object cannot be read.
        """
        with _explained(), self._fs.open(self._path(key), "rb", block_size=BLOCK_BYTES) as file:
            yield cast("BinaryIO", io.BufferedReader(file, PIECE_BYTES))

    def pieces(self, key: str) -> Iterator[bytes]:
        """Yield the content of an object.

        Raises:
            StorageUnavailable: the object cannot be read.
        """
        with _explained(), self._fs.open(self._path(key), "rb", block_size=BLOCK_BYTES) as file:
            while piece := file.read(DOWNLOAD_BYTES):
                yield piece

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; keys without an object are ignored.

        Raises:
            StorageUnavailable: they cannot be deleted.
        """
        for key in keys:
            with _explained(), suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))

    def old_keys(self, folder: str, before_s: float) -> Iterator[str]:
        """Yield the keys of a folder's objects that were written before this wall-clock time.

        Raises:
            StorageUnavailable: they cannot be listed.
        """
        with _explained():
            self._fs.invalidate_cache()
            objects: dict[str, dict[str, Any]] = self._fs.find(self._path(folder), detail=True)
        for path, about in objects.items():
            written = about.get("mtime") or about.get("LastModified")
            at_s = written if isinstance(written, int | float) else written.timestamp() if written else before_s
            if at_s < before_s:
                yield path.removeprefix(f"{self._root}/")

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"


class ObjectWriter:
    """An object that is being written. End it with `close` or `abandon`, each of which may be called twice."""

    def __init__(self, fs: Any, path: str, *, is_folder: bool) -> None:  # noqa: ANN401  # fsspec is untyped
        self._fs, self._path, self._is_folder = fs, path, is_folder
        self._file = fs.open(path, "wb", block_size=BLOCK_BYTES)

    def write(self, data: bytes | bytearray) -> None:
        """Append data.

        Raises:
            StorageUnavailable: the storage cannot be written.
        """
        with _explained():
            self._file.write(data)

    def close(self) -> None:
        """Finish the object: afterwards it is on disk, or on the server.

        Raises:
            StorageUnavailable: the storage cannot be written.
        """
        with _explained():
            if self._is_folder:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Delete the incomplete object; if this fails, a sweep deletes it."""
        with suppress(Exception):  # any error of the package that the URL needs
            if self._is_folder:
                self._file.close()
                self._fs.rm_file(self._path)
            elif not self._file.closed:
                self._file.discard()
                self._file.closed = True


@contextmanager
def _explained() -> Generator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ContentMissing("a file's content is missing") from error
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if not isinstance(error, OSError) and package not in S3_PACKAGES:
            raise
        why = getattr(error, "strerror", None) or type(error).__name__
        raise StorageUnavailable(f"the files cannot be reached: {why}") from error
