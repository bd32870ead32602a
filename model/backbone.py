"""A Qwen2.5-VL, frozen, with one LoRA adapter: hidden states where a policy or a critic asks for them.

LoRA sits on the seven linear layers of the language model only (PAPER-GAP 8); it is never merged into the
weights. The vision tower has no adapter, so a screenshot is encoded once for as long as some sample holds it.
"""

import contextlib
import sys
import warnings
import weakref
from pathlib import Path

import torch
from safetensors import SafetensorError

from model.attention import group_windows
from model.inputs import Inputs, Sample, need_checkpoint
from model.paths import is_sharded, need_finite, read_adapter, read_sharded
from runtime import UserError

# N rows, S positions of a padded row, n positions asked for, H hidden size
LORA_TARGETS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


# ------------------------------------------------------------------------------------------------ checkpoints
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
        raise UserError(f"checkpoint {path} is a {config.model_type} model; every role needs a qwen2_5_vl "
                        f"one: give the directory of a Qwen2.5-VL checkpoint")
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


def forward_hidden(model, inputs: dict) -> torch.Tensor:
    """(N, S, H) last hidden states. Raises ValueError without mm_token_type_ids: transformers would silently
    fall back to one-dimensional positions."""
    if "mm_token_type_ids" not in inputs:
        raise ValueError("mm_token_type_ids is missing: "
                         "the positions of image tokens would be silently wrong")
    return model.model(**inputs, use_cache=False).last_hidden_state


# ------------------------------------------------------------------------------------------- base and adapter
class Adapted:
    """A role's frozen base and the adapter of its name. Always in eval mode, so dropout never acts."""

    def __init__(self, path, role: str, r=32, alpha=64, dropout=0.0, device="cpu", dtype="float32", seed=0,
                 checkpointing=False):
        from peft import LoraConfig, get_peft_model
        self.role = role
        self.device = device
        self.inputs = Inputs(path)
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
        """What is trained, by name."""
        return self.adapter()

    def adapter(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters by name: chosen by name, not by requires_grad, which PEFT flips."""
        found = {n: p for n, p in self.peft.named_parameters() if ".lora_" in n and f".{self.role}." in n}
        assert found and all(p.requires_grad for p in found.values()), "the adapter is not trainable"
        return found

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

    def hidden(self, samples: list[Sample], at: list, reference=False) -> torch.Tensor:
        """(n, H) last hidden states, sample after sample at its positions `at`, which count from the first
        token of its prompt. Samples of the same prompt share its forward and backward pass.

        `reference` = without the adapter. Raises ValueError for a response that contains a banned id: a
        policy gives it the probability 0, and an image id would break the forward pass.
        """
        for s in samples:
            if bad := set(s.response_ids) & set(self.inputs.banned):
                raise ValueError(f"a response holds the banned token ids {sorted(bad)}")
        self._recompute(True)
        for s, features in zip(samples, self.see([s.png for s in samples])):
            s.seen[self.role] = features              # kept for the next pass
        row = {}                                      # prompt -> its row, all its responses behind it
        heads = []                                    # the first sample of each row
        tails = []                                    # the responses of each row
        spans = []
        for s in samples:
            r = row.setdefault((tuple(s.prompt_ids), s.png), len(row))
            if r == len(heads):
                heads.append(s)
                tails.append([])
            before = len(tails[r])
            start = len(s.prompt_ids) + before
            tails[r] += s.response_ids
            spans.append((r, start, start + len(s.response_ids), before))
        inputs = self.model_inputs([s.prompt_ids for s in heads], [s.image_size for s in heads],
                                   [s.seen[self.role] for s in heads], tails)
        if len(heads) < len(samples):
            inputs |= self._branches(inputs, spans)
        with self.autocast, (self.peft.disable_adapter() if reference else contextlib.nullcontext()):
            h_NSH = forward_hidden(self.model, inputs)
        parts = []
        for s, positions, (r, _, _, before) in zip(samples, at, spans, strict=True):
            there = [p if p < len(s.prompt_ids) else p + before for p in positions]
            parts.append(h_NSH[r, torch.tensor(there, dtype=torch.long, device=self.device)])
        return torch.cat(parts)

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

    def save(self, directory) -> None:
        """The adapter in PEFT's format (directory/adapter_model.safetensors), loadable by PEFT and vLLM.
        UserError, and nothing written, for one that has become NaN or infinite."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file
        state = get_peft_model_state_dict(self.peft, adapter_name=self.role)
        assert len(state) == len(self.adapter()), "PEFT left out adapter tensors"
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
        mine = {n.replace(f".{self.role}.", "."): p for n, p in self.adapter().items()}
        if differ := mine.keys() ^ state.keys():
            raise UserError(f"adapter {directory} does not fit: {len(differ)} tensors differ "
                            f"by name; it was made for another base or another set of layers")
        own = self.peft.peft_config[self.role]
        if (saved.get("r"), saved.get("lora_alpha")) != (own.r, own.lora_alpha):
            raise UserError(f"adapter {directory} does not fit: it was trained with r {saved.get('r')} and α "
                            f"{saved.get('lora_alpha')}; give --lora_r and --lora_alpha to match")
        need_values(f"adapter {directory}", state, mine)
        set_peft_model_state_dict(self.peft, state, adapter_name=self.role)


def need_values(what: str, state: dict, mine: dict) -> None:
    """UserError unless the tensors of a file have the shapes of ours and hold finite numbers."""
    for name, tensor in state.items():
        if tensor.shape != mine[name].shape:
            raise UserError(f"{what} does not fit: {name} is {tuple(tensor.shape)} and not "
                            f"{tuple(mine[name].shape)}; it was made for another base, or is damaged")
    need_finite(state, what, "give another checkpoint")
