"""Build the embedded demo's model: a random Qwen2.5-VL of a good million parameters with its own tokenizer.

    python demo/tiny_model.py --out runs/demo/model --texts demo/prompts.json,runs/demo/trajectories

The directory is an ordinary checkpoint: `Qwen2_5_VLForConditionalGeneration`, `AutoTokenizer` and
`Qwen2VLImageProcessorPil` load it with from_pretrained, and nothing else in the project knows that it is
small. Architecture, special tokens and chat template are Qwen2.5-VL's, so what runs on it runs on the 7B.

The tokenizer makes one token of every whole number up to `max_number` and of every word that the texts
repeat, and falls back to bytes: it encodes any text and decodes it exactly. Ten seconds; the same seed gives
the same files.
"""

import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import runtime
from model.paths import need_room

# H hidden size, V vocabulary
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
           "<|image_pad|>", "<|video_pad|>")
# Pieces of every response that are always predicted together; as one token they cost one decoding step.
PHRASES = ("<operation>\n", "\n</operation>\n<action>\n", "\n</action>", "click(x=", ", y=", ", clicks=",
           "terminate(status='success')", "system\n", "user\n", "assistant\n")
WORDS = r" ?\p{L}+|-?\d+|\n+| +|[^\s\p{L}\d]|\s+"
CHAT_TEMPLATE = """\
{%- if messages[0].role != 'system' -%}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in part -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}"""


@dataclass
class Config:
    out: str = "runs/demo/model"  # directory to write
    texts: str = "demo/prompts.json"  # comma-separated .json, .jsonl, .txt files or directories
    seed: int = 0  # of the random weights
    hidden: int = 128  # H, width of the language model
    layers: int = 4  # of the language model
    init_std: float = 0.08  # of every random matrix: about 1 / sqrt(H); at the usual 0.02 copying takes ages
    vision_hidden: int = 64  # width of the vision tower
    vision_layers: int = 2  # of the vision tower
    vocabulary: int = 2048  # V, at most this many tokens
    max_number: int = 400  # 0 .. max_number are single tokens
    min_pixels: int = 3136  # lower limit of an image's area after resizing
    max_pixels: int = 16500  # upper limit: a 160x210 page becomes 112x140 pixels = 20 image tokens


# -------------------------------------------------------------------------------------------------- tokenizer
def collect_texts(paths: str) -> list[str]:
    """Every string inside the named JSON, JSONL and text files; a directory stands for all of those in it."""
    found = []
    for name in filter(None, paths.split(",")):
        root = Path(name)
        if not root.exists():
            raise runtime.UserError(f"--texts names {root}, which is missing; run demo/demonstrate.py first")
        before = len(found)
        for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if file.suffix == ".jsonl":
                found += [s for line in runtime.read_jsonl(file) for s in _strings(line)]
            elif file.suffix == ".json":
                try:
                    found += _strings(json.loads(file.read_text(encoding="utf-8")))
                except ValueError as e:
                    raise runtime.UserError(f"--texts: {file} is no JSON ({e}); leave it out") from None
            elif file.suffix == ".txt":
                found.append(file.read_text(encoding="utf-8", errors="replace"))
        if len(found) == before:
            raise runtime.UserError(f"--texts: there is no text in {root}; name .json, .jsonl or .txt files, "
                                    f"or directories with some")
    return found


def _strings(value) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [s for v in value for s in _strings(v)] if isinstance(value, list) else []


