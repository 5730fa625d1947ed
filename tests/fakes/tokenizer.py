"""Small real tokenizers, and the files a worker would send for them."""

import hashlib
import json

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

BOS = "<|bos|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
CORPUS = ["The capital of France is Paris. hello world naïve text", "one two three four five six seven"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% if not loop.last or add_generation_prompt %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if messages[0].role == 'tool' %}{{ raise_exception('tool first') }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """Byte-level BPE as SmolLM2's: BOS is id 0, <|im_start|> 1, <|im_end|> 2; encoding adds BOS."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS, IM_START, IM_END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Metaspace with byte fallback, as Llama 2's and Gemma's."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁Paris", "▁is", "na", "ve", "a"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer


def files(tokenizer: tokenizers.Tokenizer, **generation_config: float) -> dict[str, bytes]:
    """By name."""
    config = {"bos_token": BOS, "eos_token": {"content": IM_END}, "chat_template": TEMPLATE}
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps(generation_config).encode(),
    }


def fingerprint(contents: dict[str, bytes]) -> str:
    return hashlib.sha256(b"\0".join(contents[name] for name in sorted(contents))).hexdigest()
