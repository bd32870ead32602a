"""A critic: values of (prompt, screenshot, response) at given tokens, by named heads on one backbone.

    critic = Critic(path, "critic", ("high", "keep", "low"), reads=actor.inputs)
    rows = critic.values(samples, [{"high": [41], "low": [41, 57]}, ...])     # with gradient
    rows[0]["low"]                                                           # (2,) float32

A position counts from the first token of the prompt: len(s.prompt_ids) - 1 is the prompt's last token, and a
value there knows prompt and screenshot but nothing of the response. The base may have another size than that
of the policy whose samples it reads. It takes their ids as they are, so it needs the same tokenizer, which
all Qwen2.5-VL share, and must cut a screenshot into the same image tokens.

A head is linear, in float32 and zero at first: every value is exactly 0, and the first step moves the heads
alone, the second one the adapter as well. On disk: the adapter as a policy saves it, and heads.safetensors.
"""

from dataclasses import replace
from pathlib import Path

import torch

from model.backbone import Adapted, need_model, need_values
from model.inputs import Inputs, Sample
from runtime import UserError

# n positions, H hidden size
Places = dict[str, list[int]]                         # head -> positions at which it is read


def need_critic(path, of) -> None:
    """UserError unless `path` is a Qwen2.5-VL that can read samples of the one at `of`; reads no weights."""
    need_model(path)
    need_same_ids(Inputs(path), Inputs(of))


def need_same_ids(critic: Inputs, policy: Inputs) -> None:
    """UserError unless both make the same ids of a text and a screenshot."""
    if critic.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise UserError(f"critic {critic.path}: its tokenizer is not that of {policy.path}, whose samples "
                        f"it reads; give a Qwen2.5-VL checkpoint with the same tokenizer")
    if critic.cutting() != policy.cutting():
        raise UserError(f"critic {critic.path}: it cuts screenshots into other tokens than {policy.path}; "
                        f"copy preprocessor_config.json from there")


class Critic(Adapted):
    """One role that values. `reads` are the inputs of the policy whose samples it gets; the other settings
    are those of a policy."""

    def __init__(self, path, role: str, heads: tuple[str, ...], reads: Inputs, **settings):
        super().__init__(path, role, **settings)
        need_same_ids(self.inputs, reads)
        H = self.model.config.text_config.hidden_size
        self.heads = {}
        for name in heads:
            for part, shape in (("weight", (H,)), ("bias", ())):
                self.heads[f"{name}.{part}"] = torch.nn.Parameter(torch.zeros(shape, device=self.device))

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those of the adapter and of the heads, by name."""
        return self.adapter() | {f"heads.{name}": p for name, p in self.heads.items()}

    def values(self, samples: list[Sample], at: list[Places]) -> list[dict[str, torch.Tensor]]:
        """For each sample and head that is asked for, an (n,) float32 tensor of its values at n positions, in
        one pass, with gradient to adapter and heads. ValueError for a position outside of its sample."""
        if not samples:
            return []
        rows = [self._row(s, places) for s, places in zip(samples, at, strict=True)]
        positions = [[p for where in places.values() for p in where] for places in at]
        h_nH = self.hidden(rows, positions).float()
        parts = iter(h_nH.split([len(where) for places in at for where in places.values()]))
        return [{head: self._value(head, next(parts)) for head in places} for places in at]

    @torch.no_grad()
    def estimate(self, samples: list[Sample], at: list[Places],
                 micro_batch: int = 8) -> list[dict[str, torch.Tensor]]:
        """`values` of any number of samples, without gradient and at most `micro_batch` of them in a pass."""
        order = sorted(range(len(samples)), key=lambda i: (len(samples[i].prompt_ids), samples[i].prompt_ids))
        rows = {}
        for start in range(0, len(order), micro_batch):
            part = order[start:start + micro_batch]
            rows |= zip(part, self.values([samples[i] for i in part], [at[i] for i in part]))
        return [rows[i] for i in range(len(samples))]

    def _value(self, head: str, h_nH: torch.Tensor) -> torch.Tensor:
        return h_nH @ self.heads[f"{head}.weight"] + self.heads[f"{head}.bias"]

    def _row(self, s: Sample, places: Places) -> Sample:
        """The sample as far as it is looked at; `seen` is shared, so features are kept for the next pass.
        Embeddings have more rows than there are tokens, how many more depends on the size of the model: an
        id that only the policy's have is read as padding."""
        if self.inputs.size(s.png) != s.image_size:
            raise ValueError(f"a sample's screenshot is {s.image_size} to its policy and "
                             f"{self.inputs.size(s.png)} to the critic")
        P = len(s.prompt_ids)
        asked = [p for where in places.values() for p in where]
        if wrong := [p for p in asked if not 0 <= p < P + len(s.response_ids)]:
            raise ValueError(f"positions {wrong} are not in a sample of {P} + {len(s.response_ids)} tokens")
        seen = s.response_ids[:max(0, max(asked, default=0) + 1 - P)]
        known = self.model.get_input_embeddings().num_embeddings
        return replace(s, response_ids=[i if i < known else self.inputs.pad_id for i in seen])

    def save(self, directory) -> None:
        """The adapter as a policy saves it, and the heads beside it."""
        from safetensors.torch import save_file
        super().save(directory)
        state = {name: p.detach().cpu() for name, p in self.heads.items()}
        save_file(state, Path(directory) / "heads.safetensors", metadata={"format": "pt"})

    def load(self, directory) -> None:
        """Read what `save` wrote; UserError, and nothing changed, unless adapter and heads are like ours."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file
        file = Path(directory) / "heads.safetensors"
        if not file.is_file():
            raise UserError(f"critic {directory}: no heads.safetensors there; give a directory that a critic "
                            f"was saved to")
        try:
            state = load_file(file)
        except (OSError, SafetensorError) as e:
            raise UserError(f"critic {directory}: heads.safetensors cannot be read ({e}); give an earlier "
                            f"checkpoint") from None
        if state.keys() != self.heads.keys():
            saved, own = ({n.split(".")[0] for n in names} for names in (state, self.heads))
            raise UserError(f"critic {directory} does not fit: it has the heads {sorted(saved)}, not "
                            f"{sorted(own)}; give a critic of the same system")
        need_values(f"critic {directory}", state, self.heads)
        super().load(directory)
        with torch.no_grad():
            for name, p in self.heads.items():
                p.copy_(state[name])
