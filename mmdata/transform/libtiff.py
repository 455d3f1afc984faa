"""Errors that libtiff finds in a file while Pillow decodes it.

libtiff writes them to the process's standard error, without a name, once for each damaged line; and where it fills a
damaged line up, Pillow takes the image for whole. Here they are collected instead, so that the image can be refused.
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
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)


class _Collected(threading.local):
    errors: list[str] | None = None


_collected = _Collected()


@contextmanager
def raising_errors() -> Generator[None, None, None]:
    """Raise an error of libtiff in this thread as a ValueError, at the end; also where Pillow raised nothing.

    Where libtiff is not found (on Linux it is), its errors stay as Pillow leaves them.
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
    """Have libtiff call `_handle`."""
    if not sys.platform.startswith("linux"):
        return
    for path in _libraries():
        try:
            set_handler = ctypes.CDLL(path).TIFFSetErrorHandler
        except (OSError, AttributeError):  # another library of that name, or one that hides its functions
            continue
        set_handler.argtypes, set_handler.restype = [_HANDLER], ctypes.c_void_p
        set_handler(_CALLBACK)


def _libraries() -> list[str]:
    """Files of libtiff that this process has loaded; Pillow's core, where it is linked into that."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            loaded = {line.rstrip("\n").partition("/")[2] for line in maps}
    except OSError:  # a machine without /proc; the error must not be taken for one of the image
        return [Image.core.__file__]
    names = sorted(f"/{path}" for path in loaded if "libtiff" in path.rpartition("/")[2])
    return names or [Image.core.__file__]


def _handle(module: bytes | None, pattern: bytes, arguments: int) -> None:
    """Called by libtiff with printf's pattern and its `va_list`, which all Linux systems of 64 bits pass by address."""
    buffer = ctypes.create_string_buffer(_MESSAGE_BYTES)
    ctypes.CDLL(None).vsnprintf(buffer, ctypes.c_size_t(_MESSAGE_BYTES), pattern, ctypes.c_void_p(arguments))
    text = f"{(module or b'libtiff').decode('utf-8', 'replace')}: {buffer.value.decode('utf-8', 'replace')}"
    if _collected.errors is None:
        print(text, file=sys.stderr)  # as libtiff does: this thread decodes for somebody else
    else:
        _collected.errors.append(text.removeprefix("tempfile.tif: "))  # what Pillow calls all files


_CALLBACK = _HANDLER(_handle)
"""Lives as long as the process: libtiff has its address."""
