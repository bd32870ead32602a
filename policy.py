"""One role's policy: Qwen2.5-VL base, frozen in RL, and LoRA adapter; prompt -> tensors, sampling, log-probs.

The policy is softmax(logits / T) with image and video ids banned and nothing else (PAPER-GAP 3): no top-k,
top-p or repetition penalty. `policy_logits` is that definition, and both sampling and the log-probs go
through it. A draw is argmax(logits + Gumbel noise) with the noise seeded per request, so it does not depend
on the batch it is in. The ids that were sampled are the ids that are trained: nothing is decoded and encoded
again. LoRA sits on the seven linear layers of the language model only (PAPER-GAP 8); it is never merged into
the weights.

Needs a checkpoint directory with weights, tokenizer, chat template and image-processor settings; no
AutoProcessor (it needs torchvision): `encode` and `batch` make the inputs, `mm_token_type_ids` included.
"""

import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image
from torch.utils.checkpoint import checkpoint

from attention import group_windows
from runtime import UserError

# N samples, S positions of a padded row, T response tokens, n of all samples, V vocabulary, H hidden size
LORA_TARGETS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


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


# ------------------------------------------------------------------------------------- the policy's log-probs
def policy_logits(logits: torch.Tensor, T: float | torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
    """(..., V) -> (..., V) float32: logits / T, banned ids -inf. Its softmax is the policy (PAPER-GAP 3)."""
    return (logits.float() / T).index_fill_(-1, banned, -torch.inf)


class _FrozenHeadLogp(torch.autograd.Function):
    """log π(y | h) for a head that needs no gradient, in chunks.

    d log π(y) / d h = (W[y] - Σ_v π(v) W[v]) / T is one vector per token whatever the loss does later, so it
    is formed chunk by chunk in the forward pass and nothing of width V survives a chunk.
    """

    @staticmethod
    def forward(ctx, h_nH, W_VH, y_n, T, banned, chunk):
        def one(h, y):                          # a function, so that its buffers of width V are gone after it
            z = policy_logits(h @ W_VH.T, T, banned)
            z_y, top = z.gather(-1, y[:, None]), z.amax(-1, keepdim=True)
            e = z.sub_(top).exp_()              # π = e / Z: the division waits until the width is H again
            Z = e.sum(-1, keepdim=True)
            dlogp = (W_VH[y].float() - (e.to(W_VH.dtype) @ W_VH) / Z) / T if ctx.needs_input_grad[0] else None
            return (z_y - top - Z.log()).squeeze(-1), dlogp
        logp, dlogp = zip(*[one(h, y) for h, y in zip(h_nH.split(chunk), y_n.split(chunk))])
        ctx.dtype = h_nH.dtype
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(torch.cat(dlogp))
        return torch.cat(logp)

    @staticmethod
    def backward(ctx, grad_n):
        (dlogp_nH,) = ctx.saved_tensors
        return (grad_n[:, None] * dlogp_nH).to(ctx.dtype), None, None, None, None, None


def token_logp(h_nH, W_VH, y_n, T: float, banned, chunk: int = 256) -> torch.Tensor:
    """(n,) float32 log π(y | h) from the hidden states of response positions only, never (n, V) at once."""
    if not W_VH.requires_grad:
        return _FrozenHeadLogp.apply(h_nH, W_VH, y_n, T, banned, chunk)

    def one(h, y):
        z = policy_logits(h @ W_VH.T, T, banned)
        return z.gather(-1, y[:, None]).squeeze(-1) - z.logsumexp(-1)
    parts = [checkpoint(one, h, y, use_reentrant=False) for h, y in zip(h_nH.split(chunk), y_n.split(chunk))]
    return torch.cat(parts)


class GumbelSampler:
    """A logits processor that turns greedy decoding into exact, per-request seeded sampling.

    Returns log π + g with g ~ Gumbel(0, 1) from the request's own generator; the argmax of that is a draw
    from π. Rows with T = 0 get no noise. `logp(sequences)` gives the log-prob of every token drawn.
    """

    def __init__(self, seeds, temperatures, banned, device):
        self.generators = [torch.Generator(device).manual_seed(s) for s in seeds]
        self.greedy = torch.tensor([t == 0 for t in temperatures], device=device)
        self.T = torch.tensor([t or 1.0 for t in temperatures], device=device)[:, None]
        self.banned, self.last, self.picked = banned, None, []

    def __call__(self, input_ids, scores):
        self._collect(input_ids)
        self.last = policy_logits(scores, self.T, self.banned).log_softmax(-1)
        noise = torch.stack([torch.empty_like(row).exponential_(generator=g).log_().neg_()
                             for row, g in zip(self.last, self.generators)])
        return self.last + noise.masked_fill_(self.greedy[:, None], 0.0)

    def _collect(self, ids):
        if self.last is not None:
            self.picked.append(self.last.gather(-1, ids[:, -1:]).squeeze(-1).masked_fill(self.greedy, 0.0))

    def logp(self, sequences) -> torch.Tensor:
        """(N, T) log-probs of the generated tokens of `generate`'s output."""
        self._collect(sequences)
        self.last = None
        return torch.stack(self.picked, -1)


# -------------------------------------------------------------------------------------------- building blocks
def need_checkpoint(path) -> None:
    """UserError unless `path` is a checkpoint directory: a name would be looked up on a hub otherwise."""
    if not (Path(path) / "config.json").is_file():
        raise UserError(f"checkpoint {path}: no config.json there; give the directory of a Qwen2.5-VL "
                        f"checkpoint (stage 2 writes one; the demo's comes from demo/tiny_model.py)")


def load_model(path, device="cpu", dtype="float32"):
    """The checkpoint at `path` as a plain Qwen2_5_VLForConditionalGeneration; UserError if it is not one."""
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.utils import logging
    logging.disable_progress_bar()
    need_checkpoint(path)
    kind = AutoConfig.from_pretrained(path).model_type
    if kind != "qwen2_5_vl":
        raise UserError(f"checkpoint {path} is a {kind} model; both roles need a qwen2_5_vl one")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=getattr(torch, dtype)).to(device)
    return group_windows(model)


