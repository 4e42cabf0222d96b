"""What speculative serving would have made of a drafter's proposals. Imports no torch: the judge asks, too."""

from collections.abc import Sequence


def accepted(token_ids: Sequence[int], drafts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(proposals that a target would have checked, those of them that it would have taken) of one greedy generation.

    drafts[i]: what was proposed to follow token i. The target takes the proposals after a token as far as they are its
    own choice, and then chooses one token itself, after which the next proposals come.
    """
    proposed = taken = at = 0
    while at < min(len(token_ids), len(drafts)):
        follow = token_ids[at + 1 : at + 1 + len(drafts[at])]
        agreed = next(
            (i for i, (a, b) in enumerate(zip(drafts[at], follow, strict=False)) if a != b), len(follow)
        )
        proposed, taken, at = proposed + len(follow), taken + agreed, at + agreed + 1
    return proposed, taken
