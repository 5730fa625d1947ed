"""What `make bench-cpu` says of memory and of the product of one row, at small sizes."""

import pytest

from bench import cpu_reading
from bench.cpu_reading import SMOLLM2, Shapes, reading_figures
from tests.kernels.rig import HAS_NATIVE

SMALL = Shapes([(96, 64), (64, 32)], 2, (128, 64))
READ_BYTES = 1 << 20


@pytest.mark.skipif(not HAS_NATIVE, reason="needs AVX2 and a C++ compiler")
def test_the_product_of_one_row_is_timed_beside_reading() -> None:
    figures = reading_figures(3, SMALL, READ_BYTES)
    assert list(figures) == ["read_gb_s", "vector_gb_s_float32", "vector_read_share_float32"]
    assert all(isinstance(figure, float) and figure > 0 for figure in figures.values())


@pytest.mark.skipif(not HAS_NATIVE, reason="needs AVX2 and a C++ compiler")
def test_each_layer_has_weights_of_its_own() -> None:
    assert cpu_reading.Products(SMALL).num_bytes == 4 * (2 * (96 * 64 + 64 * 32) + 128 * 64)


def test_the_shapes_are_all_that_a_step_of_smollm2_reads() -> None:
    """134,515,008 parameters, less those of 61 norms."""
    assert sum(out * into for out, into in SMOLLM2.of_a_step()) == 134_515_008 - 61 * 576


def test_without_native_kernels_memory_alone_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_reading, "obstacle", lambda: "no compiler")
    assert list(reading_figures(1, SMALL, READ_BYTES)) == ["read_gb_s"]
    assert "no compiler" in capsys.readouterr().out
