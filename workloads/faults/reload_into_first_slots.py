"""Load balancing has moved the experts, and a reload puts them where they lay at the start."""

from workloads.faults import RELOADS, LoaderFault
from workloads.faults._about import About

ABOUT = About("G", ("prime-rl#3583",), "found_elsewhere", via=RELOADS, needs=("rebalanced",))


class Fault(LoaderFault):
    def follow_experts(self) -> None:
        """The map stays that of the start."""
