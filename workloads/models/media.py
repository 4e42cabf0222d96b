"""Images and sounds within a prompt: which token ids stand for them. Imports no torch: the planner reads it too.

A prompt names a medium by token ids that no text has: each medium has consecutive ids of its own, one for each of the
embeddings that replace them. So an embedding depends on its id alone, however a prompt is cut into passes.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise


def slots(first: int, lengths: Sequence[int]) -> list[range]:
    """The ids of each medium, from `first` on."""
    ends = accumulate(lengths, initial=first)
    return [range(start, end) for start, end in pairwise(ends)]


def slot_problems(
    family: str, keys: str, first: int, lengths: Sequence[int], vocab_size: int
) -> Iterator[str]:
    """keys: of the dimensions that `first` and `lengths` follow from."""
    if any(length < 1 for length in lengths):
        yield f"model.{family}: {keys} give {list(lengths)} embeddings for each medium; each must be 1 or more."
    elif first + sum(lengths) > vocab_size:
        yield (
            f"model.{family}: {keys} take the token ids from {first} to {first + sum(lengths) - 1}, and vocab_size is "
            f"{vocab_size}: every embedding of an image or sound needs an id."
        )
