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
import runtime  # noqa: E402  (the project root is not a package)

TESTS = ("test_equations", "test_grpo_hier", "test_policy", "test_critic")
FIRST = {"policy": "test_policy", "inputs": "test_policy", "backbone": "test_policy", "critic": "test_critic"}
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
- A.adv.append(float(adv_A_BKM[g, plan.k, episode.m]))
+ A.adv.append(float(adv_D_BK[g, plan.k]))

grpo_hier.py: advantage divided over the steps
- A.adv.append(float(adv_A_BKM[g, plan.k, episode.m]))
+ A.adv.append(float(adv_A_BKM[g, plan.k, episode.m]) / len(episode.steps))

grpo_hier.py: advantage of another plan
- float(adv_A_BKM[g, plan.k, episode.m])
+ float(adv_A_BKM[g, 0, episode.m])

grpo_hier.py: lost episodes are trained on
- for step in episode.steps if episode.reward is not None else ():
+ for step in episode.steps:

grpo_hier.py: T_ij is always 1
- A.T.append(len(episode.steps))
+ A.T.append(1)

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
- torch.minimum(r_NT * adv_N[:, None], r_NT.clamp
+ (r_NT.clamp

grpo_hier.py: clip wider above
- .clamp(1 - eps, 1 + eps)
+ .clamp(1 - eps, 1 + 1.4 * eps)

grpo_hier.py: KL the wrong way round
- d_NT = logp_ref_NT - logp_NT
+ d_NT = logp_NT - logp_ref_NT

grpo_hier.py: KL is rewarded
- term_NT - cfg.beta * kl_NT
+ term_NT + cfg.beta * kl_NT

grpo_hier.py: KL to the policy itself
- policy.logp(samples, T, reference=True)
+ policy.logp(samples, T)

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
- return loss_D(term_NT, mask_NT, B, K, cfg
+ return loss_D(term_NT, mask_NT, B, K * cfg.M, cfg

grpo_hier.py: printed plan loss not divided by its length
- / mask_NT.sum(1).clamp(min=1)).sum() / (B * K)
+ ).sum() / (B * K)

grpo_hier.py: C_A without max steps
- cfg.max_steps * cfg.max_tokens_A)
+ cfg.max_tokens_A)

grpo_hier.py: difference of the two losses
- return L_A + L_D
+ return L_A - L_D

grpo_hier.py: padding is trained on
- torch.ones_like(r.detach()) for r in rows], batch_first=True)
+ torch.ones_like(r.detach()) for r in rows], batch_first=True, padding_value=1)

grpo_hier.py: temperature of the other role
- if policy.role == "actor" else cfg.temperature_D
+ if policy.role != "actor" else cfg.temperature_D

grpo_hier.py: old log-probs renewed in pass 2
-             if step == 0:
+             if True:

grpo_hier.py: gradient of pass 1 kept
- p.grad = torch.zeros_like(p)
+ p.grad = torch.zeros_like(p) if p.grad is None else p.grad

grpo_hier.py: gradients not summed over ranks
-     all_reduce_flat_([p.grad for p in parameters])
+

grpo_hier.py: last micro-batch dropped
- return [part for part in parts if part]
+ return parts[:-1]

grpo_hier.py: importance weight without a cap
- .exp().clamp(max=cap)
+ .exp()

grpo_hier.py: importance weight upside down
- (logp_old_NT - logp_sampler_NT).exp()
+ (logp_sampler_NT - logp_old_NT).exp()

grpo_hier.py: drawn ahead, old log-probs are the trainer's
- if cfg.pipeline     # they have
+ if False            # they have

grpo_hier.py: statistics of one rank only
- sums = torch.tensor(gather_objects(sums.tolist(), world)).sum(0)
+ sums = sums

bookkeeping.py: optimizer not restored
-             optimizers[role].load_state_dict(
+             str(

grpo_hier.py: schedule depends on the number of ranks
- random.Random(f"{cfg.seed} {epoch}")
+ random.Random(f"{cfg.seed} {epoch} {world_size}")

policy.py: temperature forgotten
- (logits.float() / T).index_fill_
+ (logits.float() / 1).index_fill_

policy.py: banned ids allowed
- .index_fill_(-1, banned, -torch.inf)
+

policy.py: log-prob gradient without temperature
- @ W_VH) / Z) / T if
+ @ W_VH) / Z) if

policy.py: log-prob gradient of the chosen token only
- W_VH[y].float() - (e.to(W_VH.dtype) @ W_VH) / Z)
+ W_VH[y].float())

policy.py: log-probs one position late
- range(len(s.prompt_ids) - 1, len(s.prompt_ids) - 1 + n)
+ range(len(s.prompt_ids), len(s.prompt_ids) + n)

model/backbone.py: responses behind one prompt see each other
- mask_NSS = ((of == 0) | (of == by)) &
+ mask_NSS = (of >= 0) &

model/backbone.py: positions run on from the response before
-             position_3NS[:, r, start:end] -= before
+

policy.py: sampled end left out
- return Sample(prompt_ids, q.png, image_size, response_ids, logp, text, cut, seen)
+ return Sample(prompt_ids, q.png, image_size, response_ids[:-1], logp[:-1], text, cut, seen)

model/inputs.py: only one end is known
- sorted({self.end_id, self.pad_id})
+ [self.end_id]

policy.py: decoded on after the end
- if drawn[i][0][-1] not in self.inputs.stop_ids and len(
+ if len(

policy.py: limit of the longest request for all
- < limits[i]]
+ < max(limits)]

policy.py: positions of new tokens one late
- inputs["position_ids"][0, :, -1][rows] + 1
+ inputs["position_ids"][0, :, -1][rows] + 2

model/backbone.py: features of another screenshot
- return [seen[png] for png in pngs]
+ return [seen[png] for png in pngs[::-1]]

policy.py: a twin shares the adapter
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

policy.py: sampler noise of one sign
- .exponential_(generator=self.generators[i]).log_().neg_()
+ .exponential_(generator=self.generators[i]).log_()

policy.py: one seed for all requests
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
- if (saved["r"], saved["lora_alpha"]) != (own.r, own.lora_alpha):
+ if saved["r"] != own.r:

model/backbone.py: adapter that does not fit accepted
-         if set(mine) != set(state):
+         if False:

model/backbone.py: numbers that are not finite accepted
- if not tensor.isfinite().all():
+ if False:

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
    for pattern in ("*.py", "model/*.py", "pyproject.toml", "demo/*", "bench/*.py", "tests/*.py"):
        for file in ROOT.glob(pattern):
            if file.is_file():
                target = directory / file.relative_to(ROOT)
                target.parent.mkdir(exist_ok=True)
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
