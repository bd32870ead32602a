"""Token log-probs and the clipped loss over Qwen2.5-VL's vocabulary, beside two other ways to get them.

    python bench/loss.py              # about a minute on 2 cores; the first time also makes .venv-trl
    python bench/loss.py --H 3584     # the 7B's width: the matrix products rule, several minutes

Three contenders get the same hidden states, head, targets and advantages in one process, forward and back:
`ours` (policy.token_logp, Eqs. 6 and 7'), `naive` (all logits at once, log_softmax, the same loss) and `trl`
(ChunkedLogProbFunction and GRPOTrainer._compute_loss with loss_type dr_grpo). TRL lives in an environment of
its own, .venv-trl, that sees this project's packages; where it cannot be made, its part is left out and the
reason printed.

Peak memory is the largest growth of the process's resident memory during one run: the kernel's high-water
mark, reset before each run (on a GPU: the allocator's). Time is the least of `repeats` runs, the contenders
taking turns; the CPU seconds beside it tell whether the machine was busy with something else. Differences are
to the same formula in float64 for the first 256 tokens: log-probs, and gradients of h divided by the largest
one (naive is the least exact of the three).

The last line is JSON: peak_vs_naive, time_vs_naive, peak_vs_trl (null without TRL), max_abs_diff (ours).
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import grpo_hier
import runtime
from model.policy import token_logp

TRL = "trl==1.16.0"
VENV = ROOT / ".venv-trl"

# N samples of T tokens, n = N * T tokens, V vocabulary, H hidden size


@dataclass
class Config:
    n: int = 2048                        # response tokens
    V: int = 152064                      # vocabulary of Qwen2.5-VL-7B
    H: int = 512                         # hidden size; the 7B's is 3584
    temperature: float = 0.8             # sampling temperature
    repeats: int = 3                     # measured runs of each contender, after one that is not counted
    trl: bool = True                     # compare with TRL


def problem(cfg: Config, device: str) -> dict:
    """The same tensors for all: logits with a spread of about 3, old log-probs within and beyond the clip."""
    generator = torch.Generator().manual_seed(0)
    T = 64
    N = cfg.n // T
    h = torch.randn(cfg.n, cfg.H, generator=generator)
    W = torch.randn(cfg.V, cfg.H, generator=generator) * 3 / cfg.H ** 0.5
    y = torch.randint(cfg.V, (cfg.n,), generator=generator)
    with torch.no_grad():
        old = torch.cat([((part @ W.T) / cfg.temperature).log_softmax(-1).gather(-1, at[:, None]).squeeze(-1)
                         for part, at in zip(h.split(64), y.split(64))])
    old_NT = (old + 0.3 * torch.randn(cfg.n, generator=generator)).view(N, T)
    adv_N = torch.randn(N, generator=generator)
    tensors = {"h": h, "W": W, "y": y, "old_NT": old_NT, "adv_N": adv_N, "mask_NT": torch.ones(N, T)}
    return {k: v.to(device) for k, v in tensors.items()}


def our_loss(logp_NT, p):
    """Eqs. 6 and 7' with B = K = 1, M = N and C = T, which is TRL's dr_grpo."""
    adv_NT = p["adv_N"][:, None].expand_as(logp_NT)
    term_NT = grpo_hier.clipped(grpo_hier.ratio(logp_NT, p["old_NT"]), adv_NT, 0.2)
    return grpo_hier.loss_A(term_NT, p["mask_NT"], 1, 1, *logp_NT.shape)


def ours(h, p, cfg: Config):
    logp = token_logp(h, p["W"], p["y"], cfg.temperature, torch.tensor([], dtype=torch.long, device=h.device))
    return logp, our_loss(logp.view_as(p["old_NT"]), p)


def naive(h, p, cfg: Config):
    logp = ((h @ p["W"].T) / cfg.temperature).log_softmax(-1).gather(-1, p["y"][:, None]).squeeze(-1)
    return logp, our_loss(logp.view_as(p["old_NT"]), p)


def trl(h, p, cfg: Config):
    from trl import GRPOTrainer
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    logp, *_ = ChunkedLogProbFunction.apply(h, p["W"], None, p["y"], cfg.temperature, 32768, None, 1.0, ())
    logp_NT = logp.view_as(p["old_NT"])
    return logp, GRPOTrainer._compute_loss(trl_trainer(logp_NT, "dr_grpo", 0.2), None, {
        "prompt_ids": p["y"].view_as(logp_NT)[:, :1], "prompt_mask": p["mask_NT"][:, :1],
        "completion_ids": p["y"].view_as(logp_NT), "completion_mask": p["mask_NT"], "advantages": p["adv_N"],
        "old_per_token_logps": p["old_NT"]})


def trl_trainer(logp_NT, loss_type: str, eps: float, beta: float = 0.0):
    """What GRPOTrainer._compute_loss reads from `self`, with log-probs that are there already: no model."""
    same = lambda x, **_: x
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp_NT, torch.zeros_like(logp_NT), None),
        beta=beta, loss_type=loss_type, epsilon_low=eps, epsilon_high=eps, importance_sampling_level="token",
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, aux_loss_enabled=False,
        vllm_importance_sampling_correction=False, _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True), args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        max_completion_length=logp_NT.shape[1], current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(num_processes=1, gather=same, reduce=same, sync_gradients=True))


# -------------------------------------------------------------------------------------------------- measuring
def peak_start(device: str) -> int:
    """Forget the peak so far; returns the memory in use, in bytes."""
    gc.collect()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_bytes(b"5")         # the high-water mark becomes what is resident now
    return status("VmRSS")


def peak_end(device: str) -> int:
    if device != "cpu":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return status("VmHWM")


def status(key: str) -> int:
    """A number of the kernel's report on this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def run(contender, p: dict, cfg: Config):
    """One run, forward and back: (wall s, CPU s, peak bytes above what was in use), (log-probs, gradient)."""
    device = p["h"].device.type
    h = p["h"].clone().requires_grad_()
    before, wall, cpu = peak_start(device), time.perf_counter(), time.process_time()
    logp, loss = contender(h, p, cfg)
    loss.backward()
    peak = peak_end(device) - before
    return (time.perf_counter() - wall, time.process_time() - cpu, peak), (logp.detach(), h.grad)