class Inputs:
    """Texts and screenshots -> ids and tensors, for one checkpoint: tokenizer + PIL image processor."""

    def __init__(self, path):
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        need_checkpoint(path)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(path)
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
        rows = [p + r for p, r in zip(prompts, responses or [[]] * len(prompts))]
        S = max(map(len, rows))
        ids = torch.full((len(rows), S), self.pad_id)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            at = slice(S - len(row), S) if left else slice(0, len(row))
            ids[i, at], mask[i, at] = torch.tensor(row), 1
        inputs = {"input_ids": ids, "attention_mask": mask,
                  "mm_token_type_ids": (ids == self.image_id).long(), **self.pixels(pngs)}
        return {k: v.to(device) for k, v in inputs.items()}


def plain(text: str) -> str:
    """Text from a task, a page or a model, with anything that looks like a special token broken up."""
    return re.sub(r"<\|(\w+)\|>", r"<| \1 |>", text)


def forward_hidden(model, inputs: dict) -> torch.Tensor:
    """(N, S, H) last hidden states. Raises ValueError without mm_token_type_ids: transformers would silently
    fall back to one-dimensional positions (lessons.md E10)."""
    if "mm_token_type_ids" not in inputs:
        raise ValueError("mm_token_type_ids is missing: "
                         "the positions of image tokens would be silently wrong")
    return model.model(**inputs, use_cache=False).last_hidden_state


