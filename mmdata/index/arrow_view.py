"""Arrow arrays of numbers as numpy arrays that share the Arrow arrays' memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mmdata.errors import DataError


def view(array: Any, dtype: npt.DTypeLike, *, of: str) -> npt.NDArray[Any]:
    """The values of an Arrow array, not copied.

    Args:
        array: n numbers.
        dtype: numpy's name for their type.
        of: the file, for the message.

    Returns:
        (n,).

    Raises:
        DataError: some of the values are missing.
    """
    if array.null_count:
        raise DataError(f"{of}: {array.null_count} of the {len(array)} values of a column are missing; make it anew")
    if not len(array):
        return np.empty(0, dtype)
    # Not `to_numpy`: it imports pandas where pandas is installed, which takes longer than planning a window.
    _, values = array.buffers()
    return np.frombuffer(values, dtype, count=len(array), offset=array.offset * np.dtype(dtype).itemsize)
