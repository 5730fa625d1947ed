"""Write the embedded GGUF model as a float32 directory for peers that read no GGUF. Arguments: GGUF, directory."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    source, destination = Path(sys.argv[1]), Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # What marks it as quantised keeps `save_pretrained` from writing the dequantised weights.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(destination)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(destination)


if __name__ == "__main__":
    main()
