"""Break the mathematics on purpose, one fault at a time, and see which test notices.

    python tests/mutants.py                # all faults, two at a time: about ten minutes on 2 cores
    python tests/mutants.py --only clip    # those with "clip" in their name

Each fault is one piece of source, replaced in a copy of the project. The copy's tests of the equations run,
then those of the update, of the policy and of the critic, until one fails; a line per fault says which. A
fault that no test notices is a gap in the tests. The last line is JSON: {"mutants": how many, "caught": how
many were noticed}.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import runtime

TESTS = ("test_equations", "test_losses", "test_grpo_hier", "model/test_update", "model/test_policy",
         "model/test_critic")
FIRST = {"policy": "model/test_policy", "inputs": "model/test_policy", "backbone": "model/test_policy",
         "critic": "model/test_critic", "update": "model/test_update"}       # whose tests notice soonest
# file: name of the fault; the source it replaces, which occurs once (test_house.py looks); its replacement
FAULTS = r"""
grpo_hier.py: population std
- (n - 1).clamp(min=1)).sqrt()
+ n.clamp(min=1)).sqrt()

grpo_hier.py: std without delta
- .sqrt() + std_eps)
+ .sqrt())

grpo_hier.py: std always on
-     if std:
+     if True:

grpo_hier.py: mean over the batch instead of the group
-     mean = torch.where(valid, x, 0).sum(-1, keepdim=True) / n.clamp(min=1)
+     mean = torch.where(valid, x, 0).sum() / valid.sum().clamp(min=1)

grpo_hier.py: lost episodes count as failures in the mean
-     n = valid.sum(-1, keepdim=True)
+     n = torch.full_like(valid[..., :1].long(), x.shape[-1])

grpo_hier.py: lost episodes count as failures in S
- / n_BK.clamp(min=1), n_BK > 0
+ / R_BKM.shape[-1], n_BK > 0

grpo_hier.py: S needs two episodes
- n_BK.clamp(min=1), n_BK > 0
+ n_BK.clamp(min=1), n_BK > 1

grpo_hier.py: equal rewards leave a rounding error
- torch.where(spread & valid, d, 0)
+ d

grpo_hier.py: leave-one-out baseline
-     d = torch.where(valid, x - mean, 0)
+     d = torch.where(valid, x - mean, 0) * n / (n - 1).clamp(min=1)

grpo_hier.py: the actor gets the decomposer's advantage
- [Row(step.sample, adv_A, len(e.steps)) for
+ [Row(step.sample, adv_D, len(e.steps)) for

grpo_hier.py: advantage divided over the steps
- [Row(step.sample, adv_A, len(e.steps)) for
+ [Row(step.sample, adv_A / len(e.steps), len(e.steps)) for

grpo_hier.py: advantage of another plan
- adv_A = float(adv_A_BKM[g, k, m])
+ adv_A = float(adv_A_BKM[g, 0, m])

grpo_hier.py: lost episodes are trained on
-                 if e.reward is not None:
+                 if True:

grpo_hier.py: T_ij is always 1
- [Row(step.sample, adv_A, len(e.steps)) for
+ [Row(step.sample, adv_A, 1) for

grpo_hier.py: ratio upside down
- (logp_NT - logp_old_NT).exp()
+ (logp_old_NT - logp_NT).exp()

grpo_hier.py: max for min
- return torch.minimum(
+ return torch.maximum(

grpo_hier.py: clip from above only
- .clamp(1 - eps, 1 + eps)
+ .clamp(max=1 + eps)

grpo_hier.py: clip from below only
- .clamp(1 - eps, 1 + eps)
+ .clamp(min=1 - eps)

grpo_hier.py: clip without the min
- torch.minimum(r_NT * adv_NT, r_NT.clamp(1 - eps, 1 + eps) * adv_NT)
+ r_NT.clamp(1 - eps, 1 + eps) * adv_NT

grpo_hier.py: clip wider above
- .clamp(1 - eps, 1 + eps)
+ .clamp(1 - eps, 1 + 1.4 * eps)

grpo_hier.py: KL the wrong way round
- d_NT = logp_ref_NT - logp_NT
+ d_NT = logp_NT - logp_ref_NT

grpo_hier.py: KL is rewarded
- term_NT - cfg.beta * kl_NT
+ term_NT + cfg.beta * kl_NT

model/update.py: KL to the policy itself
- self.policy.logp(samples, self.T, reference=True)
+ self.policy.logp(samples, self.T)

grpo_hier.py: actor loss not divided by M
- / (B * K * M * C_A)
+ / (B * K * C_A)

grpo_hier.py: actor loss as a mean over the micro-batch's tokens
- / (B * K * M * C_A)
+ / mask_NT.sum().clamp(min=1)

grpo_hier.py: actor loss divided by padded width
- / (B * K * M * C_A)
+ / (B * K * M * term_NT.shape[1])

grpo_hier.py: printed loss not divided by T
- .clamp(min=1) / T_N).sum()
+ .clamp(min=1)).sum()

grpo_hier.py: printed loss divided by padded width
- mask_NT.sum(1).clamp(min=1) / T_N)
+ mask_NT.shape[1] / T_N)

grpo_hier.py: decomposer loss not divided by K
- / (B * K * C_D)
+ / (B * C_D)

grpo_hier.py: decomposer loss divided by M
- loss_D(term_NT, m.mask_NT, B, cfg.plans, cfg
+ loss_D(term_NT, m.mask_NT, B, cfg.plans * cfg.M, cfg

grpo_hier.py: printed plan loss not divided by its length
- / mask_NT.sum(1).clamp(min=1)).sum() / (B * K)
+ ).sum() / (B * K)

grpo_hier.py: C_A without max steps
- cfg.max_steps * cfg.max_tokens_A)
+ cfg.max_tokens_A)

grpo_hier.py: difference of the two losses
-     return sum(L)
+     return L[0] - sum(L[1:])

model/update.py: padding is trained on
- torch.ones_like(r.detach()) for r in rows], batch_first=True)
+ torch.ones_like(r.detach()) for r in rows], batch_first=True, padding_value=1)