def exact(p: dict, cfg: Config, first: int = 256):
    """float64 log-probs and gradients of the first tokens; a token's gradient depends on that token alone."""
    rows = -(-first // p["old_NT"].shape[1])
    part = {k: v[:rows].double() for k, v in p.items() if k in ("old_NT", "adv_N", "mask_NT")}
    n = part["old_NT"].numel()
    part |= {"h": p["h"][:n].double(), "W": p["W"].double(), "y": p["y"][:n]}
    h = part["h"].requires_grad_()
    logp, loss = naive(h, part, cfg)
    (loss * n / cfg.n).backward()                                     # the divisor is that of all tokens
    return logp.detach(), h.grad


def main(cfg: Config) -> None:
    if cfg.trl and (reason := find_trl()):
        print(f"without TRL: {reason}")
        cfg.trl = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p = problem(cfg, device)
    logp, grad = exact(p, cfg)
    contenders = {"naive": naive, "ours": ours} | ({"trl": trl} if cfg.trl else {})
    costs, diff = {name: [] for name in contenders}, {}
    for turn in range(cfg.repeats + 1):
        for name, contender in contenders.items():
            cost, (logp_, grad_) = run(contender, p, cfg)
            diff[name] = max(float((logp_[:len(logp)] - logp).abs().max()),
                             float((grad_[:len(grad)] - grad).abs().max() / grad.abs().max()))
            if turn:                                       # the first one warms caches and library buffers up
                costs[name].append(cost)
    seconds, cpu, peak = ({name: pick(c[i] for c in costs[name]) for name in contenders}
                          for i, pick in enumerate((min, min, max)))
    for name in contenders:
        print(f"{name:6} peak {peak[name] / 2**20:6.0f} MiB   {seconds[name]:6.2f} s   {cpu[name]:6.2f} CPU s"
              f"   differs from float64 by {diff[name]:.1e}")
    print(json.dumps({"peak_vs_naive": round(peak["ours"] / peak["naive"], 4),
                      "time_vs_naive": round(seconds["ours"] / seconds["naive"], 4),
                      "peak_vs_trl": round(peak["ours"] / peak["trl"], 4) if cfg.trl else None,
                      "max_abs_diff": diff["ours"]}))


def find_trl() -> str:
    """Go on in .venv-trl, which is made where it is missing; returns why TRL is not there, "" when it is."""
    try:
        import trl  # noqa: F401
        return ""
    except ImportError as e:
        if Path(sys.prefix) == VENV:
            return f"{VENV.name} is broken ({e}); remove it and start again"
    python = VENV / "bin" / "python"
    if not (VENV / "ready").exists():
        print(f"making {VENV.name} with {TRL}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        packages = next((VENV / "lib").glob("python*")) / "site-packages"
        (packages / "project.pth").write_text(
            "\n".join(x for x in sys.path if x.endswith("-packages")), encoding="utf-8")
        same_torch = f"torch=={torch.__version__.partition('+')[0]}"
        pip = subprocess.run([python, "-m", "pip", "install", "--quiet", same_torch, TRL],
                             capture_output=True, encoding="utf-8")
        if pip.returncode:
            return f"pip could not install {TRL}: {pip.stderr.strip().splitlines()[-1]}"
        (VENV / "ready").touch()
    os.execv(python, [str(python), *sys.argv])


if __name__ == "__main__":
    runtime.launch(main)
