"""One role's policy: a frozen Qwen2.5-VL with its adapter (model/backbone.py) as a distribution over tokens.

The policy is softmax(logits / T) with image and video ids banned and nothing else (PAPER-GAP 3): no top-k,
top-p or repetition penalty. `policy_logits` is that definition, and both sampling and the log-probs go
through it. A draw is argmax(logits + Gumbel noise) with the noise seeded per request, so it does not depend
on the batch it is in. The ids that were sampled are the ids that are trained: nothing is decoded and encoded
again.
"""

import copy
import inspect

import torch
from torch.utils.checkpoint import checkpoint

from model.backbone import Adapted
from model.inputs import Sample

# N samples, S positions of a padded row, T response tokens, n of all samples, V vocabulary, H hidden size


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


# ---------------------------------------------------------------------------------------------------- drawing
def decode(model, inputs: dict, at: list[int], limits: list[int], sampler: GumbelSampler,
           stop_ids: list[int]) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probs that each request draws after the prompt in row `at` of `inputs`, up to the first end
    or its limit. A request that has ended leaves the batch."""
    from transformers import DynamicCache
    cache = DynamicCache()
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    use = {named: cache, "use_cache": True}           # the newer transformers' name, or the older ones'
    rows = torch.tensor(at, device=inputs["attention_mask"].device)
    logits_NV = model(**inputs, **use, logits_to_keep=1).logits[:, -1][rows]
    mask_NS = inputs["attention_mask"][rows]
    position_N = inputs["position_ids"][0, :, -1][rows] + 1
    cache.batch_select_indices(rows)
    drawn: list[tuple[list[int], list[float]]] = [([], []) for _ in at]
    live = list(range(len(at)))
    while True:
        token_N, logp_N = sampler(logits_NV, live)
        for i, token, logp in zip(live, token_N.tolist(), logp_N.tolist()):
            ids, logps = drawn[i]
            ids.append(token)
            logps.append(logp)
        on = [n for n, i in enumerate(live)
              if drawn[i][0][-1] not in stop_ids and len(drawn[i][0]) < limits[i]]
        if not on:
            return drawn
        if len(on) < len(live):
            live = [live[n] for n in on]
            keep = torch.tensor(on, device=rows.device)
            token_N = token_N[keep]
            mask_NS = mask_NS[keep]
            position_N = position_N[keep]
            cache.batch_select_indices(keep)
        mask_NS = torch.nn.functional.pad(mask_NS, (0, 1), value=1)
        logits_NV = model(input_ids=token_N[:, None], attention_mask=mask_NS, **use,
                          position_ids=position_N[None, :, None].expand(3, -1, -1)).logits[:, -1]
        position_N = position_N + 1


# ------------------------------------------------------------------------------------------------- the policy
class Policy(Adapted):
    """One role that writes."""

    def encode(self, system: str, user: str, png: bytes):
        return self.inputs.encode(system, user, png)

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
            drawn = decode(self.model, inputs, at, [q.max_new_tokens for q in requests], sampler,
                           self.inputs.stop_ids)
        return [self.read(q, ids, size, response, logp, seen)
                for q, (ids, size), seen, (response, logp) in zip(requests, encoded, features, drawn)]

    def read(self, q, prompt_ids, image_size, response_ids, logp, features=None) -> Sample:
        """The Sample of a request's response, wherever that was drawn."""
        seen = {} if features is None else {self.role: features}
        text = self.inputs.tokenizer.decode(response_ids, skip_special_tokens=True)
        cut = response_ids[-1] not in self.inputs.stop_ids
        return Sample(prompt_ids, q.png, image_size, response_ids, logp, text, cut, self.role, seen)

    def logp(self, samples: list[Sample], T: float, reference=False) -> list[torch.Tensor]:
        """One (|response|,) float32 tensor of log π per sample, with gradient to the adapter; `reference` =
        without the adapter. Raises ValueError for a response that contains a banned id."""
        lengths = [len(s.response_ids) for s in samples]
        before = [range(len(s.prompt_ids) - 1, len(s.prompt_ids) - 1 + n) for s, n in zip(samples, lengths)]
        h = self.hidden(samples, before, reference)   # where each of the response's tokens is predicted
        y = torch.tensor([t for s in samples for t in s.response_ids], device=self.device).long()
        with self.autocast:
            return list(token_logp(h, self.model.lm_head.weight, y, T, self.banned).split(lengths))

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
