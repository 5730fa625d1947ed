"""What a kernel's launch may depend on: facts of the machine, never its clock."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Machine:
    num_sms: int
    shared_memory: int
    """Bytes that one program can have."""


INTERPRETER = Machine(num_sms=4, shared_memory=1 << 17)
"""On a CPU: small, so that a test of a few rows takes the paths of many."""


def machine_of(device: torch.device) -> Machine:
    if device.type == "cpu":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return Machine(properties.multi_processor_count, properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
