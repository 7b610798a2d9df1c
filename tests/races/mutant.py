"""A protocol mutant: a fault put into a copy of the kernels, and the run that must notice it.

Knows no fault in particular, and nothing of how a run is made; see harness.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from races.harness import Build, Scenario


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what is wrong.
        note: the NOTE block of the kernels whose promise it breaks.
        file: the source that is changed.
        old, new: every occurrence of the one text becomes the other.
        scenario: the smallest run that notices.
        block_threads, element, operator: how the driver is built.
        occurrences: how often the text must be found.
    """

    name: str
    note: str
    file: str
    old: str
    new: str
    scenario: Scenario = field(default_factory=Scenario)
    block_threads: int = 1
    element: str = "uint32_t"
    operator: str = "Sum"
    occurrences: int = 1

    def build(self, **more: object) -> Build:
        """How the driver is built for it."""
        return Build(
            block_threads=self.block_threads,
            element=self.element,
            operator=self.operator,
            **more,  # type: ignore[arg-type]
        )


def of(*kernels: str, **more: object) -> Scenario:
    """A short run of some kernels that soon gives up."""
    return Scenario(kernels=kernels, timeout_ms=3000, **more)  # type: ignore[arg-type]