grpo_hier.py: temperature of the other role
- temperature=cfg.temperature_D,
+ temperature=cfg.temperature_A,

model/update.py: old log-probs renewed in pass 2
-         if first:
-             self.remember
+         if True:
+             self.remember

model/update.py: gradient of pass 1 kept
- p.grad = torch.zeros_like(p)
+ p.grad = torch.zeros_like(p) if p.grad is None else p.grad

model/update.py: gradients not summed over ranks
-     all_reduce_flat_([p.grad for p in parameters])
+

model/update.py: last micro-batch dropped
- return [part for part in parts if part]
+ return parts[:-1]

model/update.py: importance weight without a cap
- .exp().clamp(max=cap)
+ .exp()

model/update.py: importance weight upside down
- (logp_old_NT - logp_sampler_NT).exp()
+ (logp_sampler_NT - logp_old_NT).exp()

model/update.py: drawn ahead, old log-probs are the trainer's
- self.sampler[i] if self.cfg.pipeline else row.detach()
+ row.detach()

model/update.py: statistics of one rank only
- sum(rank[0][name] for rank in every) for name in sums
+ every[0][0][name] for name in sums

runtime/checkpoints.py: optimizer not restored
-             optimizer.load_state_dict(
+             str(

runtime/batches.py: schedule depends on the number of ranks
- random.Random(f"{seed} {epoch}")
+ random.Random(f"{seed} {epoch} {size}")

model/policy.py: temperature forgotten
- (logits.float() / T).index_fill_
+ (logits.float() / 1).index_fill_

model/policy.py: banned ids allowed
- .index_fill_(-1, banned, -torch.inf)
+

model/policy.py: log-prob gradient without temperature
- @ W_VH) / Z) / T if
+ @ W_VH) / Z) if

model/policy.py: log-prob gradient of the chosen token only
- W_VH[y].float() - (e.to(W_VH.dtype) @ W_VH) / Z)
+ W_VH[y].float())

model/policy.py: log-probs one position late
- range(len(s.prompt_ids) - 1, len(s.prompt_ids) - 1 + n)
+ range(len(s.prompt_ids), len(s.prompt_ids) + n)

model/backbone.py: responses behind one prompt see each other
- mask_NSS = ((of == 0) | (of == by)) &
+ mask_NSS = (of >= 0) &

model/backbone.py: positions run on from the response before
-             position_3NS[:, r, start:end] -= before
+

model/policy.py: sampled end left out
- return Sample(prompt_ids, q.png, image_size, response_ids, logp, text, cut, self.role, seen)
+ return Sample(prompt_ids, q.png, image_size, response_ids[:-1], logp[:-1], text, cut, self.role, seen)

model/inputs.py: only one end is known
- sorted({self.end_id, self.pad_id})
+ [self.end_id]

model/policy.py: decoded on after the end
- if drawn[i][0][-1] not in stop_ids and len(
+ if len(

model/policy.py: limit of the longest request for all
- < limits[i]]
+ < max(limits)]

model/policy.py: positions of new tokens one late
- inputs["position_ids"][0, :, -1][rows] + 1
+ inputs["position_ids"][0, :, -1][rows] + 2

model/backbone.py: features of another screenshot
- return [seen[png] for png in pngs]
+ return [seen[png] for png in pngs[::-1]]

model/policy.py: a twin shares the adapter
- if id(p) not in own}
+ }

model/inputs.py: attention to padding
- ids[i, at], mask[i, at] = torch.tensor(row), 1
+ ids[i, at], mask[i] = torch.tensor(row), 1

