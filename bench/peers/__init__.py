"""Other engines, each in a virtual environment of its own, run beside ours in the same sitting.

A peer is a script here that reads one JSON object a line (`num_requests`, `prompt_length`, `output_length`, `seed`) and
answers each with one (`seconds`, `ttft_seconds`, `num_tokens`). Prompts are those of `prompts`, so all engines see the
same tokens.
"""
