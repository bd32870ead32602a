"""What a role's model reads: a sample of prompt, screenshot and response, and the tensors made of it.

`Inputs` needs a checkpoint directory with tokenizer, chat template and image-processor settings; no
AutoProcessor (it needs torchvision): `encode` and `batch` make the inputs, `mm_token_type_ids` included.
"""

import io
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image

from runtime import UserError

# S positions of a padded row


@dataclass
class Sample:
    """One response: exactly what the model read and wrote. `logp` is the sampler's (0 where T = 0)."""
    prompt_ids: list[int]
    png: bytes
    image_size: tuple[int, int]                   # width, height in pixels of the image as the model saw it
    response_ids: list[int]                       # the sampled <|im_end|> included
    logp: list[float] = field(default_factory=list)
    text: str = ""
    truncated: bool = False                       # cut at max_new_tokens (PAPER-GAP 17)
    role: str = ""                                # who wrote it
    # role -> the image as that role's frozen tower encodes it
    seen: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)


def need_checkpoint(path) -> None:
    """UserError unless `path` is a checkpoint directory: a name would be looked up on a hub otherwise."""
    if not (Path(path) / "config.json").is_file():
        raise UserError(f"checkpoint {path}: no config.json there; give the directory of a Qwen2.5-VL "
                        f"checkpoint (stage 2 writes one; the demo's comes from demo/tiny_model.py)")


class Inputs:
    """Texts and screenshots -> ids and tensors, for one checkpoint: tokenizer + PIL image processor."""

    def __init__(self, path):
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        need_checkpoint(path)
        self.path = path
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            self.images = Qwen2VLImageProcessorPil.from_pretrained(path)
        except (OSError, ValueError) as e:
            raise UserError(f"checkpoint {path}: {str(e).strip()[:200]}; copy tokenizer and "
                            f"preprocessor_config.json of the base checkpoint there") from None
        self.cell = self.images.patch_size * self.images.merge_size  # pixels a side of one image token
        ids = {name: self.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in
               ("image_pad", "video_pad", "vision_start", "vision_end", "vision_pad", "im_end", "endoftext")}
        self.image_id, self.end_id = ids["image_pad"], ids["im_end"]
        self.pad_id = ids["endoftext"]
        known = set(self.tokenizer.get_added_vocab().values())
        self.stop_ids = sorted({self.end_id, self.pad_id})
        self.banned = sorted(
            {ids[n] for n in ("image_pad", "video_pad", "vision_start", "vision_end", "vision_pad")} & known)

    def pixels(self, pngs: list[bytes]):
        """PNG bytes -> pixel_values (patches of all images, 1176), image_grid_thw (images, 3)."""
        return self.images(
            images=[Image.open(io.BytesIO(png)).convert("RGB") for png in pngs], return_tensors="pt")

    def size(self, png: bytes) -> tuple[int, int]:
        """Width and height after the processor's resize: the space of the model's coordinates."""
        return self.resized(*Image.open(io.BytesIO(png)).size)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """The same for an image of this size. ValueError: a side over 200 times the other."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
        height, width = smart_resize(height, width, factor=self.cell,
                                     min_pixels=self.images.size["shortest_edge"],
                                     max_pixels=self.images.size["longest_edge"])
        return width, height

    def cutting(self) -> tuple:
        """What decides how many tokens a screenshot becomes."""
        size = self.images.size
        return self.images.patch_size, self.images.merge_size, size["shortest_edge"], size["longest_edge"]

    def encode(self, system: str, user: str, png: bytes) -> tuple[list[int], tuple[int, int]]:
        """Prompt ids (image placeholder repeated once per image token) and the image size the model sees."""
        width, height = self.size(png)
        turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": plain(user)}]}]
        if system:
            turn.insert(0, {"role": "system", "content": [{"type": "text", "text": plain(system)}]})
        text = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        text = text.replace("<|image_pad|>", "<|image_pad|>" * (width * height // self.cell ** 2))
        return self.tokenizer(text, add_special_tokens=False)["input_ids"], (width, height)

    def batch(self, prompts: list[list[int]], pngs: list[bytes], responses=None, left=False,
              device="cpu") -> dict:
        """Padded model inputs. Responses go right after their prompts, with token type 0."""
        inputs = self.texts(prompts, responses, left) | self.pixels(pngs)
        return {k: v.to(device) for k, v in inputs.items()}

    def texts(self, prompts: list[list[int]], responses=None, left=False) -> dict:
        """`batch` without the images."""
        rows = [p + r for p, r in zip(prompts, responses or [[]] * len(prompts))]
        S = max(map(len, rows))
        ids = torch.full((len(rows), S), self.pad_id)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            at = slice(S - len(row), S) if left else slice(0, len(row))
            ids[i, at], mask[i, at] = torch.tensor(row), 1
        return {"input_ids": ids, "attention_mask": mask,
                "mm_token_type_ids": (ids == self.image_id).long()}

    def save(self, directory) -> None:
        """All that makes inputs, as files of a checkpoint directory."""
        self.tokenizer.save_pretrained(directory)
        self.images.save_pretrained(directory)

    def grids(self, sizes: list[tuple[int, int]]) -> torch.Tensor:
        """(images, 3) frames, rows and columns of patches of images of these sizes."""
        return torch.tensor([[1, h // self.images.patch_size, w // self.images.patch_size] for w, h in sizes])


def plain(text: str) -> str:
    """Text from a task, a page or a model, with anything that looks like a special token broken up."""
    return re.sub(r"<\|(\w+)\|>", r"<| \1 |>", text)