# ------------------------------------------------------------------------------------------------- the policy
class Policy:
    """One role: base checkpoint + adapter of its name. Always in eval mode, so dropout never acts."""

    def __init__(self, path, role: str, r=32, alpha=64, dropout=0.0, device="cpu", dtype="float32", seed=0,
                 checkpointing=False):
        from peft import LoraConfig, get_peft_model
        self.role, self.device, self.inputs = role, device, Inputs(path)
        base = load_model(path, device, dtype).requires_grad_(False)
        if taken := [n for n, _ in base.named_modules() if role in n.split(".")]:
            raise UserError(f"adapter name {role!r} is part of the module path {taken[0]}; PEFT would save "
                            f"it incompletely: choose another name")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            lora = LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=LORA_TARGETS,
                              bias="none")
            self.peft = get_peft_model(base, lora, adapter_name=role).eval()
        self.model = self.peft.get_base_model()
        self.banned = torch.tensor(self.inputs.banned, device=device)
        self.autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == "bfloat16")
        if checkpointing:                       # transformers asks the layer itself, never its children
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in self.model.model.language_model.layers:
                layer.training = True

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters by name: chosen by name, not by requires_grad,
        which PEFT flips (lessons.md E16)."""
        found = {n: p for n, p in self.peft.named_parameters() if ".lora_" in n and f".{self.role}." in n}
        assert found and all(p.requires_grad for p in found.values()), "the adapter is not trainable"
        return found

    def encode(self, system: str, user: str, png: bytes):
        return self.inputs.encode(system, user, png)

    @torch.inference_mode()
    def sample(self, requests: list) -> list[Sample]:
        """One response per request (system, user, png, seed, temperature, max_new_tokens), in one batch."""
        encoded = [self.encode(q.system, q.user, q.png) for q in requests]
        inputs = self.inputs.batch([ids for ids, _ in encoded], [q.png for q in requests], left=True,
                                   device=self.device)
        sampler = GumbelSampler([q.seed for q in requests], [q.temperature for q in requests], self.banned,
                                self.device)
        limit = max(q.max_new_tokens for q in requests)
        with self.autocast:
            out = self.model.generate(**inputs, generation_config=self._greedy(limit),
                                      logits_processor=[sampler])
        width = inputs["input_ids"].shape[1]
        logp_NT = sampler.logp(out).tolist()
        return [self._sample(q, ids, size, row[width:], logp)
                for q, (ids, size), row, logp in zip(requests, encoded, out.tolist(), logp_NT)]

    def _sample(self, q, prompt_ids, image_size, ids, logp) -> Sample:
        ids = ids[:q.max_new_tokens]
        end = next((i + 1 for i, t in enumerate(ids) if t in self.inputs.stop_ids), None)
        ids = ids[:end]
        text = self.inputs.tokenizer.decode(ids, skip_special_tokens=True)
        return Sample(prompt_ids, q.png, image_size, ids, logp[:len(ids)], text, truncated=end is None)

    def _greedy(self, max_new_tokens):
        """Greedy decoding of the sampler's scores, with every field set that acts in greedy decoding: an
        unset one would come from the checkpoint (a repetition penalty, say)."""
        from transformers import GenerationConfig
        return GenerationConfig(do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, min_new_tokens=0,
                                repetition_penalty=1.0, no_repeat_ngram_size=0, suppress_tokens=None,
                                use_cache=True, begin_suppress_tokens=None, bad_words_ids=None,
                                forced_bos_token_id=None, forced_eos_token_id=None,
                                eos_token_id=self.inputs.stop_ids, pad_token_id=self.inputs.pad_id)

    def logp(self, samples: list[Sample], T: float, reference=False) -> list[torch.Tensor]:
        """One (|response|,) float32 tensor of log π per sample, with gradient to the adapter.

        `reference` = without the adapter. Raises ValueError for a response that contains a banned id: its
        probability is 0, and an image id would also break the forward pass (lessons.md E12).
        """
        for s in samples:
            if bad := set(s.response_ids) & set(self.inputs.banned):
                raise ValueError(f"a response holds the banned token ids {sorted(bad)}")
        prompts, responses = [s.prompt_ids for s in samples], [s.response_ids for s in samples]
        inputs = self.inputs.batch(prompts, [s.png for s in samples], responses, device=self.device)
        with self.autocast, (self.peft.disable_adapter() if reference else torch.enable_grad()):
            h_NSH = forward_hidden(self.model, inputs)
            h = torch.cat([h_NSH[i, len(p) - 1:len(p) - 1 + len(r)]
                           for i, (p, r) in enumerate(zip(prompts, responses))])
            y = torch.tensor([t for r in responses for t in r], dtype=torch.long, device=self.device)
            return list(token_logp(h, self.model.lm_head.weight, y, T, self.banned)
                        .split([len(r) for r in responses]))

    def save(self, directory) -> None:
        """The adapter in PEFT's format (directory/adapter_model.safetensors), loadable by PEFT and vLLM."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        state = get_peft_model_state_dict(self.peft, adapter_name=self.role)
        assert len(state) == len(self.parameters()), "PEFT left out adapter tensors"
        save_file({k: v.detach().cpu().contiguous() for k, v in state.items()},
                  directory / "adapter_model.safetensors", metadata={"format": "pt"})
        self.peft.peft_config[self.role].save_pretrained(directory)

    def load(self, directory) -> None:
        """Read an adapter written by `save`; UserError unless it has the same tensors, r and α."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file
        file = Path(directory) / "adapter_model.safetensors"
        if not file.is_file():
            raise UserError(f"adapter {directory}: no adapter_model.safetensors there; "
                            f"give a directory that stage 3 wrote")
        state = load_file(file)
        mine = {n.replace(f".{self.role}.", ".") for n in self.parameters()}
        if mine != set(state):
            raise UserError(f"adapter {directory} does not fit: {len(mine ^ set(state))} tensors differ "
                            f"by name; it was made for another base or another set of layers")
        saved = json.loads((file.parent / "adapter_config.json").read_text())
        own = self.peft.peft_config[self.role]
        if (saved["r"], saved["lora_alpha"]) != (own.r, own.lora_alpha):
            raise UserError(f"adapter {directory} does not fit: it was trained with r {saved['r']} and α "
                            f"{saved['lora_alpha']}; give --lora_r and --lora_alpha to match")
        set_peft_model_state_dict(self.peft, state, adapter_name=self.role)
