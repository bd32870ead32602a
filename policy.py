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

import copy
import inspect
import io
import json
import re
import sys
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError
from torch.utils.checkpoint import checkpoint

from attention import group_windows
from checkpoints import is_sharded, need_finite, read_adapter, read_sharded
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
    seen: torch.Tensor | None = field(default=None, repr=False)  # the image as the frozen tower encodes it


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
    """Exact, per-request seeded draws from the policy: argmax(log π + g), g ~ Gumbel(0, 1) from the request's
    own generator. Requests with T = 0 get no noise, and 0 for the log-prob of what they draw."""

    def __init__(self, seeds, temperatures, banned, device):
        self.generators = [torch.Generator(device).manual_seed(s) for s in seeds]
        self.greedy = torch.tensor([t == 0 for t in temperatures], device=device)
        self.T = torch.tensor([t or 1.0 for t in temperatures], device=device)[:, None]
        self.banned = banned

    def __call__(self, logits_NV, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """One token for each of the requests `rows`, and its log-prob."""
        at = torch.tensor(rows, device=logits_NV.device)
        logp_NV, greedy = policy_logits(logits_NV, self.T[at], self.banned).log_softmax(-1), self.greedy[at]
        noise = torch.stack([torch.empty_like(row).exponential_(generator=self.generators[i]).log_().neg_()
                             for i, row in zip(rows, logp_NV)])
        token_N = (logp_NV + noise.masked_fill_(greedy[:, None], 0.0)).argmax(-1)
        return token_N, logp_NV.gather(-1, token_N[:, None]).squeeze(-1).masked_fill(greedy, 0.0)


# -------------------------------------------------------------------------------------------- building blocks
def need_checkpoint(path) -> None:
    """UserError unless `path` is a checkpoint directory: a name would be looked up on a hub otherwise."""
    if not (Path(path) / "config.json").is_file():
        raise UserError(f"checkpoint {path}: no config.json there; give the directory of a Qwen2.5-VL "
                        f"checkpoint (stage 2 writes one; the demo's comes from demo/tiny_model.py)")


def load_config(path):
    """The configuration of the checkpoint at `path`; UserError if it is not one of a Qwen2.5-VL."""
    from transformers import AutoConfig
    need_checkpoint(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as e:
        raise UserError(f"checkpoint {path}: {str(e)[:200]}; give the directory of a Qwen2.5-VL "
                        f"checkpoint") from None
    if config.model_type != "qwen2_5_vl":
        raise UserError(f"checkpoint {path} is a {config.model_type} model; both roles need a qwen2_5_vl one")
    return config


def need_model(path) -> None:
    """UserError unless `path` is a Qwen2.5-VL with its tokenizer and image processor; reads no weights."""
    load_config(path)
    Inputs(path)
    if not torch.cuda.is_available() and (n := parameter_count(path)) > 1e9:
        print(f"{path}: {n / 1e9:.1f} G parameters, and torch sees no GPU: an answer will take minutes here",
              file=sys.stderr)


def parameter_count(path) -> int:
    """Parameters of the checkpoint at `path`, without reading its weights; UserError as in load_config."""
    from transformers import Qwen2_5_VLForConditionalGeneration
    with torch.device("meta"):
        return sum(p.numel() for p in Qwen2_5_VLForConditionalGeneration(load_config(path)).parameters())


def load_model(path, device="cpu", dtype="float32"):
    """The checkpoint at `path` as a plain Qwen2_5_VLForConditionalGeneration; UserError if it is not one."""
    from transformers import Qwen2_5_VLForConditionalGeneration
    from transformers.utils import logging
    logging.disable_progress_bar()
    config = load_config(path)
    try:
        weights = {"state_dict": read_sharded(path), "config": config} if is_sharded(path) else {}
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            None if weights else path, dtype=getattr(torch, dtype), **weights)
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        raise UserError(f"checkpoint {path}: its weights cannot be read ({str(e)[:200]}); give one whose "
                        f"files are complete") from e
    return group_windows(model.to(device))


def recompute_activations(model) -> None:
    """Keep no activations for the backward pass (by the newer transformers' name for it, or the older ones').
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


class Inputs:
    """Texts and screenshots -> ids and tensors, for one checkpoint: tokenizer + PIL image processor."""

    def __init__(self, path):
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        need_checkpoint(path)
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

    def grids(self, sizes: list[tuple[int, int]]) -> torch.Tensor:
        """(images, 3) frames, rows and columns of patches of images of these sizes."""
        return torch.tensor([[1, h // self.images.patch_size, w // self.images.patch_size] for w, h in sizes])

    def save(self, directory) -> None:
        """All that makes inputs, as files of a checkpoint directory."""
        self.tokenizer.save_pretrained(directory)
        self.images.save_pretrained(directory)


def plain(text: str) -> str:
    """Text from a task, a page or a model, with anything that looks like a special token broken up."""
    return re.sub(r"<\|(\w+)\|>", r"<| \1 |>", text)


def forward_hidden(model, inputs: dict) -> torch.Tensor:
    """(N, S, H) last hidden states. Raises ValueError without mm_token_type_ids: transformers would silently
    fall back to one-dimensional positions."""
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
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # PEFT (0.21, the newest) asks the model for a property that transformers has renamed
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            torch.manual_seed(seed)
            lora = LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=LORA_TARGETS,
                              bias="none")
            self.peft = get_peft_model(base, lora, adapter_name=role).eval()
        self.model = self.peft.get_base_model()
        self.seen = weakref.WeakValueDictionary()     # png -> features, for as long as a sample holds them
        self.banned = torch.tensor(self.inputs.banned, device=device)
        self.autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == "bfloat16")
        self.checkpointing = checkpointing
        if checkpointing:
            recompute_activations(self.model)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters by name: chosen by name, not by requires_grad,
        which PEFT flips."""
        found = {n: p for n, p in self.peft.named_parameters() if ".lora_" in n and f".{self.role}." in n}
        assert found and all(p.requires_grad for p in found.values()), "the adapter is not trainable"
        return found

    def encode(self, system: str, user: str, png: bytes):
        return self.inputs.encode(system, user, png)

    def _recompute(self, on: bool) -> None:
        """Activations in the backward pass. transformers asks each layer's own `training`, never its
        children's; older ones drop the cache of a layer that has it, so it is off while we sample."""
        for layer in self.model.model.language_model.layers:
            layer.training = on and self.checkpointing

    def see(self, pngs: list[bytes]) -> list[torch.Tensor]:
        """(image tokens, H) features of each screenshot, in host memory. The vision tower is frozen: equal
        screenshots are encoded once, and what a living sample still holds is not encoded again."""
        seen = {png: self.seen.get(png) for png in pngs}
        if new := [png for png, features in seen.items() if features is None]:
            pixels = {k: v.to(self.device) for k, v in self.inputs.pixels(new).items()}
            with torch.inference_mode(False), torch.no_grad(), self.autocast:
                out = self.model.model.get_image_features(**pixels, return_dict=True).pooler_output
            fresh = {png: features.to("cpu", copy=True) for png, features in zip(new, out, strict=True)}
            self.seen.update(fresh)
            seen |= fresh
        return [seen[png] for png in pngs]

    def model_inputs(self, prompts, sizes, features, responses=None, left=False) -> dict:
        """Padded inputs with images that are encoded already: embeddings and M-RoPE positions."""
        texts = {k: v.to(self.device) for k, v in self.inputs.texts(prompts, responses, left).items()}
        ids = texts.pop("input_ids")
        embeds = self.model.get_input_embeddings()(ids)
        image = torch.cat(features).to(embeds.device, embeds.dtype)
        positions, _ = self.model.model.get_rope_index(ids, image_grid_thw=self.inputs.grids(sizes), **texts)
        embeds = embeds.masked_scatter((ids == self.inputs.image_id)[..., None], image)
        return texts | {"inputs_embeds": embeds, "position_ids": positions}

    @torch.inference_mode()
    def sample(self, requests: list) -> list[Sample]:
        """One response per request (system, user, png, seed, temperature, max_new_tokens), in one batch.
        Equal prompts of the batch share one prefill: a task's K plans, and those first steps of a plan whose
        pages opened in time for it. The cache grows with every token: decoding with static shapes (compiled,
        in CUDA graphs) would pay on a GPU only, was not measured on one, and is not there."""
        self._recompute(False)
        encoded = [self.encode(q.system, q.user, q.png) for q in requests]
        features = self.see([q.png for q in requests])
        first, at = {}, []                            # prompt -> its row of the prefill; each request's row
        for i, ((ids, _), q) in enumerate(zip(encoded, requests)):
            at.append(first.setdefault((tuple(ids), q.png), (len(first), i))[0])
        once = [i for _, i in first.values()]
        inputs = self.model_inputs([encoded[i][0] for i in once], [encoded[i][1] for i in once],
                                   [features[i] for i in once], left=True)
        sampler = GumbelSampler([q.seed for q in requests], [q.temperature for q in requests], self.banned,
                                self.device)
        with self.autocast:
            drawn = self._decode(inputs, at, [q.max_new_tokens for q in requests], sampler)
        return [self.read(q, ids, size, response, logp, seen)
                for q, (ids, size), seen, (response, logp) in zip(requests, encoded, features, drawn)]

    def _decode(self, inputs: dict, at: list[int], limits: list[int], sampler) -> list[tuple[list, list]]:
        """Ids and log-probs that each request draws after the prompt in row `at` of `inputs`, up to the first
        end or its limit. A request that has ended leaves the batch."""
        drawn, live = [([], []) for _ in at], list(range(len(at)))
        rows = torch.tensor(at, device=self.device)
        from transformers import DynamicCache
        cache = DynamicCache()
        named = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        use = {named: cache, "use_cache": True}       # the newer transformers' name, or the older ones'
        logits_NV = self.model(**inputs, **use, logits_to_keep=1).logits[:, -1][rows]
        mask_NS, position_N = inputs["attention_mask"][rows], inputs["position_ids"][0, :, -1][rows] + 1
        cache.batch_select_indices(rows)
        while True:
            token_N, logp_N = sampler(logits_NV, live)
            for i, token, logp in zip(live, token_N.tolist(), logp_N.tolist()):
                drawn[i][0].append(token), drawn[i][1].append(logp)
            on = [n for n, i in enumerate(live)
                  if drawn[i][0][-1] not in self.inputs.stop_ids and len(drawn[i][0]) < limits[i]]
            if not on:
                return drawn
            if len(on) < len(live):
                live, keep = [live[n] for n in on], torch.tensor(on, device=self.device)
                token_N, mask_NS, position_N = token_N[keep], mask_NS[keep], position_N[keep]
                cache.batch_select_indices(keep)
            mask_NS = torch.nn.functional.pad(mask_NS, (0, 1), value=1)
            logits_NV = self.model(input_ids=token_N[:, None], attention_mask=mask_NS, **use,
                                   position_ids=position_N[None, :, None].expand(3, -1, -1)).logits[:, -1]
            position_N = position_N + 1

    def read(self, q, prompt_ids, image_size, response_ids, logp, seen=None) -> Sample:
        """The Sample of a request's response, wherever that was drawn."""
        text = self.inputs.tokenizer.decode(response_ids, skip_special_tokens=True)
        cut = response_ids[-1] not in self.inputs.stop_ids
        return Sample(prompt_ids, q.png, image_size, response_ids, logp, text, cut, seen)

    def logp(self, samples: list[Sample], T: float, reference=False) -> list[torch.Tensor]:
        """One (|response|,) float32 tensor of log π per sample, with gradient to the adapter. Samples of the
        same prompt share its forward and backward pass.

        `reference` = without the adapter. Raises ValueError for a response that contains a banned id: its
        probability is 0, and an image id would also break the forward pass.
        """
        for s in samples:
            if bad := set(s.response_ids) & set(self.inputs.banned):
                raise ValueError(f"a response holds the banned token ids {sorted(bad)}")
        self._recompute(True)
        for s, seen in zip(samples, self.see([s.png for s in samples])):
            s.seen = seen                             # kept for the next pass
        row, heads, tails, spans, at = {}, [], [], [], []
        for s in samples:                             # one row per prompt, all its responses behind it
            r = row.setdefault((tuple(s.prompt_ids), s.png), len(row))
            if r == len(heads):
                heads.append(s), tails.append([])
            P, start = len(s.prompt_ids), len(s.prompt_ids) + len(tails[r])
            end = start + len(s.response_ids)
            tails[r] += s.response_ids
            spans.append((r, start, end, start - P))
            at.append([P - 1, *range(start, end - 1)][:end - start])      # what predicts its tokens
        inputs = self.model_inputs([s.prompt_ids for s in heads], [s.image_size for s in heads],
                                   [s.seen for s in heads], tails)
        if len(heads) < len(samples):
            inputs |= self._branches(inputs, spans)
        with self.autocast, (self.peft.disable_adapter() if reference else torch.enable_grad()):
            h_NSH = forward_hidden(self.model, inputs)
            h = torch.cat([h_NSH[r, torch.tensor(i, dtype=torch.long, device=self.device)]
                           for (r, *_), i in zip(spans, at)])
            y = torch.tensor([t for s in samples for t in s.response_ids], device=self.device).long()
            return list(token_logp(h, self.model.lm_head.weight, y, T, self.banned)
                        .split([len(s.response_ids) for s in samples]))

    def _branches(self, inputs: dict, spans: list[tuple]) -> dict:
        """Mask and positions for rows with several responses behind one prompt: each sees the prompt and
        itself, and goes on where the prompt ends. Spans: (row, start, end, tokens from prompt to start)."""
        part_NS = inputs["attention_mask"] - 1        # 0 in a prompt, -1 where padded, else its response
        position_3NS = inputs["position_ids"].clone()
        for n, (r, start, end, before) in enumerate(spans, 1):
            part_NS[r, start:end] = n
            position_3NS[:, r, start:end] -= before
        of, by = part_NS[:, None, :], part_NS[:, :, None]             # seen, seeing
        S = part_NS.shape[1]
        mask_NSS = ((of == 0) | (of == by)) & torch.ones(S, S, dtype=torch.bool, device=self.device).tril()
        return {"position_ids": position_3NS, "attention_mask": {"full_attention": mask_NSS[:, None]}}

    def twin(self) -> "Policy":
        """The same policy with a copy of the adapter, on the same frozen weights: it may generate in one
        thread while this one trains in another."""
        own = {id(p) for p in self.parameters().values()}
        frozen = {id(p): p for p in [*self.peft.parameters(), *self.peft.buffers()] if id(p) not in own}
        other = copy.copy(self)
        other.peft = copy.deepcopy(self.peft, frozen)
        other.model = other.peft.get_base_model()
        return other

    def copy_adapter(self, other: "Policy") -> None:
        """Take over the adapter's present values of another policy of this role."""
        with torch.no_grad():
            for mine, theirs in zip(self.parameters().values(), other.parameters().values(), strict=True):
                mine.copy_(theirs)

    def save(self, directory) -> None:
        """The adapter in PEFT's format (directory/adapter_model.safetensors), loadable by PEFT and vLLM.
        UserError, and nothing written, for one that has become NaN or infinite."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file
        state = get_peft_model_state_dict(self.peft, adapter_name=self.role)
        assert len(state) == len(self.parameters()), "PEFT left out adapter tensors"
        need_finite(state, f"the adapter of the {self.role}", "nothing of it was written: start again with "
                    "other settings (a smaller --lr), in a new run directory")
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        save_file({k: v.detach().cpu().contiguous() for k, v in state.items()},
                  directory / "adapter_model.safetensors", metadata={"format": "pt"})
        self.peft.peft_config[self.role].save_pretrained(directory)

    def load(self, directory) -> None:
        """Read an adapter written by `save`; UserError unless it has the same tensors, r and α, and finite
        numbers in them."""
        from peft import set_peft_model_state_dict
        state, saved = read_adapter(directory)
        mine = {n.replace(f".{self.role}.", "."): p for n, p in self.parameters().items()}
        if differ := mine.keys() ^ state.keys():
            raise UserError(f"adapter {directory} does not fit: {len(differ)} tensors differ "
                            f"by name; it was made for another base or another set of layers")
        own = self.peft.peft_config[self.role]
        if (saved.get("r"), saved.get("lora_alpha")) != (own.r, own.lora_alpha):
            raise UserError(f"adapter {directory} does not fit: it was trained with r {saved.get('r')} and α "
                            f"{saved.get('lora_alpha')}; give --lora_r and --lora_alpha to match")
        for name, tensor in state.items():
            if tensor.shape != mine[name].shape:
                raise UserError(f"adapter {directory} does not fit: {name} is {tuple(tensor.shape)} and not "
                                f"{tuple(mine[name].shape)}; it was made for another base, or is damaged")
        need_finite(state, f"adapter {directory}", "give another checkpoint")
        set_peft_model_state_dict(self.peft, state, adapter_name=self.role)