model/inputs.py: image types forgotten
- "mm_token_type_ids": (ids == self.image_id).long()
+ "mm_token_type_ids": torch.zeros_like(ids)

model/inputs.py: images in another order
- for png in pngs], return_tensors
+ for png in pngs[::-1]], return_tensors

model/backbone.py: missing token types accepted
- if "mm_token_type_ids" not in inputs:
+ if False:

model/policy.py: sampler noise of one sign
- .exponential_(generator=self.generators[i]).log_().neg_()
+ .exponential_(generator=self.generators[i]).log_()

model/policy.py: one seed for all requests
- manual_seed(s) for s in seeds]
+ manual_seed(0) for s in seeds]

model/backbone.py: response written again from its text
- tails[r] += s.response_ids
+ tails[r] += self.inputs.tokenizer(s.text)["input_ids"]

model/backbone.py: dropout acts
- adapter_name=role).eval()
+ adapter_name=role).train()

model/backbone.py: LoRA on the vision tower too
- r".*language_model.*\.(q_proj
+ r".*\.(q_proj

model/backbone.py: reference with the adapter
- self.peft.disable_adapter() if reference
+ torch.no_grad() if reference

model/backbone.py: any adapter name accepted
- if role in n.split(".")]
+ if False]

model/backbone.py: adapter of another scale accepted
- if (saved.get("r"), saved.get("lora_alpha")) != (own.r, own.lora_alpha):
+ if saved.get("r") != own.r:

model/backbone.py: adapter that does not fit accepted
-         if differ := mine.keys() ^ state.keys():
+         if False:

model/paths.py: numbers that are not finite accepted
-     if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
+     if bad := []:

model/backbone.py: read in the response before
- else p + before for p in positions]
+ else p for p in positions]

model/critic.py: heads are not zero at first
- torch.nn.Parameter(torch.zeros(
+ torch.nn.Parameter(torch.ones(

model/critic.py: the last token that is asked for is cut off
- max(asked, default=0) + 1 - P
+ max(asked, default=0) - P

model/critic.py: estimates in the order of the passes
- return [rows[i] for i in range(len(samples))]
+ return [rows[i] for i in order]

model/critic.py: heads are not trained
- return self.adapter() | {f"heads.{name}": p for name, p in self.heads.items()}
+ return self.adapter()

sft.py: SFT loss as a mean per micro-batch
- return -logp_n.sum() / n_tokens
+ return -logp_n.mean()
"""


@dataclass
class Config:
    only: str = ""                       # run the faults whose name contains this
    jobs: int = 2                        # copies under test at the same time


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str


def read_faults(text: str) -> list[Mutant]:
    out = []
    for block in text.strip().split("\n\n"):
        (file, _, name), *lines = block.splitlines()[0].partition(": "), *block.splitlines()[1:]
        old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
        out.append(Mutant(name, file, old, new))
    return out


MUTANTS = read_faults(FAULTS)


def copy(directory: Path) -> None:
    """The sources and the tests that are run; no data, no environment."""
    for pattern in ("*.py", "pyproject.toml", "demo/*", "bench/*.py", "tests/**/*.py", "*/**/*.py"):
        for file in ROOT.glob(pattern):
            if file.is_file() and not file.relative_to(ROOT).parts[0].startswith(".venv"):
                target = directory / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)


def first_failure(directory: Path, about: str = "") -> str:
    """The first test that fails in a copy, "" when all pass; those of the room `about` run first."""
    for name in sorted(TESTS, key=lambda name: name != FIRST.get(about)):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{name}.py"]
        process = subprocess.run(command, cwd=directory, capture_output=True, text=True)
        if process.returncode:
            found = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", process.stdout, re.MULTILINE)
            return found[1] if found else f"{name} ended with {process.returncode}: {process.stdout[-200:]}"
    return ""


def check(mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory() as name:
        copy(Path(name))
        file = Path(name) / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            raise runtime.UserError(f"{mutant.name}: not one {mutant.old!r} in {mutant.file}; mend the list")
        file.write_text(text.replace(mutant.old, mutant.new))
        return first_failure(Path(name), file.stem)


def main(cfg: Config) -> None:
    mutants = [m for m in MUTANTS if cfg.only in m.name]
    with tempfile.TemporaryDirectory() as name:
        copy(Path(name))
        if failed := first_failure(Path(name)):
            raise runtime.UserError(f"{failed} fails without any fault; mend that first")
    caught = 0
    with ThreadPoolExecutor(cfg.jobs) as pool:
        for mutant, test in zip(mutants, pool.map(check, mutants)):
            caught += bool(test)
            print(f"{mutant.name:55} {test or 'NOT NOTICED'}", flush=True)
    print(json.dumps({"mutants": len(mutants), "caught": caught}))


if __name__ == "__main__":
    runtime.launch(main)
