"""What a kernel's launch may depend on: facts of the machine, never its clock."""

from dataclasses import dataclass

import torch

from worker.kernels.triton.overlap import MAX_OVERLAP_TOKENS

WARP_BYTES = 512
"""That a warp loads at a time."""


@dataclass(frozen=True, slots=True)
class Machine:
    num_sms: int
    shared_memory: int
    """Bytes that one program can have."""
    can_overlap: bool
    has_float8: bool = True
    """Whether it converts float8_e4m3."""

    def overlaps(self, num_tokens: int) -> bool:
        """Whether the kernels of a step of so many tokens do: see `overlap`."""
        return self.can_overlap and num_tokens <= MAX_OVERLAP_TOKENS


INTERPRETER = Machine(num_sms=4, shared_memory=1 << 17, can_overlap=False)
"""On a CPU: small, so that a test of a few rows takes the paths of many."""


def machine_of(device: torch.device) -> Machine:
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        can_overlap=torch.version.hip is None and properties.major >= 9,
        has_float8=(properties.major, properties.minor) >= (8, 9),
    )
