"""Programmatic dependent launch: a kernel's programs begin while the last ones of the kernel before it still run.

A step of few rows is some three hundred short kernels one after another; this hides the time between two of them, and
what does not depend on the kernel before, a weight, is fetched meanwhile. CUDA's programming guide has the rules. Each
kernel of this folder waits before it touches what another one writes, so that all those before are done as well, and
before it ends: who waits for it has waited for those, too.

A step's preparation does not overlap with what is before it. The embedding is the first kernel behind it that may, and
lets the next one begin only when it has waited itself. So what the preparation writes, and what is in the cache of
earlier steps, is there before any kernel behind the embedding begins: it can be read without waiting.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE_BYTES = tl.constexpr(128)
MAX_OVERLAP_TOKENS = 64
"""Of steps whose kernels overlap: larger ones fill the device, and programs that wait take place on it."""


@triton.jit
def wait_for_kernel_before(OVERLAPS: tl.constexpr):
    """Nothing where launches do not overlap."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def let_next_begin(OVERLAPS: tl.constexpr):
    """The kernel behind this one, once all programs of this one got here."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, OVERLAPS: tl.constexpr):
    """Into the L2 cache, in lines of `LINE_BYTES`."""
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


def launch_options(overlaps: bool) -> dict[str, bool]:
    """Beside the argument OVERLAPS."""
    return {"launch_pdl": True} if overlaps else {}
