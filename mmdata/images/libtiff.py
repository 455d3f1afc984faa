"""Raises the errors that libtiff finds in a file while Pillow decodes it.

libtiff only prints them to the process's standard error, once for each damaged line and without the file's name. Where
it pads a damaged line, Pillow reports nothing. This module collects the errors, so that the image can be refused.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

from PIL import Image

_MESSAGE_BYTES = 500
# libtiff's TIFFErrorHandler: (module, printf's pattern, va_list)
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)


class _Collected(threading.local):
    errors: list[str] | None = None


_collected = _Collected()


@contextmanager
def raising_errors() -> Generator[None, None, None]:
    """Raise libtiff's first error in this thread as a ValueError when the block ends, even if Pillow raised nothing.

    Does nothing if libtiff is not found; on Linux it is.
    """
    _install()
    errors: list[str] = []
    _collected.errors = errors
    try:
        yield
    except (OSError, ValueError) as error:  # "decoder error -2" says less than libtiff
        if errors:
            raise ValueError(errors[0]) from error
        raise
    finally:
        _collected.errors = None
    if errors:
        raise ValueError(errors[0])


@cache
def _install() -> None:
    """Set `_handle` as libtiff's error handler, once per process."""
    if not sys.platform.startswith("linux"):
        return
    for path in _libraries():
        try:
            set_handler = ctypes.CDLL(path).TIFFSetErrorHandler
        except (OSError, AttributeError):  # another library of that name, or a library that hides its functions
            continue
        set_handler.argtypes, set_handler.restype = [_HANDLER], ctypes.c_void_p
        set_handler(_CALLBACK)


def _libraries() -> list[str]:
    """The libtiff files that this process has loaded; Pillow's own core if libtiff is linked into it."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            loaded = {line.rstrip("\n").partition("/")[2] for line in maps}
    except OSError:  # a machine without /proc; the caller would take this error for an error of the image
        return [Image.core.__file__]
    names = sorted(f"/{path}" for path in loaded if "libtiff" in path.rpartition("/")[2])
    return names or [Image.core.__file__]


def _handle(module: bytes | None, pattern: bytes, arguments: int) -> None:
    """Format and keep an error that libtiff reports."""
    # `arguments` is a va_list: all 64-bit Linux systems pass it by address.
    buffer = ctypes.create_string_buffer(_MESSAGE_BYTES)
    ctypes.CDLL(None).vsnprintf(buffer, ctypes.c_size_t(_MESSAGE_BYTES), pattern, ctypes.c_void_p(arguments))
    text = f"{(module or b'libtiff').decode('utf-8', 'replace')}: {buffer.value.decode('utf-8', 'replace')}"
    if _collected.errors is None:
        print(text, file=sys.stderr)  # as libtiff does: this decoding is not ours
    else:
        _collected.errors.append(text.removeprefix("tempfile.tif: "))  # what Pillow calls all files


_CALLBACK = _HANDLER(_handle)
"""Must live as long as the process, because libtiff keeps its address."""
