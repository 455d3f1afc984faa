"""Labels as class numbers. Equal labels in equal order get equal numbers, in `mmdata index` and `mmdata convert`."""

from __future__ import annotations

from collections.abc import Iterable

from mmdata.errors import BadSample, Reason, excerpt
from mmdata.tars.scan import IndexRow
from mmdata.tars.texts import Loss


class Labels:
    """Numbers class names in order of first appearance; labels that are numbers stay as they are.

    The first label of a corpus decides whether its labels are names or numbers.

    Args:
        names: names that the corpus declares, by class number.

    Attributes:
        names: by class number; empty if labels are numbers without names.
        are_names: whether labels are names; None before the first one.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = list(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self.are_names: bool | None = None

    def number(self, label: int | str | None) -> int | None:
        """The class number of a label, or None.

        Raises:
            BadSample: the label is a name, and those before it are numbers.
        """
        if label is None:
            return None
        if self.are_names is None:
            self.are_names = isinstance(label, str)
        if not self.are_names:
            if isinstance(label, str):
                detail = f"label {excerpt(label)} is not a number, as those before it are"
                raise BadSample(Reason.BROKEN_ROW, detail)
            return label
        name = str(label)
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]


def number_labels(
    rows: list[IndexRow], labels: Iterable[int | str | None], numbers: Labels
) -> tuple[list[IndexRow], list[tuple[str, dict[Loss, str]]]]:
    """Rows with their labels as class numbers, and the labels lost: (key, names among numbers)."""
    numbered: list[IndexRow] = []
    losses: list[tuple[str, dict[Loss, str]]] = []
    for row, label in zip(rows, labels, strict=True):
        try:
            number = numbers.number(label)
        except BadSample as bad:
            number = None
            losses.append((row.key, {Loss.LABEL_NAME: bad.detail}))
        number = -1 if number is None else number
        numbered.append(row if number == row.label else row._replace(label=number))
    return numbered, losses