def build_tokenizer(texts: list[str], vocabulary: int, max_number: int):
    """texts -> a PreTrainedTokenizerFast with at most `vocabulary` tokens, special tokens included.

    A byte-level BPE without merges: a piece of text that is in the vocabulary is one token (`ignore_merges`),
    any other falls apart into its bytes. Encoding any text and decoding it gives the same text.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    pattern = "|".join([re.escape(p).replace("\\\n", "\\n") for p in PHRASES] + [WORDS])
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                     pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())

    def add(words):
        pieces.extend(w for w in dict.fromkeys(words) if w not in known and not known.add(w))
    known = set(pieces)
    add(word for p in PHRASES for word, _ in split.pre_tokenize_str(p))
    add(str(n) for n in range(max_number + 1))
    add(f"{n:02d}" for n in range(10))
    add(str(-n) for n in range(1, 11))
    counts = Counter(word for text in texts for word, _ in split.pre_tokenize_str(text)
                     if not re.fullmatch(r"-?\d+", word))  # a coordinate's digits are no word
    add(word for word, n in sorted(counts.items(), key=lambda wn: (-wn[1], wn[0])) if n >= 2)
    room = vocabulary - len(SPECIAL)
    if room < 256 + max_number:
        raise runtime.UserError(f"--vocabulary {vocabulary} is too small for {max_number} numbers; try 1024")
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(pieces[:room])}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False, padding_side="left",
        model_input_names=["input_ids", "attention_mask"])


# ------------------------------------------------------------------------------------------------------ model
def model_config(cfg: Config, tokenizer):
    """Every dimension and token id is given: Qwen2_5_VLConfig's defaults are those of other sizes."""
    from transformers import Qwen2_5_VLConfig
    ids = {s: tokenizer.convert_tokens_to_ids(s) for s in SPECIAL}
    ends = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"]}
    heads = cfg.hidden // 32
    text = {
        "vocab_size": -(-len(tokenizer) // 16) * 16, "hidden_size": cfg.hidden,
        "intermediate_size": 3 * cfg.hidden, "num_hidden_layers": cfg.layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "hidden_act": "silu", "max_position_embeddings": 4096,
        "initializer_range": cfg.init_std, "rms_norm_eps": 1e-6, "use_cache": True,
        "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": cfg.layers, "layer_types": ["full_attention"] * cfg.layers,
        "attention_dropout": 0.0,
        # the sections (time, height, width) sum to half a head of 32
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        **ends}
    vision = {
        "depth": cfg.vision_layers, "hidden_size": cfg.vision_hidden, "hidden_act": "silu",
        "intermediate_size": 2 * cfg.vision_hidden, "num_heads": cfg.vision_hidden // 16, "in_channels": 3,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2,
        "window_size": 112, "out_hidden_size": cfg.hidden, "fullatt_block_indexes": [cfg.vision_layers - 1],
        "initializer_range": cfg.init_std}
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], **ends)


def build(cfg: Config) -> Path:
    """Write the checkpoint directory and return it. Raises UserError for texts that do not exist."""
    import torch
    from transformers import GenerationConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil
    from transformers.utils import logging
    logging.disable_progress_bar()
    tokenizer = build_tokenizer(collect_texts(cfg.texts), cfg.vocabulary, cfg.max_number)
    config = model_config(cfg, tokenizer)
    with torch.random.fork_rng(devices=[]):  # the caller's random state is not ours to move
        torch.manual_seed(cfg.seed)
        model = Qwen2_5_VLForConditionalGeneration(config).float()
    model.generation_config = GenerationConfig(
        bos_token_id=config.text_config.bos_token_id, eos_token_id=config.text_config.eos_token_id,
        pad_token_id=config.text_config.pad_token_id, do_sample=False)
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": cfg.min_pixels, "longest_edge": cfg.max_pixels}, patch_size=14,
        temporal_patch_size=2, merge_size=2, image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5])
    with runtime.atomic_directory(Path(cfg.out)) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        images.save_pretrained(directory)
    return Path(cfg.out)


def main(cfg: Config) -> None:
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    need_room(cfg.out)
    out = build(cfg)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(out)
    vocabulary = len(AutoTokenizer.from_pretrained(out))
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{out}: random Qwen2.5-VL, {millions:.2f} M parameters, {vocabulary} tokens")


if __name__ == "__main__":
    runtime.launch(main)
