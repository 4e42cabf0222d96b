"""What a part of a tensor should be: a checkpoint slice, or padding with the value it was created with."""

from collections.abc import Iterator

from orchestrator.judge.records import Audit, Record


def wanted(part: Record) -> str | None:
    """Fingerprint that the checkpoint demands of a part, None for padding and where none was recorded."""
    return part["expected"] if part["source"] is not None else None


def wrong_parts(audit: Audit) -> Iterator[tuple[str, list[str], int, int]]:
    """Per tensor: path, names of parts that are not what the checkpoint or their creation demand, how many
    were looked at, and of how many neither was recorded."""
    for path, parts in audit.parts.items():
        wrong = [name for name, part in parts.items() if is_wrong(part)]
        unknown = sum(not is_verifiable(part) for part in parts.values())
        yield path, wrong, len(parts), unknown


def is_padding(part: Record) -> bool:
    return part["source"] is None


def _padding_state(part: Record) -> bool | None:
    """Whether padding holds its creation value; None where no value was recorded.

    Of whole bytes (packed weights, exponents) the value is the byte, also where the live tensor is of wider
    integers; of floats it is the number.
    """
    value = part.get("padding_value")
    return None if value is None else bool(part.get("const") == value)


def is_verifiable(part: Record) -> bool:
    if part["fp"] is None:  # its tensor has no bytes, which coverage counts
        return False
    return part["expected"] is not None or (is_padding(part) and _padding_state(part) is not None)


def is_wrong(part: Record) -> bool:
    """Whether a part is known not to be what the checkpoint or its creation demands."""
    if part["fp"] is None:
        return False
    if part["expected"] is not None:
        return bool(part["fp"] != part["expected"])
    return is_padding(part) and _padding_state(part) is False
